"""The hot part of a seam read: leaves of the heap, cut into page ranges, streamed by Spark tasks under one snapshot.

Columns and filters are in the SQL text, so Postgres sends only what is asked for. Memory per task is one Arrow batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from modak.core.axis import TierKey
from modak.lake.types import quoted_identifier, select_list
from modak.postgres.model import Leaf, PgTable
from modak.postgres.splits import ctid_predicate, ctid_splits
from modak.spark.frames import frame_of
from modak.tables.seam.columns import SeamColumn, struct_of
from modak.tables.seam.pinned import PinnedTable
from modak.tables.seam.plan import Span, leaves_of
from modak.tables.seam.predicate import Predicate, one_of, to_sql
from modak.tables.seam.reader import Access
from modak.tables.seam.streams import HeapSplit, heap_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPLIT_BYTES = 64 << 20


def heap_queries(
    table: PinnedTable, span: Span, columns: Sequence[SeamColumn], predicate: Predicate | None, cores: int
) -> tuple[str, ...]:
    """The SQL of every task, straight from the partitions."""
    leaves = leaves_of(table.heap.leaves, span) if table.heap.partition_strategy else (_whole(table.heap),)
    return _queries(table, [(leaf, leaf) for leaf in leaves], columns, predicate, cores)


def guest_queries(
    table: PinnedTable, span: Span, columns: Sequence[SeamColumn], predicate: Predicate | None, cores: int
) -> tuple[str, ...]:
    """The SQL of every task, through the table: what a role may read without a grant on any partition."""
    whole = _whole(table.heap)
    leaves = leaves_of(table.heap.leaves, span) if table.heap.partition_strategy else (whole,)
    if table.heap.partition_strategy and not all(_shown_alone(table, leaf) for leaf in leaves):
        leaves = (whole,)
    return _queries(table, [(leaf, whole) for leaf in leaves], columns, predicate, cores)


def _queries(
    table: PinnedTable,
    leaves: Sequence[tuple[Leaf, Leaf]],
    columns: Sequence[SeamColumn],
    predicate: Predicate | None,
    cores: int,
) -> tuple[str, ...]:
    # Text, because it travels to ADBC connections: identifiers and literals are quoted, pages are numbers.
    mapped = [column.mapped for column in columns]
    asked = to_sql(predicate, table.heap.columns)
    keyed = one_of(predicate, table.shape.pk[0]) is not None and asked is not None
    total = sum(leaf.bytes for leaf, _ in leaves) or 1
    queries = []
    for leaf, source in leaves:
        name = f"{quoted_identifier(source.schema)}.{quoted_identifier(source.name)}"
        share = max(1, round(cores * leaf.bytes / total))
        # A filter on the key is answered by the index, which page ranges would keep Postgres from using.
        pages = ((0, None),) if keyed else ctid_splits(leaf.pages, leaf.bytes, SPLIT_BYTES, share)
        for split in pages:
            conditions = [*([asked] if asked else []), *_hot_only(table, leaf)]
            if source is not leaf:
                conditions += _alone(table, leaf)
            elif leaf.oid == table.heap.oid and table.heap.partition_strategy:
                conditions.append(_described(table))
            if len(pages) > 1:
                conditions.insert(0, ctid_predicate(split))
            where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
            # A partition of a mirrored table may be partitioned itself; it has no pages of its own.
            only = "" if source.kind == "p" else "ONLY "
            queries.append(f"SELECT {select_list(mapped)} FROM {only}{name}{where}")  # noqa: S608
    return tuple(queries)


def heap_frame(spark: SparkSession, access: Access, queries: Sequence[str], columns: Sequence[SeamColumn]) -> DataFrame:
    """The rows of the queries, as Spark tasks read them."""
    mapped = tuple(column.mapped for column in columns)
    splits = [HeapSplit(access, query, mapped) for query in queries]
    return frame_of(spark, struct_of(columns), splits, heap_rows)


def _hot_only(table: PinnedTable, leaf: Leaf) -> Iterator[str]:
    """The cut at T, where a leaf reaches below it: those rows are the lake's, though the heap may still have them."""
    t = table.pin.t
    if t is not None and (leaf.is_default or leaf.lower is None or leaf.lower < t):
        yield _edge(table, ">=", t)


def _shown_alone(table: PinnedTable, leaf: Leaf) -> bool:
    """Whether bounds on the tier key keep Postgres from looking into any other partition."""
    ranged = table.heap.partition_strategy == "range" and table.heap.partition_columns == (table.shape.tier_key,)
    return ranged and leaf.kind == "r" and leaf.lower is not None and leaf.upper is not None


def _alone(table: PinnedTable, leaf: Leaf) -> Iterator[str]:
    """The conditions under which the table shows one partition."""
    assert leaf.lower is not None
    assert leaf.upper is not None
    # Page ranges are those of this very partition.
    yield f"tableoid = '{leaf.oid}'::oid"
    yield _edge(table, ">=", leaf.lower)
    yield _edge(table, "<", leaf.upper)


def _described(table: PinnedTable) -> str:
    """The partitions that the table had at the point: others may come while it is read."""
    leaves = table.heap.leaves
    alone = ", ".join(f"'{leaf.oid}'::oid" for leaf in leaves if leaf.kind != "p")
    inner = [f"SELECT relid FROM pg_partition_tree('{leaf.oid}'::oid)" for leaf in leaves if leaf.kind == "p"]  # noqa: S608
    return f"({' OR '.join(f'tableoid IN ({each})' for each in (alone, *inner) if each) or 'false'})"


def _edge(table: PinnedTable, compared: str, edge: TierKey) -> str:
    kind = table.shape.named(table.shape.tier_key).heap.type.name
    return f"{quoted_identifier(table.shape.tier_key)} {compared} '{table.record.axis.literal(edge)}'::{kind}"


def _whole(heap: PgTable) -> Leaf:
    """A table without partitions is its own leaf."""
    return Leaf(
        oid=heap.oid,
        schema=heap.name.schema,
        name=heap.name.name,
        lower=None,
        upper=None,
        is_default=False,
        relfilenode=heap.relfilenode,
        pages=heap.pages,
        bytes=heap.bytes,
        rows_estimate=heap.rows_estimate,
        detach_pending=False,
        kind=heap.relkind,
        is_spill=False,
    )
