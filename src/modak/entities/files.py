"""Parquet files of a store: written on a local disk, rolled by the bytes that are in them, then put into the store.

Runs inside tasks. A writer holds the rows of one row group; what it has put under `_tmp` is removed again if the task
fails. A reader gets files as local paths, from the folder itself or fetched from the bucket.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.entities.manifest import ManifestEntry
from modak.entities.plan import HOUR_MS
from modak.storage.objects import Objects

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS = 65_536
SAMPLE_ROWS = 4_096
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Compression:
    """How Parquet files are compressed."""

    codec: str = "zstd"
    level: int = 3


@dataclass(frozen=True, slots=True)
class Draft:
    """A file under its temporary path, and what a manifest will say about it."""

    tmp: str
    row_count: int
    size_bytes: int
    checksum: str
    min_row_id: str
    max_row_id: str
    min_time_slot: int
    max_time_slot: int
    tombstones: int


@dataclass
class _Open:
    """A file that takes row groups."""

    path: Path
    parquet: Any
    rows: int = 0
    low: str = ""
    high: str = ""
    first: int = 0
    last: int = 0
    tombstones: int = 0


class Writer:
    """Writes rows that come sorted by id into files of at most about `target_bytes`, or of `target_rows` exactly."""

    def __init__(
        self,
        objects: Objects,
        schema: pa.Schema,
        new_tmp: Callable[[], str],
        compression: Compression,
        *,
        target_bytes: int | None = None,
        target_rows: int | None = None,
    ) -> None:
        self._objects = objects
        self._schema = schema
        self._new_tmp = new_tmp
        self._compression = compression
        self._target_bytes = target_bytes
        self._target_rows = target_rows
        self._folder = tempfile.TemporaryDirectory(prefix="modak-entities-")
        self._open: _Open | None = None
        self._drafts: list[Draft] = []
        self._count = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                if self._open is not None:
                    self._open.parquet.close()
                self._objects.delete([draft.tmp for draft in self._drafts])
        finally:
            self._folder.cleanup()

    def write(self, table: pa.Table) -> None:
        """Take rows."""
        at = 0
        while at < table.num_rows:
            file = self._file(table)
            room = table.num_rows - at
            if self._target_rows is not None:
                room = min(room, self._target_rows - file.rows)
            part = table.slice(at, min(room, GROUP_ROWS))
            file.parquet.write_table(part, row_group_size=GROUP_ROWS)
            _note(file, part)
            at += part.num_rows
            full = self._target_rows is not None and file.rows >= self._target_rows
            if full or (self._target_bytes is not None and file.path.stat().st_size >= self._target_bytes):
                self._finish()

    def close(self, *, at_least_one: bool = False) -> list[Draft]:
        """Finish the last file and say what there is; where asked for, an empty file rather than none."""
        if at_least_one and not self._drafts and self._open is None:
            self._file(self._schema.empty_table())
        if self._open is not None:
            self._finish()
        return self._drafts

    def _file(self, first: pa.Table) -> _Open:
        import pyarrow.parquet as pq

        if self._open is None:
            path = Path(self._folder.name) / f"{self._count}.parquet"
            self._count += 1
            level = {"compression_level": self._compression.level} if self._compression.codec in _LEVELS else {}
            dictionaries = _repeating(first)
            self._open = _Open(
                path,
                pq.ParquetWriter(
                    str(path),
                    self._schema,
                    compression=self._compression.codec,
                    use_dictionary=dictionaries or False,
                    column_encoding=_differing(self._schema, dictionaries) or None,
                    store_decimal_as_integer=True,
                    **level,
                ),
            )
        return self._open

    def _finish(self) -> None:
        file, self._open = self._open, None
        if file is None:
            return
        file.parquet.close()
        size = file.path.stat().st_size
        checksum = checksum_of(file.path)
        tmp = self._new_tmp()
        reach("entities.before_upload")
        self._objects.upload(tmp, file.path)
        self._drafts.append(
            Draft(tmp, file.rows, size, checksum, file.low, file.high, file.first, file.last, file.tombstones)
        )
        reach("entities.uploaded")
        file.path.unlink(missing_ok=True)


_LEVELS = frozenset({"zstd", "gzip"})


def entry_of(draft: Draft, path: str, attributes: Any) -> ManifestEntry:
    """What a manifest says about a file at its final path."""
    return ManifestEntry(
        path=path,
        min_row_id=draft.min_row_id,
        max_row_id=draft.max_row_id,
        min_time_slot=draft.min_time_slot,
        max_time_slot=draft.max_time_slot,
        size_bytes=draft.size_bytes,
        row_count=draft.row_count,
        checksum=draft.checksum,
        tombstones=draft.tombstones,
        attributes=attributes,
    )


def checksum_of(path: Path) -> str:
    """The checksum of a file as manifests have it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


@contextmanager
def local_files(objects: Objects, entries: Sequence[ManifestEntry], *, verify: bool) -> Iterator[list[Path]]:
    """The files of entries on this machine for a block; `verify` refuses one that is not what was once written."""
    with tempfile.TemporaryDirectory(prefix="modak-entities-") as folder:
        paths: list[Path] = []
        for number, entry in enumerate(entries):
            path = objects.local(entry.path)
            if path is None:
                path = Path(folder) / f"{number}.parquet"
                try:
                    objects.fetch(entry.path, path)
                except ModakError as error:
                    raise missing(entry.path) if error.code == "storage.not_found" else error from None
            elif not path.exists():
                raise missing(entry.path)
            if verify and entry.checksum and checksum_of(path) != entry.checksum:
                raise ModakError(
                    "entities.damaged",
                    f"{entry.path} is not what was written: its checksum differs.",
                    hint="Nothing was changed. Restore the file, or export everything anew with entities init.",
                )
            paths.append(path)
        yield paths


def missing(path: str) -> Conflict:
    """A listed file is gone: either it was merged meanwhile, or somebody deleted it."""
    return Conflict(
        "entities.file_missing",
        f"{path} is listed and does not exist.",
        hint="Try again; if it stays, modak-worker entities reconcile tells what is lost.",
    )


def _repeating(table: pa.Table) -> list[str]:
    """The columns that are worth a dictionary, judged by their first rows: half as many values as rows, or fewer."""
    import pyarrow as pa
    import pyarrow.compute as pc

    head = table.slice(0, SAMPLE_ROWS)
    flat = [field.name for field in table.schema if not pa.types.is_nested(field.type)]
    return [name for name in flat if pc.count_distinct(head.column(name)).as_py() * 2 <= max(head.num_rows, 1)]


def _differing(schema: pa.Schema, dictionaries: Sequence[str]) -> dict[str, str]:
    """The columns of whole numbers, of which only the differences are written: times and counts lie close together."""
    import pyarrow as pa

    whole = [field.name for field in schema if pa.types.is_integer(field.type)]
    return {name: "DELTA_BINARY_PACKED" for name in whole if name not in dictionaries}


def _note(file: _Open, part: pa.Table) -> None:
    import pyarrow.compute as pc

    ids, stamps = part.column("row_id"), pc.min_max(part.column("changed_at"))
    first, last = stamps["min"].as_py() // HOUR_MS, stamps["max"].as_py() // HOUR_MS
    file.first = first if not file.rows else min(file.first, first)
    file.last = last if not file.rows else max(file.last, last)
    file.low = file.low or ids[0].as_py()
    file.high = ids[-1].as_py()
    file.tombstones += pc.sum(pc.not_equal(part.column("deleted_at"), 0)).as_py() or 0
    file.rows += part.num_rows
