"""The rows of a source in the lake's types, batch after batch, and what is wrong with some of them.

Runs inside tasks and in the driver. Parquet is read by column and cast, JSON lines go through Postgres' texts
(`spark/texts.py`). Memory is bounded by one batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modak.core.errors import ModakError
from modak.lake.model import LakeColumn
from modak.lake.types import MappedColumn
from modak.tables.fold.read import Shape
from modak.tables.ingest.inputs import Source, fetched
from modak.tables.ingest.plan import SHOWN, Room

if TYPE_CHECKING:
    import pyarrow as pa

    from modak.spark.texts import TextColumn

BATCH_ROWS = 65_536

Fault = tuple[int, str]
"""A row (or line) by its number from 1, and the reason."""


@dataclass(slots=True)
class Rows:
    """One batch in the schema of the asked columns, with the number of each row in its source."""

    batch: pa.RecordBatch
    numbers: Any
    faults: list[Fault] = field(default_factory=list)


@dataclass(slots=True)
class Parsed:
    """Texts that became values: which rows did, and what is wrong with (some of) the others."""

    batch: pa.RecordBatch
    numbers: Any
    kept: Any
    faults: list[Fault]


@dataclass(frozen=True, slots=True)
class Intake:
    """How rows come into one table."""

    shape: Shape
    room: Room
    documents: frozenset[str] = frozenset()
    """Columns that hold JSON."""


def rows_of(source: Source, intake: Intake, columns: Sequence[LakeColumn]) -> Iterator[Rows]:
    """The asked columns of a source."""
    if source.kind == "jsonl":
        yield from _json_rows(source, intake, columns)
    else:
        yield from _parquet_rows(source, columns)


def _parquet_rows(source: Source, columns: Sequence[LakeColumn]) -> Iterator[Rows]:
    import numpy as np
    import pyarrow as pa

    from modak.lake.decode import arrow_schema
    from modak.lake.iceberg.output import parquet_file, storage_errors
    from modak.lake.iceberg.scan import _as, initial_value, repeated

    schema = arrow_schema(columns)
    loose = pa.schema([one.with_nullable(True) for one in schema])
    with storage_errors(source.uri), parquet_file(source.uri) as file:
        here = [column.name for column in columns if column.name in file.schema_arrow.names]
        at = 1
        for batch in file.iter_batches(BATCH_ROWS, columns=here, use_threads=False):
            arrays = []
            for column, wanted in zip(columns, schema, strict=True):
                if column.name in here:
                    arrays.append(_as(_plain(batch.column(column.name)), wanted.type, column.name))
                else:
                    arrays.append(repeated(initial_value(column), len(batch), wanted.type))
            made = pa.RecordBatch.from_arrays(arrays, schema=loose)
            yield Rows(made, np.arange(at, at + len(batch), dtype=np.int64))
            at += len(batch)


def _plain(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _json_rows(source: Source, intake: Intake, columns: Sequence[LakeColumn]) -> Iterator[Rows]:
    import numpy as np

    from modak.lake.decode import arrow_schema
    from modak.spark.texts import read_texts

    mapped = {one.column.name: one for one in intake.shape.mapped}
    schema = arrow_schema(columns)
    # All columns of the table are known names, also when only some are asked for.
    known = text_columns(intake)
    with tempfile.TemporaryDirectory(prefix="modak-lines-") as folder:
        for texts in read_texts(fetched(source, Path(folder)), "jsonl", known):
            made = parsed(texts.rows, np.asarray(texts.lines), [mapped[one.name] for one in columns], schema)
            yield Rows(made.batch, made.numbers, [*texts.faults, *made.faults])


def text_columns(intake: Intake) -> list[TextColumn]:
    """How the values of each column are spelled as texts."""
    from modak.spark.texts import TextColumn

    made = []
    for one in intake.shape.mapped:
        column = one.column
        if column.name in intake.documents:
            made.append(TextColumn(column.name, "json"))
        elif column.element is not None:
            made.append(TextColumn(column.name, "list"))
        else:
            made.append(TextColumn(column.name, "binary" if column.type == "binary" else "plain"))
    return made


def parsed(texts: pa.RecordBatch, numbers: Any, mapped: Sequence[MappedColumn], schema: pa.Schema) -> Parsed:
    """A batch of Postgres texts in the lake's types; rows with a text that is no value of its column become faults."""
    import numpy as np
    import pyarrow as pa

    loose = pa.schema([one.with_nullable(True) for one in schema])
    faults: list[Fault] = []
    bad = np.zeros(len(texts), bool)
    for one in mapped:
        column = _texts_of(texts, one)
        try:
            _parse(one, column)
        except (ModakError, pa.ArrowException, ValueError, IndexError):
            for at in _misspelt(one, column):
                bad[at] = True
                if len(faults) < SHOWN:
                    why = f"column {one.column.name}: {column[at].as_py()[:60]!r} is no {one.column.type}"
                    faults.append((int(numbers[at]), why))
    kept = ~bad
    if bad.any():
        texts = texts.filter(pa.array(kept))
    arrays = [_parse(one, _texts_of(texts, one)) for one in mapped]
    return Parsed(pa.RecordBatch.from_arrays(arrays, schema=loose), numbers[kept], kept, faults)


