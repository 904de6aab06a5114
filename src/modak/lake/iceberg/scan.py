"""The reader of data files: the columns of one Parquet file in a lake table's schema, in batches, with row positions.

Runs inside Spark tasks and in the driver, wherever rows of the lake are looked at one file at a time (locate, verify,
rewrites). Columns are found by Iceberg's field ids, so renames, additions and widened types since the file was written
are seen as every Iceberg reader sees them. Memory is bounded by one batch plus the pages of one row group's columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from modak.core.errors import ModakError
from modak.lake.changes import Range
from modak.lake.decode import FIELD_ID, arrow_schema
from modak.lake.iceberg.output import parquet_file, storage_errors
from modak.lake.model import LakeColumn

POSITION = "_pos"
BATCH_ROWS = 262_144

_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "date": date.fromisoformat,
    "timestamp": datetime.fromisoformat,
    "timestamptz": datetime.fromisoformat,
    "binary": bytes.fromhex,
    "uuid": lambda text: UUID(text).bytes,
    "float": float,
    "double": float,
    "decimal": Decimal,
}


def scan_file(
    path: str,
    columns: Sequence[LakeColumn],
    *,
    deleted: BitMap64 | None = None,
    with_positions: bool = False,
    batch_rows: int = BATCH_ROWS,
    rows: Range | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a data file without the deleted ones, in the schema of `columns`, `_pos` at the end when asked for.

    `rows` only skips row groups whose statistics exclude the range (its column must be one of `columns`): rows outside
    of the range can still come. Positions count from the start of the file, whatever was skipped.
    """
    gone = sorted_positions(deleted)
    with storage_errors(path), parquet_file(path) as file:
        view = _View(file, columns, with_positions=with_positions)
        start = 0
        for group in range(file.metadata.num_row_groups):
            if rows is None or view.may_hold(group, rows):
                for batch in view.batches(group, start, batch_rows):
                    yield without_deleted(batch, gone, start)
                    start += len(batch)
            else:
                start += file.metadata.row_group(group).num_rows


def scan_schema(columns: Sequence[LakeColumn], *, with_positions: bool = False) -> pa.Schema:
    """The schema of the batches of a scan."""
    schema = arrow_schema(columns)
    return schema.append(pa.field(POSITION, pa.int64(), nullable=False)) if with_positions else schema


