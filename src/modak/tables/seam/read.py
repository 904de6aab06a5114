"""A seam read assembled: heap ∪ (lake without the keys of the delta) ∪ the rows of the delta, then the user's filter.

The filter is applied in full by Spark to the union. Spark moves it below the anti-join, or beside the sieve, on the
lake's side, which is sound: whether a lake row is replaced depends on its key alone, so it does not matter whether rows
are dropped by value before or after. The delta's keys are never filtered by value: a correction that no longer matches
must still hide the lake row that did. Only filters on the key and the tier key go into the delta's query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from modak.catalog.records import Pin
from modak.core.names import TableName
from modak.spark.pushdown import asked
from modak.tables.seam.columns import SeamColumn, Shape, by_name, struct_of
from modak.tables.seam.delta import Older, Overlay, overlay
from modak.tables.seam.heap import guest_queries, heap_frame, heap_queries
from modak.tables.seam.lake import lake_side
from modak.tables.seam.pinned import LARGE_DELTA, PinnedTable, Point
from modak.tables.seam.plan import SeamPlan, Span, plan_seam
from modak.tables.seam.predicate import Predicate, span_of
from modak.tables.seam.sieve import Sieve

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Planner = Callable[[Pin, Span], SeamPlan]
"""Which parts answer for which tier keys."""


@dataclass(frozen=True, slots=True)
class SeamRead:
    """What is read of one table: columns, and what Postgres and the plan may know of the filter."""

    table: PinnedTable
    columns: tuple[SeamColumn, ...]
    predicate: Predicate | None
    planner: Planner = plan_seam

    @property
    def plan(self) -> SeamPlan:
        """The parts that are needed."""
        return self.planner(self.table.pin, span_of(self.predicate, self.table.shape.tier_key))


def read(
    spark: SparkSession,
    point: Point,
    name: TableName,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    planner: Planner = plan_seam,
) -> DataFrame:
    """The rows of a table at the point, as a user asks for them."""
    table = point.table(name)
    shape = table.shape
    chosen = [shape.named(each).name for each in columns] if columns is not None else None
    if where is None:
        frame = assemble(
            spark,
            point,
            SeamRead(table, _or_one(shape.of(chosen), table) if chosen is not None else shape.columns, None, planner),
        )
    else:
        wish = asked(spark, struct_of(shape.columns), where)
        needed = shape.columns if chosen is None else shape.of({*chosen, *wish.columns})
        frame = assemble(spark, point, SeamRead(table, needed, wish.predicate, planner)).filter(where)
    return frame if chosen is None else frame.select(*map(by_name, chosen))


def assemble(spark: SparkSession, point: Point, wanted: SeamRead) -> DataFrame:
    """The union of the parts that the plan names, without the user's filter."""
    plan, table = wanted.plan, wanted.table
    parts: list[DataFrame] = []
    if plan.heap is not None:
        cores = spark.sparkContext.defaultParallelism
        through = guest_queries if point.reader.guest else heap_queries
        queries = through(table, plan.heap, wanted.columns, wanted.predicate, cores)
        if queries:
            parts.append(heap_frame(spark, point.access, queries, wanted.columns))
    parts += _cold(spark, point, wanted, plan)
    if not parts:
        return spark.createDataFrame([], struct_of(wanted.columns))
    return reduce(lambda one, other: one.union(other), parts)


def _cold(spark: SparkSession, point: Point, wanted: SeamRead, plan: SeamPlan) -> list[DataFrame]:
    if plan.delta is None:
        return []
    table = wanted.table
    side = lake_side(spark, table) if plan.lake is not None else None
    older = Older(point.renames(table), side.former if side is not None else {}) if table.delta.rows else Older()
    over = overlay(spark, table, point.access, plan.delta, wanted.columns, older, wanted.predicate)
    parts: list[DataFrame] = []
    if side is not None and plan.lake is not None:
        if over is None:
            parts.append(side.cold(wanted.columns, table, plan.lake))
        else:
            keyed = table.shape.of({*(column.name for column in wanted.columns), *table.shape.keys})
            kept = _without(side.cold(keyed, table, plan.lake), over, table.shape)
            parts.append(kept.select(*(by_name(column.name) for column in wanted.columns)))
    if over is not None:
        parts.append(over.images)
    return parts


def _without(cold: DataFrame, over: Overlay, shape: Shape) -> DataFrame:
    from pyspark.sql import functions

    if isinstance(over.keys, Sieve):
        tier = None if shape.tier_key in shape.pk else by_name(shape.tier_key)
        return cold.filter(~over.keys.holds(by_name(shape.pk[0]), tier))
    names = {name: f"modak key {at}" for at, name in enumerate(over.keys.columns)}
    renamed = over.keys.toDF(*names.values())
    conditions = []
    for name in shape.keys:
        ours, theirs = by_name(name), by_name(names[name])
        if shape.whole_number_key and name not in shape.pk:
            # Equality, said so that Spark hashes the number alone: its map for one long is the fastest it has.
            conditions += [ours <= theirs, ours >= theirs]
        else:
            conditions.append(ours == theirs)
    small = functions.broadcast(renamed) if over.rows <= LARGE_DELTA else renamed
    return cold.join(small, reduce(lambda one, other: one & other, conditions), "left_anti")


def _or_one(columns: tuple[SeamColumn, ...], table: PinnedTable) -> tuple[SeamColumn, ...]:
    """Rows without any column still have to be counted."""
    return columns or table.shape.of({table.shape.tier_key})
