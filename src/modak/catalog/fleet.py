"""All registered tables in a handful of queries, whatever their number: what a round of the scheduler looks at.

A table's *mark* is a hash over everything that a pass could act on: leaves and their triggers, tuples written since the
statistics began, pins, operations under way, staged loads, the lines. While the mark stays as it was when a pass found
nothing to do, the next pass would find nothing either. Memory: one short row per table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

from modak.core.names import TableName

Conn = psycopg.Connection[Any]

_GLANCE: LiteralString = """
    WITH leaves AS (
        SELECT i.inhparent AS relid,
            bool_or(k.relkind = 'p') AS nested,
            sum(hashtextextended(concat_ws(' ', k.oid, k.xmin, i.xmin, i.inhdetachpending, k.relname), 0)
                + coalesce(g.watched, 0)) AS shape,
            sum(pg_stat_get_tuples_inserted(k.oid) + pg_stat_get_tuples_updated(k.oid)
                + pg_stat_get_tuples_deleted(k.oid)) AS written
        FROM modak.tables t
        JOIN pg_inherits i ON i.inhparent = t.relid
        JOIN pg_class k ON k.oid = i.inhrelid
        LEFT JOIN LATERAL (
            SELECT sum(hashtextextended(concat_ws(' ', g.oid, g.tgenabled), 1)) AS watched
            FROM pg_trigger g WHERE g.tgrelid = k.oid AND NOT g.tgisinternal
        ) g ON true
        GROUP BY i.inhparent
    ), pinned AS (
        SELECT p.table_id, count(*) AS n, sum(p.pin_id) AS which FROM modak.read_pins p
        WHERE p.expires_at > clock_timestamp() GROUP BY p.table_id
    ), open_ops AS (
        SELECT o.table_id, count(*) AS n, sum(hashtextextended(o.op_id || o.phase, 0)) AS which FROM modak.op_log o
        WHERE o.phase NOT IN ('done', 'abandoned', 'failed') GROUP BY o.table_id
    ), staged AS (
        SELECT l.table_id, count(*) AS n FROM modak.load_labels l
        WHERE l.state IN ('staging', 'staged') GROUP BY l.table_id
    )
    SELECT t.table_id, t.schema_name, t.table_name, t.mode, c.table_id IS NOT NULL AS has_lines,
        t.lake_retention IS NOT NULL AS has_retention, z.table_id IS NOT NULL AS paused,
        EXISTS (SELECT FROM modak.delta d WHERE d.table_id = t.table_id) AS has_delta,
        c.metadata_location, b.metadata_location AS published,
        NOT coalesce(l.nested, false) AND current_setting('track_counts')::boolean AS can_rest,
        md5(concat_ws(' ', t.xmin, c.xmin, r.xmin, l.shape, l.written, p.n, p.which, o.n, o.which, s.n)) AS mark
    FROM modak.tables t
    LEFT JOIN modak.cutline c USING (table_id)
    LEFT JOIN modak.pauses z USING (table_id)
    LEFT JOIN modak.publications b ON b.table_id = t.table_id AND b.catalog_uri = %s
    LEFT JOIN pg_class r ON r.oid = t.relid
    LEFT JOIN leaves l ON l.relid = t.relid
    LEFT JOIN pinned p ON p.table_id = t.table_id
    LEFT JOIN open_ops o ON o.table_id = t.table_id
    LEFT JOIN staged s ON s.table_id = t.table_id
    ORDER BY t.table_id
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """One table as a round sees it."""

    table_id: int
    name: TableName
    mode: str
    has_lines: bool
    has_retention: bool
    has_delta: bool
    paused: bool
    can_rest: bool
    """False where the mark cannot tell that rows were written: statistics are off, or partitions are nested."""
    mark: str
    metadata_location: str | None
    published: str | None


def glance(conn: Conn, catalog_uri: str | None) -> list[Glance]:
    """Every registered table at this moment."""
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(_GLANCE, (catalog_uri or "",)).fetchall()
    return [
        Glance(
            name=TableName(row.pop("schema_name"), row.pop("table_name")),
            **row,
        )
        for row in rows
    ]
