"""From delta rows to lake rows: the SQL that reads a share, and the columns that its answer becomes.

Runs inside tasks (or the driver, for few rows). The identity of a row, key texts and tier key, is taken from the delta
itself, for tombstones and images alike; all other columns come out of the image by name as texts, which is the fastest
of the ways that were measured (twice `jsonb_to_record`, a third more than parsing the JSON here). Memory is bounded by
one Arrow batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psycopg import sql

from modak.catalog.records import DeltaRange, TableRecord
from modak.lake.model import LakeColumn, LakeTable
from modak.lake.types import MappedColumn
from modak.postgres.model import PgTable
from modak.tables.columns import shown_unsaid

if TYPE_CHECKING:
    import pyarrow as pa

UPSERT = 1
_ENDS = {"date": 2**31 - 1, "timestamp": 2**63 - 1, "timestamptz": 2**63 - 1}
"""How the lake holds infinity; minus infinity is its negative."""
_AXIS_LOW, _AXIS_HIGH = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Shape:
    """How a delta row of one table becomes a lake row. Columns stand in the order of the heap."""

    columns: tuple[LakeColumn, ...]
    mapped: tuple[MappedColumn, ...]
    pk: tuple[str, ...]
    tier_key: str
    missing: Mapping[str, str] = field(default_factory=dict)
    """What an image from before a column shows in it, as Postgres' text, where no initial default says it."""

    @property
    def key_names(self) -> tuple[str, ...]:
        """The columns of a row's identity."""
        return tuple(dict.fromkeys((*self.pk, self.tier_key)))

    @property
    def keys(self) -> tuple[LakeColumn, ...]:
        """The same as lake columns."""
        known = {column.name: column for column in self.columns}
        return tuple(known[name] for name in self.key_names)

    @property
    def parts(self) -> tuple[str, ...]:
        """Key columns that are read from the key text."""
        return tuple(name for name in self.pk if name != self.tier_key)

    @property
    def texts(self) -> tuple[LakeColumn, ...]:
        """Columns that are read from the image."""
        return tuple(column for column in self.columns if column.name not in self.key_names)

    @property
    def defaulted(self) -> tuple[LakeColumn, ...]:
        """Columns that show a default where an image from before them lacks them."""
        return tuple(column for column in self.texts if column.initial_default is not None)


def shape_of(record: TableRecord, heap: PgTable, mapped: Sequence[MappedColumn], lake: LakeTable) -> Shape:
    """The shape of a table's delta rows, with the names that its key columns have now."""
    names = {column.attnum: column.name for column in heap.columns}
    known = {column.name: column for column in lake.schema}
    return Shape(
        columns=tuple(known[column.column.name] for column in mapped),
        mapped=tuple(mapped),
        pk=tuple(names.get(number, name) for number, name in zip(record.pk_attnums, record.pk_columns, strict=True)),
        tier_key=names.get(record.tier_attnum, record.tier_key),
        missing=shown_unsaid(heap, known),
    )


def select(shape: Shape, table_id: int, rows: DeltaRange) -> str:
    """The query of a share. Text, because it travels to an ADBC connection; every name and value in it is quoted."""
    wanted = ["op", "tier_key"]
    wanted += [f"{_part(shape.pk.index(name), len(shape.pk))} AS k{at}" for at, name in enumerate(shape.parts)]
    wanted += [f"{_text(shape, column.name)} AS c{at}" for at, column in enumerate(shape.texts)]
    wanted += [f"payload ? {_literal(column.name)} AS p{at}" for at, column in enumerate(shape.defaulted)]
    where = [f"table_id = {table_id:d}", "folded_generation IS NULL", f"tier_key >= {rows.lower:d}"]
    if rows.lower_pk is not None:
        where.append(f'(tier_key > {rows.lower:d} OR pk COLLATE "C" >= {_literal(rows.lower_pk)})')
    if rows.upper_pk is None:
        where.append(f"tier_key < {rows.upper:d}")
    else:
        where.append(f"tier_key <= {rows.upper:d}")
        where.append(f'(tier_key < {rows.upper:d} OR pk COLLATE "C" < {_literal(rows.upper_pk)})')
    return f"SELECT {', '.join(wanted)} FROM modak.delta WHERE {' AND '.join(where)}"  # noqa: S608