class _View:
    """An open Parquet file, seen as a table of the wanted columns."""

    def __init__(self, file: pq.ParquetFile, columns: Sequence[LakeColumn], *, with_positions: bool) -> None:
        self._file = file
        self._columns = columns
        self._schema = scan_schema(columns, with_positions=with_positions)
        self._with_positions = with_positions
        places = _found(file.schema_arrow, columns)
        self._names = [None if at is None else file.schema_arrow.field(at).name for at in places]
        self._filled = [
            initial_value(column) if at is None else None for column, at in zip(columns, places, strict=True)
        ]

    def batches(self, group: int, start: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The batches of a row group that starts at a position."""
        for batch, size in self._read(group, batch_rows):
            arrays: list[Any] = []
            for at, name in enumerate(self._names):
                kind = self._schema.field(at).type
                if name is None or batch is None:
                    arrays.append(repeated(self._filled[at], size, kind))
                else:
                    # By name: Parquet selects by path prefix, so that column `a` brings a column `a.b` with it.
                    arrays.append(_as(batch.column(name), kind, self._columns[at].name))
            if self._with_positions:
                arrays.append(pa.array(np.arange(start, start + size, dtype=np.int64)))
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)
            start += size

    def may_hold(self, group: int, rows: Range) -> bool:
        """Whether statistics allow rows of a range in a row group."""
        at = next((at for at, column in enumerate(self._columns) if column.name == rows.column), None)
        name = None if at is None else self._names[at]
        if name is None or not _on_axis(self._file.schema_arrow.field(name).type):
            return True
        chunks = (self._file.metadata.row_group(group).column(leaf) for leaf in range(self._file.metadata.num_columns))
        statistics = next((chunk.statistics for chunk in chunks if chunk.path_in_schema == name), None)
        if statistics is None or not statistics.has_min_max:
            return True
        below = rows.lower is not None and statistics.max_raw < rows.lower
        above = rows.upper is not None and statistics.min_raw >= rows.upper
        return not below and not above

    def _read(self, group: int, batch_rows: int) -> Iterator[tuple[pa.RecordBatch | None, int]]:
        names = [name for name in self._names if name is not None]
        if names:
            for batch in self._file.iter_batches(batch_rows, row_groups=[group], columns=names, use_threads=False):
                yield batch, len(batch)
            return
        # A file that has none of the columns still has its rows.
        left = self._file.metadata.row_group(group).num_rows
        while left > 0:
            yield None, min(left, batch_rows)
            left -= batch_rows


def without_deleted(batch: pa.RecordBatch, gone: Any, start: int) -> pa.RecordBatch:
    """A batch that begins at a position of its file, without the rows whose positions are gone."""
    if gone is None:
        return batch
    size = len(batch)
    low, high = np.searchsorted(gone, [start, start + size])
    if low == high:
        return batch
    kept = np.ones(size, bool)
    kept[gone[low:high] - start] = False
    return batch.filter(pa.array(kept))


def sorted_positions(deleted: BitMap64 | None) -> Any:
    """Deleted positions as an ascending array, for `without_deleted`; nothing when there are none."""
    if not deleted:
        return None
    return np.frombuffer(deleted.to_array(), np.uint64).astype(np.int64)


def _found(schema: pa.Schema, columns: Sequence[LakeColumn]) -> list[int | None]:
    """Where each column stands in the file. A file without any field id (adopted) is read by names."""
    by_id: dict[int, int] = {}
    for at, field in enumerate(schema):
        number = (field.metadata or {}).get(FIELD_ID)
        if number is not None:
            by_id[int(number)] = at
    if by_id:
        return [None if column.field_id is None else by_id.get(column.field_id) for column in columns]
    by_name = {field.name: at for at, field in enumerate(schema)}
    return [next((by_name[name] for name in _file_names(column) if name in by_name), None) for column in columns]


def _file_names(column: LakeColumn) -> tuple[str, ...]:
    return (column.name,) if column.file_names is None else column.file_names


def _on_axis(kind: pa.DataType) -> bool:
    """Whether raw statistics of the type are axis values."""
    if pa.types.is_timestamp(kind):
        return bool(kind.unit == "us")
    return bool(pa.types.is_signed_integer(kind) or pa.types.is_date32(kind))


def _as(array: pa.Array, target: pa.DataType, name: str) -> pa.Array:
    """Values of an older or foreign file in the type of today's column."""
    if array.type == target:
        return array
    if pa.types.is_list(target):
        if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
            raise _unreadable(name, array.type, target)
        plain = array if pa.types.is_list(array.type) else array.cast(pa.list_(array.type.value_type))
        elements = _as(plain.values, target.value_type, name)
        return pa.Array.from_buffers(
            target, len(plain), plain.buffers()[:2], plain.null_count, plain.offset, children=[elements]
        )
    plain = array.storage if isinstance(array, pa.ExtensionArray) else array
    try:
        if isinstance(target, pa.UuidType):
            return pa.ExtensionArray.from_storage(target, plain.cast(target.storage_type))
        return plain.cast(target)
    except pa.ArrowException as error:
        raise _unreadable(name, array.type, target) from error


def initial_value(column: LakeColumn) -> Any:
    """The value that rows of a file without the column show."""
    if column.initial_default is None:
        return None
    value = json.loads(column.initial_default)
    kind = "decimal" if column.type.startswith("decimal") else column.type
    return _FROM_JSON[kind](value) if kind in _FROM_JSON else value


def repeated(value: Any, size: int, kind: pa.DataType) -> pa.Array:
    """A column of one value, or of NULL."""
    if value is None:
        return pa.nulls(size, kind)
    if isinstance(kind, pa.UuidType):
        return pa.ExtensionArray.from_storage(kind, pa.repeat(pa.scalar(value, kind.storage_type), size))
    return pa.repeat(pa.scalar(value, kind), size)


def _unreadable(name: str, kind: pa.DataType, target: pa.DataType) -> ModakError:
    return ModakError(
        "lake.file_type",
        f"A data file holds column {name} as {kind}, which cannot be read as {target}.",
        hint="Did something other than Modak write this file?",
    )
