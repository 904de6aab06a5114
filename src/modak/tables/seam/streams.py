"""What runs inside the tasks of a seam read: rows out of Postgres under the point's snapshot, in lake types.

A stream is read batch by batch and whole columns are decoded at a time, so memory is bounded by one batch. The same
functions run in the driver for a delta that is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modak.catalog.pk import SEPARATOR
from modak.core.errors import Conflict, ModakError
from modak.lake.types import MappedColumn
from modak.tables.seam.reader import Access

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class HeapSplit:
    """One task's share of the heap."""

    access: Access
    query: str
    mapped: tuple[MappedColumn, ...]


@dataclass(frozen=True, slots=True)
class KeySplit:
    """One task's share of the identities in the delta; no tier key: it is part of the primary key."""

    access: Access
    query: str
    pk: tuple[MappedColumn, ...]
    tier_key: MappedColumn | None


@dataclass(frozen=True, slots=True)
class ImageSplit:
    """One task's share of the rows in the delta."""

    access: Access
    query: str
    mapped: tuple[MappedColumn, ...]


def heap_rows(split: HeapSplit) -> Iterator[pa.RecordBatch]:
    """The rows of a heap query."""
    from modak.lake.decode import arrow_schema, decoded

    schema = arrow_schema([column.column for column in split.mapped])
    yield from decoded(_batches(split), split.mapped, schema)


def delta_keys(split: KeySplit) -> Iterator[pa.RecordBatch]:
    """Primary key and tier key of every row of a delta query."""
    import pyarrow as pa

    from modak.lake.decode import arrow_schema

    columns = [*split.pk, *([split.tier_key] if split.tier_key else [])]
    schema = arrow_schema([column.column for column in columns])
    for batch in _batches(split):
        yield pa.RecordBatch.from_arrays(key_arrays(batch, split.pk, split.tier_key), schema=schema)


def delta_images(split: ImageSplit) -> Iterator[pa.RecordBatch]:
    """The rows whose texts a delta query picks."""
    import pyarrow as pa

    from modak.lake.decode import arrow_schema
    from modak.lake.parse import parse_text

    schema = arrow_schema([column.column for column in split.mapped])
    for batch in _batches(split):
        arrays = [parse_text(column, batch.column(at)) for at, column in enumerate(split.mapped)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def key_arrays(batch: pa.RecordBatch, pk: Sequence[MappedColumn], tier_key: MappedColumn | None) -> list[pa.Array]:
    """The identity columns from key texts and axis values, in the order primary key, tier key."""
    from modak.lake.parse import parse_text

    texts = key_texts(batch.column(0), len(pk))
    arrays = [parse_text(each, text) for each, text in zip(pk, texts, strict=True)]
    return arrays if tier_key is None else [*arrays, _moments(batch.column(1), tier_key)]


def key_texts(keys: pa.Array, parts: int) -> list[pa.Array]:
    """The texts of the key columns out of joined keys, a whole column at a time (`catalog.pk.decode` for many)."""
    import pyarrow.compute as pc

    if parts == 1:
        return [keys]
    pattern = SEPARATOR.join(rf"(?P<p{at}>(?:[^\\{SEPARATOR}]|\\.)*)" for at in range(parts))
    fields = pc.extract_regex(keys, f"(?s)^{pattern}$")
    return [pc.replace_substring_regex(pc.struct_field(fields, f"p{at}"), r"(?s)\\(.)", r"\1") for at in range(parts)]


def _moments(keys: pa.Array, tier_key: MappedColumn) -> pa.Array:
    """Axis values as values of the tier-key column; the ends of the axis are the lake's infinities."""
    import numpy as np
    import pyarrow as pa

    from modak.lake.decode import INT32_MAX, INT64_MAX, arrow_type

    target = arrow_type(tier_key.column.type)
    if pa.types.is_integer(target):
        return keys.cast(target)
    narrow = pa.types.is_date(target)
    limit = INT32_MAX if narrow else INT64_MAX
    values: Any = np.clip(np.asarray(keys), -limit, limit)
    return pa.array(values.astype(np.int32) if narrow else values, pa.int32() if narrow else pa.int64()).cast(target)


def _batches(split: HeapSplit | KeySplit | ImageSplit) -> Iterator[pa.RecordBatch]:
    from modak.postgres.arrow import stream

    access = split.access
    try:
        opened = stream(
            access.dsn,
            split.query,
            snapshot=access.snapshot,
            batch_bytes=BATCH_BYTES,
            statement_millis=access.statement_millis,
        )
    except Conflict as conflict:
        # The transaction that exported the snapshot is over.
        raise ended() if conflict.code == "export.snapshot_lost" else conflict from None
    with opened:
        yield from opened


def ended() -> ModakError:
    """The failure of a read after its point in time was given up."""
    return ModakError(
        "seam.snapshot_ended",
        "The snapshot of this read has ended.",
        hint="Read again, or keep a snapshot open for as long as its frames are used: with modak.snapshot(…) as at: …",
    )