def _text(shape: Shape, name: str) -> str:
    """A column's text in an image, or what it shows in one from before the column."""
    held = f"payload ->> {_literal(name)}"
    if name not in shape.missing:
        return held
    return f"CASE WHEN payload ? {_literal(name)} THEN {held} ELSE {_literal(shape.missing[name])} END"


def keys_of(batch: pa.RecordBatch, shape: Shape) -> dict[str, pa.Array]:
    """The key columns of every row, by name, in the lake's types."""
    from modak.lake.parse import parse_text

    mapped = {column.column.name: column for column in shape.mapped}
    keys = {name: parse_text(mapped[name], batch.column(f"k{at}")) for at, name in enumerate(shape.parts)}
    keys[shape.tier_key] = _tier_keys(batch.column("tier_key"), mapped[shape.tier_key].column.type)
    return keys


def images_of(batch: pa.RecordBatch, keys: Mapping[str, pa.Array], shape: Shape, schema: pa.Schema) -> pa.RecordBatch:
    """The rows that upserts bring, in the schema of a data file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from modak.lake.iceberg.scan import initial_value, repeated
    from modak.lake.parse import parse_text

    upserts = pc.equal(batch.column("op"), UPSERT)
    alone = pc.all(upserts).as_py()
    rows = batch if alone else batch.filter(upserts)
    mapped = {column.column.name: column for column in shape.mapped}
    defaulted = {column.name: f"p{at}" for at, column in enumerate(shape.defaulted)}
    made: dict[str, pa.Array] = {name: column if alone else column.filter(upserts) for name, column in keys.items()}
    for at, column in enumerate(shape.texts):
        values = parse_text(mapped[column.name], rows.column(f"c{at}"))
        if column.name in defaulted:
            present = rows.column(defaulted[column.name])
            if not pc.all(present).as_py():
                default = repeated(initial_value(column), len(rows), values.type)
                values = _chosen(present, values, default)
        made[column.name] = values
    return pa.RecordBatch.from_arrays([made[field.name] for field in schema], schema=schema)


def _chosen(present: pa.Array, values: pa.Array, default: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(values, pa.ExtensionArray):
        return pc.if_else(present, values, default)
    return pa.ExtensionArray.from_storage(values.type, pc.if_else(present, values.storage, default.storage))


def _tier_keys(axis: pa.Array, kind: str) -> pa.Array:
    """Axis values in the type of the tier-key column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from modak.lake.decode import arrow_type

    if kind in _ENDS:
        end = _ENDS[kind]
        extent: Any = pc.min_max(axis)
        if extent["min"].as_py() == _AXIS_LOW or extent["max"].as_py() == _AXIS_HIGH:
            axis = pc.if_else(pc.equal(axis, _AXIS_LOW), pa.scalar(-end, pa.int64()), axis)
            axis = pc.if_else(pc.equal(axis, _AXIS_HIGH), pa.scalar(end, pa.int64()), axis)
    if kind == "date":
        return axis.cast(pa.int32()).cast(pa.date32())
    return axis.cast(arrow_type(kind))


def _part(at: int, count: int) -> str:
    """One column out of the key text; the slow way only where a part holds a separator or a backslash."""
    if count == 1:
        return "pk"
    inside = r"((?:[^\\\x1f]|\\.)*)"
    pattern = _literal("^" + r"\x1f".join([inside] * count) + "$")
    mark, marked = _literal(r"\\(.)"), _literal(r"\1")
    escaped = f"regexp_replace((regexp_match(pk, {pattern}))[{at + 1}], {mark}, {marked}, 'g')"
    return f"CASE WHEN strpos(pk, chr(92)) = 0 THEN split_part(pk, chr(31), {at + 1}) ELSE {escaped} END"


def _literal(text: str) -> str:
    return sql.Literal(text).as_string()
