"""The leaves of a mirrored table: which relations hold its rows now, and between which tier keys.

A table without partitions is its own leaf. Leaves of any depth count, each with the bounds of the partition of the
first level that it lies in, because only those are known to be stretches of the tier key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from modak.catalog.records import NewPartition
from modak.core.axis import TierKey
from modak.core.names import TableName
from modak.postgres.connect import translate
from modak.postgres.model import PgTable

REWRITTEN = "rewritten"
"""Key of the line's lake properties: `rewritten_files` when the lake was last known to equal the heap."""
_LEAVES = """
WITH RECURSIVE tree AS (
    SELECT c.oid, NULL::oid AS top, '' AS attachment FROM pg_class c WHERE c.oid = %(root)s
    UNION ALL SELECT i.inhrelid, coalesce(tree.top, i.inhrelid), concat_ws('.', nullif(tree.attachment, ''), i.xmin)
    FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid AND NOT i.inhdetachpending
)
SELECT c.oid, n.nspname::text, c.relname::text, tree.top, c.relkind::text, c.relpersistence::text,
    coalesce(pg_relation_filenode(c.oid), 0)::int8,
    coalesce(pg_relation_size(c.oid), 0) / current_setting('block_size')::int8,
    coalesce(pg_table_size(c.oid), 0), c.reltuples::float8,
    tree.attachment
FROM tree JOIN pg_class c ON c.oid = tree.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'f') AND NOT EXISTS (SELECT FROM modak.spills s WHERE s.spill_oid = c.oid)
ORDER BY c.oid
"""


@dataclass(frozen=True, slots=True)
class TrueLeaf:
    """A relation that holds rows. `top` is the partition of the first level that it belongs to."""

    oid: int
    name: TableName
    top: int | None
    kind: str
    persistence: str
    relfilenode: int
    pages: int
    bytes: int
    rows_estimate: float
    attachment: str
    """Which ATTACH, on every level, has put it here."""
    lower: TierKey | None = None
    upper: TierKey | None = None


def true_leaves(conn: psycopg.Connection[Any], root: int) -> tuple[TrueLeaf, ...]:
    """The relations that hold the rows of a table, the spill excepted; bounds are not filled in."""
    try:
        rows = conn.execute(_LEAVES, {"root": root}).fetchall()
    except psycopg.Error as error:
        raise translate(error) from error
    return tuple(TrueLeaf(row[0], TableName(row[1], row[2]), *row[3:]) for row in rows)


def rewritten_files(leaves: Iterable[TrueLeaf]) -> dict[str, int]:
    """The leaves whose file is not the one they were made with: oid → file, to be kept as JSON."""
    return {str(leaf.oid): leaf.relfilenode for leaf in leaves if leaf.kind == "r" and leaf.relfilenode != leaf.oid}


def bounded_leaves(conn: psycopg.Connection[Any], heap: PgTable) -> tuple[TrueLeaf, ...]:
    """The same with bounds on the axis, as far as they are known."""
    tops = {leaf.oid: leaf for leaf in heap.leaves}
    found = []
    for leaf in true_leaves(conn, heap.oid):
        top = tops.get(leaf.top) if leaf.top is not None else None
        # A DEFAULT partition and one of a list or hash have no bounds of the tier key.
        found.append(leaf if top is None else replace(leaf, lower=top.lower, upper=top.upper))
    return tuple(found)


def as_partitions(leaves: tuple[TrueLeaf, ...], heap: PgTable) -> list[NewPartition]:
    """The leaves as the catalog first knows them; a table without partitions has none."""
    return [
        NewPartition(
            name=leaf.name.name,
            lower=leaf.lower,
            upper=leaf.upper,
            leaf_oid=leaf.oid,
            leaf_schema=leaf.name.schema,
            relfilenode=leaf.relfilenode,
            attachment=leaf.attachment,
        )
        for leaf in leaves
        if leaf.oid != heap.oid
    ]
