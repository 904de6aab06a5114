"""SQL across the seam: a query over registered tables, each read with exactly the columns and filters that it needs.

The query is first optimised over stand-ins: empty frames with the tables' schemas. The optimised plan says, scan by
scan, which columns are used and which filters apply. Then every table is read through the seam accordingly, at one
point in time, and the same text runs over these frames. A column that the plan does not use stays in the schema as
NULL, so that the text means the same both times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modak.core.names import TableName
from modak.spark.predicate import Predicate, either, every
from modak.spark.pushdown import items, predicate_of, simple_name, stand_in
from modak.tables.seam.columns import backticked, by_name, struct_of
from modak.tables.seam.mentions import SUBQUERIES, Statement, understand, wrong
from modak.tables.seam.pinned import Point
from modak.tables.seam.read import SeamRead, assemble
from modak.tables.seam.reader import Reader
from modak.tables.site import Site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType


@dataclass(frozen=True, slots=True)
class Scan:
    """One use of a table: the columns it needs (`None`: all) and what of its filters can be pushed."""

    table: TableName
    columns: frozenset[str] | None
    predicate: Predicate | None


@contextmanager
def query(site: Site, spark: SparkSession, text: str, reader: Reader | None = None) -> Iterator[DataFrame]:
    """The answer to a query at one point in time; use it inside the block."""
    known = {record.name: record for record in site.reader.tables()}
    statement = understand(spark, text.strip().rstrip(";"), known)
    point = Point(site, sorted(statement.views), reader=reader)
    try:
        yield _answer(spark, point, statement)
    except BaseException:
        point.abandon()
        raise
    point.close()


def scans(spark: SparkSession, statement: Statement, schemas: Mapping[TableName, StructType]) -> tuple[Scan, ...]:
    """What the query needs of every table, by the plan that Spark makes for it."""
    empty = {name: stand_in(spark, schemas[name]) for name in statement.views}
    ids = {_rdd(frame._jdf.queryExecution().analyzed()): name for name, frame in empty.items()}
    plan: Any = _run(spark, statement, empty)._jdf.queryExecution().optimizedPlan()
    walk = _Walk(ids)
    walk.plan(plan, [], None)
    # A scan that was not met could need more than those that were: then everything is read.
    if len(re.findall(r"LogicalRDD \[", str(plan.treeString()))) != len(walk.found):
        return tuple(Scan(name, None, None) for name in statement.views)
    return tuple(walk.found)


Read = Callable[[TableName, frozenset[str], Predicate | None], "DataFrame"]
"""Reads some columns of a table, at least the rows that the filter leaves."""


def answer(spark: SparkSession, statement: Statement, schemas: Mapping[TableName, StructType], read: Read) -> DataFrame:
    """The answer to a statement over tables that `read` reads, each with the columns and filters that it needs."""
    if not statement.views:
        return _run(spark, statement, {})
    found = scans(spark, statement, schemas)
    frames = {}
    for name in statement.views:
        uses = [scan for scan in found if scan.table == name]
        needed = _needed(schemas[name], uses)
        frame = read(name, needed, either([use.predicate for use in uses]))
        frames[name] = frame.select(*(_shown(each, needed) for each in schemas[name].fields))
    return _run(spark, statement, frames)


def _answer(spark: SparkSession, point: Point, statement: Statement) -> DataFrame:
    def read(name: TableName, needed: frozenset[str], predicate: Predicate | None) -> DataFrame:
        table = point.table(name)
        wanted = table.shape.of(needed) or table.shape.of({table.shape.tier_key})
        return assemble(spark, point, SeamRead(table, wanted, predicate))

    return answer(spark, statement, schemas_of(point, statement), read)


def schemas_of(point: Point, statement: Statement) -> dict[TableName, StructType]:
    """The columns of every table that a statement names."""
    return {name: struct_of(point.table(name).shape.columns) for name in statement.views}


def _needed(schema: StructType, uses: list[Scan]) -> frozenset[str]:
    everything = frozenset(schema.names)
    sets = [everything if use.columns is None else use.columns for use in uses] or [everything]
    return everything & frozenset().union(*sets)


def _shown(field: StructField, needed: frozenset[str]) -> Any:
    from pyspark.sql import functions

    return by_name(field.name) if field.name in needed else functions.lit(None).cast(field.dataType).alias(field.name)


def _run(spark: SparkSession, statement: Statement, frames: Mapping[TableName, DataFrame]) -> DataFrame:
    """The text over frames; the views are gone again before anything runs."""
    try:
        for name, frame in frames.items():
            frame.createOrReplaceTempView(backticked(statement.views[name]))
        return spark.sql(statement.text)
    except Exception as error:
        raise wrong(error) from None
    finally:
        for name in frames:
            spark.catalog.dropTempView(statement.views[name])


@dataclass
class _Walk:
    """The walk over an optimised plan, from the top, with what stands right above each scan."""

    ids: Mapping[int, TableName]
    found: list[Scan] = field(default_factory=list)

    def plan(self, node: Any, filters: list[Any], needed: frozenset[str] | None) -> None:
        kind = simple_name(node)
        for expression in items(node.expressions()):
            self._subqueries(expression)
        if kind == "LogicalRDD" and _rdd(node) in self.ids:
            self.found.append(Scan(self.ids[_rdd(node)], needed, every(map(predicate_of, filters))))
        elif kind == "Filter":
            condition = node.condition()
            mentioned = None if needed is None else needed | _names(condition.references())
            self.plan(node.child(), [*filters, condition], mentioned)
        elif kind == "Project":
            self.plan(node.child(), [], _names(node.references()))
        else:
            for child in items(node.children()):
                self.plan(child, [], None)

    def _subqueries(self, expression: Any) -> None:
        if simple_name(expression) in SUBQUERIES:
            self.plan(expression.plan(), [], None)
        for child in items(expression.children()):
            self._subqueries(child)


def _names(references: Any) -> frozenset[str]:
    return frozenset(str(attribute.name()) for attribute in items(references.toSeq()))


def _rdd(node: Any) -> int:
    return int(node.rdd().id())
