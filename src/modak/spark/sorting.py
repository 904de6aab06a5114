"""Rows in order, whatever their number: a DuckDB connection in the task sorts with a memory limit and spills.

Sorted by columns, or z-ordered: then every column's value becomes its rank in a sample, and the bits of the ranks are
interleaved, so that rows that are near in all of the columns are near in the file. Memory is bounded by the limit plus
the sample.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MEMORY = "512MB"
SAMPLE_ROWS = 200_000
_BITS = 16
_PLACE = "modak place"
_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)


def sorted_batches(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, by: Sequence[str] = (), zorder: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """The same rows, in the order of `by` (NULL first), or along the z-curve of `zorder`."""
    import duckdb

    plain = pa.schema([pa.field(field.name, _storage(field.type)) for field in schema])
    rows: Iterator[pa.RecordBatch] = (_unwrapped(batch, plain) for batch in batches)
    if zorder:
        rows, plain = _placed(rows, plain, zorder)
        by = (_PLACE,)
    order = ", ".join('"' + name.replace('"', '""') + '" ASC NULLS FIRST' for name in by)
    names = ", ".join('"' + field.name.replace('"', '""') + '"' for field in schema)
    with tempfile.TemporaryDirectory(prefix="modak-sort-") as folder, duckdb.connect() as conn:
        conn.execute(f"SET memory_limit = '{MEMORY}'")
        conn.execute(f"SET temp_directory = '{folder}'")
        conn.execute("SET threads = 1")
        conn.execute("SET TimeZone = 'UTC'")
        source = pa.RecordBatchReader.from_batches(plain, rows)
        conn.register("source", source)
        answer = conn.execute(f"SELECT {names} FROM source ORDER BY {order}")  # noqa: S608
        for batch in answer.to_arrow_reader(122_880):
            yield _wrapped(batch, schema)


def _placed(
    rows: Iterator[pa.RecordBatch], schema: pa.Schema, columns: Sequence[str]
) -> tuple[Iterator[pa.RecordBatch], pa.Schema]:
    """Every row with its place on the curve; ranks come from the first rows, which are kept back for that."""
    sample: list[pa.RecordBatch] = []
    size = 0
    for batch in rows:
        sample.append(batch)
        size += len(batch)
        if size >= SAMPLE_ROWS:
            break
    table = pa.Table.from_batches(sample, schema)
    ladders = [_ladder(table.column(name)) for name in columns]
    wider = schema.append(pa.field(_PLACE, pa.uint64()))

    def placed() -> Iterator[pa.RecordBatch]:
        for batch in chain(sample, rows):
            ranks = [_rank(batch.column(name), ladder) for name, ladder in zip(columns, ladders, strict=True)]
            place = pa.array(_interleaved(ranks))
            yield pa.RecordBatch.from_arrays([*batch.columns, place], schema=wider)

    return placed(), wider


def _ladder(column: pa.ChunkedArray) -> Any:
    values = np.sort(_numbers(column.combine_chunks()))
    steps = np.linspace(0, max(len(values) - 1, 0), min(len(values), 1 << _BITS)).astype(np.int64)
    return values[steps] if len(values) else values


def _rank(column: pa.Array, ladder: Any) -> Any:
    places = np.searchsorted(ladder, _numbers(column), side="right").astype(np.uint64)
    return (places * np.uint64((1 << _BITS) - 1)) // np.uint64(max(len(ladder), 1))


def _numbers(column: pa.Array) -> Any:
    """Values as numbers of the same order, as far as sixty bits tell it; NULL is the least."""
    kind = column.type
    if any(holds(kind) for holds in _TEXTS):
        return _heads(column)
    if pa.types.is_temporal(kind):
        column = column.cast(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    try:
        numbers = column.cast(pa.float64(), safe=False)
    except pa.ArrowInvalid:
        numbers = pc.cast(column.cast(pa.string()), pa.float64())
    except pa.ArrowNotImplementedError:
        # A list, say, by a policy that was written by hand: it has no place, and the rows are laid by the others.
        return np.zeros(len(column))
    return np.asarray(numbers.fill_null(-np.inf))


def _heads(column: pa.Array) -> Any:
    """The first six bytes of texts as one number."""
    texts = column.cast(pa.large_binary()).fill_null(b"")
    if not len(texts):
        return np.empty(0, np.float64)
    texts = pa.concat_arrays([texts])
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    found = np.zeros(len(texts), np.float64)
    lengths = np.diff(offsets)
    for at in range(6):
        here = lengths > at
        found *= 256
        found[here] += data[offsets[:-1][here] + at]
    return found


def _interleaved(ranks: Sequence[Any]) -> Any:
    place = np.zeros(len(ranks[0]), np.uint64)
    width = len(ranks)
    for bit in range(min(_BITS, 64 // width)):
        for at, rank in enumerate(ranks):
            taken = (rank >> np.uint64(_BITS - 1 - bit)) & np.uint64(1)
            place |= taken << np.uint64(63 - (bit * width + at))
    return place


def _storage(kind: pa.DataType) -> pa.DataType:
    plain = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return pa.list_(_storage(plain.value_type)) if pa.types.is_list(plain) else plain


def _unwrapped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        array.storage if isinstance(array, pa.ExtensionArray) else _cast(array, field.type)
        for array, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


def _wrapped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for array, field in zip(batch.columns, schema, strict=True):
        if isinstance(field.type, pa.BaseExtensionType):
            plain = _cast(array, field.type.storage_type)
            arrays.append(pa.ExtensionArray.from_storage(field.type, plain))
        else:
            arrays.append(_cast(array, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
