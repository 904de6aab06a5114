"""The cold part of a seam read: the lake table at the pinned snapshot, with the heap's columns and the pinned range.

Columns are matched by attribute number, through the lake table's own property and Iceberg's field ids, because a
snapshot shows the names and columns of its own time. A column that it lacks shows what Postgres shows for such rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modak.core.axis import Axis
from modak.storage import remote
from modak.tables.columns import COLUMNS, RELID
from modak.tables.seam.columns import SeamColumn, backticked, by_name, spark_type
from modak.tables.seam.pinned import PinnedTable
from modak.tables.seam.plan import Span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_INT32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class LakeSide:
    """The lake table at the snapshot, and which of its columns is which column of the heap."""

    frame: DataFrame
    names: Mapping[str, str]
    """Heap name → name at the snapshot."""
    former: Mapping[str, tuple[str, ...]]
    """Heap name → other names under which the lake knows it, and so older payloads."""
    defaults: Mapping[str, str]
    """Heap name → Iceberg's JSON of the initial default, for columns that came after the snapshot."""

    def cold(self, columns: Sequence[SeamColumn], table: PinnedTable, span: Span) -> DataFrame:
        """The asked columns of the rows in the span."""
        tier = by_name(self.names[table.shape.tier_key])
        frame = self.frame
        for condition in within(tier, table, span):
            frame = frame.filter(condition)
        return frame.select(*(self._column(column) for column in columns))

    def _column(self, column: SeamColumn) -> Column:
        from pyspark.sql import functions

        kind = spark_type(column.mapped.column.type)
        there = self.names.get(column.name)
        if there is not None:
            found = by_name(there)
            same = self.frame.schema[there].dataType == kind
            return (found if same else found.cast(kind)).alias(column.name)
        text = missing_text(column, self.defaults.get(column.name))
        shown = functions.lit(None) if text is None else _literal(column, text)
        return shown.cast(kind).alias(column.name)


def lake_side(spark: SparkSession, table: PinnedTable) -> LakeSide:
    """Open the lake table at the pinned snapshot."""
    remote.knock(table.pin.metadata_location)
    lake = table.record.lake
    identifier = ".".join(map(backticked, ("modak", *lake.namespace, lake.name)))
    frame = spark.read.option("versionAsOf", str(table.pin.snapshot_id)).table(identifier)
    java: Any = frame._jdf
    iceberg = java.queryExecution().analyzed().collectLeaves().head().table().table()
    number = iceberg.snapshot(table.pin.snapshot_id).schemaId()
    then = _schema(spark, iceberg.schemas().get(number) if number is not None else iceberg.schema())
    now = _schema(spark, iceberg.schema())
    properties = iceberg.properties()
    ours = properties.get(RELID) == str(table.heap.oid)
    numbers: dict[str, str] = json.loads(properties.get(COLUMNS) or "{}") if ours else {}
    return LakeSide(frame, *_match(table.shape.columns, numbers, now, then))


def _match(
    columns: Sequence[SeamColumn],
    numbers: Mapping[str, str],
    now: Mapping[str, dict[str, Any]],
    then: Mapping[str, dict[str, Any]],
) -> tuple[dict[str, str], dict[str, tuple[str, ...]], dict[str, str]]:
    by_id = {field["id"]: name for name, field in then.items()}
    heap_names = {column.name for column in columns}
    names: dict[str, str] = {}
    former: dict[str, tuple[str, ...]] = {}
    defaults: dict[str, str] = {}
    for column in columns:
        current = numbers.get(str(column.heap.attnum)) if numbers else column.name
        field = now.get(current) if current is not None else None
        if current is None or field is None:
            continue
        before = by_id.get(field["id"])
        if before is not None:
            names[column.name] = before
        elif "initial-default" in field:
            defaults[column.name] = json.dumps(field["initial-default"])
        # A name that another column has now would give that column's values.
        older = dict.fromkeys(name for name in (current, before) if name and name not in heap_names)
        former[column.name] = tuple(older)
    return names, former, defaults


def within(tier: Column, table: PinnedTable, span: Span) -> list[Column]:
    """The conditions R ≤ tier key < T, which every lake scan carries: a lake may hold rows beyond its lines."""
    conditions = []
    for edge, lower in ((span.lower, True), (span.upper, False)):
        literal = _edge(table, edge)
        if literal is not None:
            conditions.append(tier >= literal if lower else tier < literal)
    return conditions


def missing_text(column: SeamColumn, initial: str | None) -> str | None:
    """What a row from before the column shows, as Postgres' text."""
    if initial is None:
        return column.heap.missing_value
    value = json.loads(initial)
    if isinstance(value, bool):
        return str(value).lower()
    return f"\\x{value}" if column.mapped.column.type == "binary" else str(value)


def _edge(table: PinnedTable, edge: int | None) -> Column | None:
    from pyspark.sql import functions

    if edge is None:
        return None
    axis = table.record.axis
    if axis is Axis.INTEGER:
        if table.shape.named(table.shape.tier_key).mapped.column.type == "int":
            # Of the column's own type, so that Iceberg can skip files by it; beyond its range nothing is cut off.
            clipped = min(max(edge, _INT32[0]), _INT32[1])
            return functions.lit(clipped).cast("int") if clipped == edge else functions.lit(edge).cast("long")
        return functions.lit(edge).cast("long")
    try:
        return functions.expr(_moment(axis, axis.literal(edge)))
    except OverflowError:
        # A bound that the user's filter brought; the filter itself still applies.
        return None


def _moment(axis: Axis, literal: str) -> str:
    match axis:
        case Axis.DATE:
            return f"DATE'{literal}'"
        case Axis.TIMESTAMP:
            return f"TIMESTAMP_NTZ'{literal}'"
        case _:
            return f"TIMESTAMP'{literal.removesuffix('+00')}Z'"


def _literal(column: SeamColumn, text: str) -> Column:
    import pyarrow as pa
    from pyspark.sql import functions

    from modak.lake.parse import parse_text

    value = parse_text(column.mapped, pa.array([text]))[0].as_py()
    kind = column.mapped.column.type
    if kind in ("date", "timestamp", "timestamptz"):
        # Through text: Python's moments would be read in the time zone of the session.
        shown = value.replace(tzinfo=None).isoformat(" ") if kind != "date" else value.isoformat()
        return functions.expr(_moment(Axis(kind), shown))
    return functions.lit(value)


def _schema(spark: SparkSession, schema: Any) -> dict[str, dict[str, Any]]:
    jvm: Any = spark._jvm
    fields = json.loads(jvm.org.apache.iceberg.SchemaParser.toJson(schema))["fields"]
    return {field["name"]: field for field in fields}
