"""Footers: what files say about themselves, read from their ends alone.

On a bucket the last few kilobytes are enough for nearly every file; one with a longer footer is asked a second time.

Memory: one footer at a time; a summary of each stays.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from modak.core.errors import ModakError
from modak.storage.objects import Meta, Objects, Stored

if TYPE_CHECKING:
    import pyarrow as pa

_Found = TypeVar("_Found", Meta, Stored)
_TAIL = 64 << 10
_MAGIC = b"PAR1"
_END = 8
"""The length of the footer and the magic behind it."""


@dataclass(frozen=True)
class Pinned:
    """A file as a reader found it; `earliest` and `latest` are what its footer says of `time`."""

    meta: Meta
    schema: bytes
    rows: int
    earliest: datetime | None
    latest: datetime | None
    problem: str = ""
    tags: tuple[str, ...] = ()


def footers(item: tuple[Objects, Sequence[Meta]]) -> list[Pinned]:
    """What the footers of some files say; runs in a task."""
    objects, metas = item
    return [_pinned(objects, meta) for meta in metas]


def footer(objects: Objects, meta: Meta) -> Any:
    """The footer of a file as pyarrow reads it; an error of pyarrow's where the file has none."""
    import pyarrow.parquet as pq

    stored = still_there(meta, lambda: objects.tail(meta.path, _TAIL))
    length = int.from_bytes(stored.data[-_END:-4], "little") + _END
    if _TAIL < length <= meta.size:
        stored = still_there(meta, lambda: objects.tail(meta.path, length))
    # Offsets in a footer count from the beginning of the file, and nobody follows them here.
    return pq.read_metadata(io.BytesIO(_MAGIC + stored.data))


def still_there(meta: Meta, look: Callable[[], _Found | None]) -> _Found:
    """What is found at a path, if it is still the version that was pinned."""
    found: _Found | None
    try:
        found = look()
    except ModakError as error:
        if error.code != "storage.not_found":
            raise
        found = None
    if found is None or (meta.etag and (found if isinstance(found, Meta) else found.meta).etag != meta.etag):
        raise ModakError(
            "measurements.file_gone",
            f"{meta.path} has been compacted away since it was listed.",
            hint="Read again; hold=… keeps the files of a frame for longer.",
            retryable=True,
        )
    return found


def _pinned(objects: Objects, meta: Meta) -> Pinned:
    import pyarrow as pa

    from modak.measurements.types import TAGS_KEY

    try:
        read = footer(objects, meta)
        schema = read.schema.to_arrow_schema().remove_metadata()
        earliest, latest = _times(read, schema)
        tags = tuple(tag for tag in (read.metadata or {}).get(TAGS_KEY, b"").decode().split(",") if tag)
        return Pinned(meta, schema.serialize().to_pybytes(), read.num_rows, earliest, latest, tags=tags)
    except (pa.ArrowException, OSError, ValueError) as error:
        return Pinned(meta, b"", 0, None, None, (str(error).splitlines() or ["it is corrupt"])[0][:200])


def _times(read: Any, schema: pa.Schema) -> tuple[datetime | None, datetime | None]:
    """Bounds of `time` by the statistics of the row groups; nothing where they cannot be trusted."""
    import pyarrow as pa

    index = schema.get_field_index("time")
    if index < 0 or not pa.types.is_timestamp(schema.field(index).type) or read.num_rows == 0:
        return None, None
    bounds: list[datetime] = []
    for number in range(read.num_row_groups):
        group = read.row_group(number)
        column = next(
            (group.column(at) for at in range(group.num_columns) if group.column(at).path_in_schema == "time"), None
        )
        stats = column.statistics if column is not None else None
        if stats is None or not stats.has_min_max or not isinstance(stats.min, datetime):
            return None, None
        bounds += [stats.min, stats.max]
    return utc(min(bounds)), utc(max(bounds))


def utc(moment: datetime | None) -> datetime | None:
    """A moment in UTC; one without a zone is taken to be."""
    if moment is None:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