def _texts_of(texts: pa.RecordBatch, one: MappedColumn) -> pa.Array:
    import pyarrow as pa

    if one.column.name in texts.schema.names:
        return texts.column(one.column.name)
    return pa.nulls(len(texts), pa.string())


def _parse(one: MappedColumn, column: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    from modak.lake.decode import arrow_type
    from modak.lake.parse import parse_text

    kind = arrow_type(one.column.type)
    if not len(column) or column.null_count == len(column):
        return pa.nulls(len(column), kind)
    if pa.types.is_boolean(kind):
        known = pa.array(["t", "f", "true", "false"])
        if not pc.all(pc.or_(pc.is_in(column, value_set=known), pc.is_null(column))).as_py():
            raise ValueError("no boolean")
    if pa.types.is_string(kind) and pc.any(pc.match_substring(column, "\x00")).as_py():
        raise ValueError("Postgres holds no zero character")
    made = parse_text(one, column)
    if made.null_count != column.null_count:
        raise ValueError("a text was lost")
    return made


def _misspelt(one: MappedColumn, column: pa.Array) -> Iterator[int]:
    """Which texts are no values, by halving: few are wrong as a rule."""
    import pyarrow as pa

    waiting = [(0, len(column))]
    while waiting:
        start, size = waiting.pop()
        try:
            _parse(one, column.slice(start, size))
        except (ModakError, pa.ArrowException, ValueError, IndexError):
            if size == 1:
                yield start
            else:
                half = size // 2
                waiting += [(start + half, size - half), (start, half)]


def axis_of(column: pa.Array) -> Any:
    """Tier keys on their axis; no NULL among them."""
    import numpy as np
    import pyarrow as pa

    plain = column.cast(pa.int32()) if pa.types.is_date32(column.type) else column
    return np.asarray(plain.cast(pa.int64()))


def misplaced(rows: Rows, columns: Sequence[LakeColumn], tier_key: str, room: Room | None) -> list[Fault]:
    """Rows without a value that they must have, or outside of the room; the first of each batch."""
    import numpy as np

    found: list[Fault] = []
    for column, values in zip(columns, rows.batch.columns, strict=True):
        if values.null_count and (column.required or column.name == tier_key):
            nulls = np.flatnonzero(np.asarray(values.is_null()))
            found += [(int(rows.numbers[at]), f"column {column.name} is NULL") for at in nulls[:SHOWN]]
    keys = rows.batch.column(tier_key)
    if room is None or found or not len(keys):
        return found
    axis = axis_of(keys)
    outside = axis >= room.upper
    if room.lower is not None:
        outside |= axis < room.lower
    for start, end in room.leaves:
        outside |= (axis >= start) & (axis < end)
    for at in np.flatnonzero(outside)[:SHOWN]:
        key = int(axis[at])
        found.append((int(rows.numbers[at]), room.refusal(key, key) or "outside"))
    return found
