"""Every table at a glance and the journal page by page, in one query each: what lists of a thousand tables are made of.

Sizes are what Postgres and the last look at the lake's health have written down, not measured anew. Memory: one page.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

from modak.core.axis import Axis, literal

Conn = psycopg.Connection[Any]
Row = dict[str, Any]

_TROUBLED: LiteralString = """
    SELECT t.table_id FROM modak.tables t
    WHERE t.frozen IS NOT NULL
        OR (SELECT o.error IS NOT NULL FROM modak.op_log o WHERE o.table_id = t.table_id
            ORDER BY o.started_at DESC LIMIT 1)
        OR EXISTS (SELECT FROM modak.partitions x
            WHERE x.table_id = t.table_id AND x.problem IS NOT NULL AND x.state <> 'dropped')
        OR EXISTS (SELECT FROM modak.lake_stats w WHERE w.table_id = t.table_id AND w.warnings <> '[]')
        OR EXISTS (SELECT FROM modak.mirror_health h WHERE h.table_id = t.table_id AND h.error IS NOT NULL)
"""
_PAGE: LiteralString = """
    WITH page AS (
        SELECT s.* FROM modak.status s
        WHERE (%(like)s::text IS NULL OR strpos(lower(s.schema_name || '.' || s.table_name), lower(%(like)s)) > 0)
            AND (%(mode)s::text IS NULL OR s.mode = %(mode)s)
            AND (%(only)s::bigint[] IS NULL OR s.table_id = ANY (%(only)s))
        ORDER BY s.schema_name, s.table_name LIMIT %(limit)s OFFSET %(offset)s
    )
    SELECT p.table_id, quote_ident(p.schema_name) || '.' || quote_ident(p.table_name) AS table, p.mode, p.axis,
        p.keep_heap, p.cutline_t, p.cutline_s, p.retention_line, p.metadata_location, p.cutline_updated_at,
        p.mirror_frontier::text AS mirror_frontier, p.delta_backlog, p.delta_oldest_at, p.read_pins, p.staged_loads,
        p.copying, p.partition_states, p.problems, p.frozen, p.unfinished_ops, p.last_error,
        z.paused_at, z.paused_by, z.reason AS pause_reason,
        h.heap_bytes, h.heap_rows, h.lower_bound, h.upper_bound, h.filled_to,
        -- Until its pump has spoken for the first time, all WAL since the frontier counts.
        coalesce(m.lag_bytes, CASE WHEN p.mirror_frontier IS NOT NULL AND NOT pg_is_in_recovery()
            THEN greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), p.mirror_frontier), 0)::bigint END) AS mirror_lag_bytes,
        m.lag_seconds AS mirror_lag_seconds, m.error AS mirror_error, m.failing_since AS mirror_failing_since,
        l.counters AS lake, l.warnings AS lake_warnings, l.collected_at AS lake_collected_at, l.maintained_at,
        o.kind AS last_kind, o.phase AS last_phase, coalesce(o.finished_at, o.started_at) AS last_at,
        o.counters AS last_counters
    FROM page p
    LEFT JOIN modak.tables t USING (table_id)
    LEFT JOIN modak.pauses z USING (table_id)
    LEFT JOIN modak.lake_stats l USING (table_id)
    LEFT JOIN modak.mirror_health m USING (table_id)
    LEFT JOIN LATERAL (
        -- ANALYZE gives a partitioned table itself the size -1.
        SELECT sum(greatest(k.relpages, 0)::bigint) * current_setting('block_size')::bigint AS heap_bytes,
            sum(greatest(k.reltuples, 0))::bigint AS heap_rows,
            (SELECT min(x.lower_bound) FROM modak.partitions x WHERE x.table_id = p.table_id) AS lower_bound,
            (SELECT max(x.upper_bound) FROM modak.partitions x WHERE x.table_id = p.table_id) AS upper_bound,
            (SELECT max(x.upper_bound) FROM modak.partitions x JOIN pg_class f ON f.oid = x.leaf_oid
                WHERE x.table_id = p.table_id AND x.state <> 'dropped'
                    AND (f.relpages > 0 OR pg_stat_get_live_tuples(f.oid) > 0)) AS filled_to
        FROM pg_class k
        WHERE k.oid = t.relid OR k.oid IN (SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = t.relid)
    ) h ON true
    LEFT JOIN LATERAL (
        SELECT q.kind, q.phase, q.finished_at, q.started_at, q.counters FROM modak.op_log q
        WHERE q.table_id = p.table_id ORDER BY q.started_at DESC LIMIT 1
    ) o ON true
    ORDER BY p.schema_name, p.table_name
"""
_OPERATIONS: LiteralString = """
    SELECT o.op_id, o.table_id, quote_ident(t.schema_name) || '.' || quote_ident(t.table_name) AS table, o.kind,
        o.phase, o.started_at, o.finished_at, extract(epoch FROM o.finished_at - o.started_at)::float8 AS seconds,
        o.counters, o.error, o.epoch, o.attempt, o.folders
    FROM modak.op_log o LEFT JOIN modak.tables t USING (table_id)
    WHERE (%(table)s::bigint IS NULL OR o.table_id = %(table)s)
        AND (%(kind)s::text IS NULL OR o.kind = %(kind)s)
        AND (%(phase)s::text IS NULL OR o.phase = %(phase)s)
        AND (%(before)s::timestamptz IS NULL OR o.started_at < %(before)s)
        AND (NOT %(failed)s OR o.error IS NOT NULL)
    ORDER BY o.started_at DESC LIMIT %(limit)s
"""
_REQUESTS: LiteralString = """
    SELECT r.request_id, r.requested_at, r.requested_by, r.claimed_at, r.finished_at, r.progress, r.outcome, r.error,
        r.op_id
    FROM modak.maintenance_requests r WHERE r.table_id = %(table)s ORDER BY r.request_id DESC LIMIT %(limit)s
"""
_SCHEMA: LiteralString = """
    SELECT quote_ident(t.schema_name) || '.' || quote_ident(t.table_name) AS table, t.pk_columns, t.tier_key,
        jsonb_agg(jsonb_build_object('name', a.attname, 'type', format_type(a.atttypid, a.atttypmod),
            'not_null', a.attnotnull) ORDER BY a.attnum) AS columns
    FROM modak.tables t
    JOIN pg_attribute a ON a.attrelid = t.relid AND a.attnum > 0 AND NOT a.attisdropped
    GROUP BY t.table_id ORDER BY t.schema_name, t.table_name
"""
_COUNT: LiteralString = """
    SELECT count(*) AS total, count(*) FILTER (
        WHERE (%(like)s::text IS NULL OR strpos(lower(t.schema_name || '.' || t.table_name), lower(%(like)s)) > 0)
            AND (%(mode)s::text IS NULL OR t.mode = %(mode)s)
            AND (%(only)s::bigint[] IS NULL OR t.table_id = ANY (%(only)s))
    ) AS found
    FROM modak.tables t
"""
_LAKE: LiteralString = """
    SELECT l.counters, l.warnings, l.collected_at, l.maintained_at FROM modak.lake_stats l WHERE l.table_id = %(table)s
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tables of the fleet."""

    like: str | None = None
    """Part of a name."""
    mode: str | None = None
    attention: bool = False
    """Only those that somebody should look at."""


def maintenance_requests(conn: Conn, table_id: int, limit: int) -> list[Row]:
    """Forced passes of a table, newest first: who asked, how far each has come, what it did."""
    return _rows(conn, _REQUESTS, {"table": table_id, "limit": limit})


def tables_page(conn: Conn, choice: Choice, limit: int, offset: int) -> list[Row]:
    """Tables by name, one page; lines also as people write them.

    `lag` is what lies in the heap beyond the cut-line: from there to the end of the last partition that holds rows.
    """
    rows = _rows(conn, _PAGE, {**_given(conn, choice), "limit": limit, "offset": offset})
    for row in rows:
        axis = Axis(row["axis"])
        for key in ("cutline_t", "retention_line", "lower_bound", "upper_bound"):
            row[f"{key}_text"] = literal(axis, row[key])
        cut, end = row["cutline_t"], row.pop("filled_to")
        row["lag"] = None if cut is None or end is None else axis.roughly(max(end - cut, 0))
    return rows


def count_tables(conn: Conn, choice: Choice) -> Row:
    """How many tables are registered (`total`), fit the choice (`found`) and need attention (`attention`)."""
    return {**_rows(conn, _COUNT, _given(conn, choice))[0], "attention": len(_troubled(conn))}


def lake_health(conn: Conn, table_id: int) -> Row | None:
    """What the last look at a table's lake found, and when the last maintenance pass ended."""
    return next(iter(_rows(conn, _LAKE, {"table": table_id})), None)


def operations(
    conn: Conn,
    limit: int,
    *,
    table_id: int | None = None,
    kind: str | None = None,
    phase: str | None = None,
    before: datetime | None = None,
    failed: bool = False,
) -> list[Row]:
    """The journal, newest first."""
    given = {"table": table_id, "kind": kind, "phase": phase, "before": before, "failed": failed, "limit": limit}
    return _rows(conn, _OPERATIONS, given)


def schema(conn: Conn) -> list[Row]:
    """The columns of every registered table, as Postgres has them."""
    return _rows(conn, _SCHEMA)


def _given(conn: Conn, choice: Choice) -> Row:
    return {"like": choice.like, "mode": choice.mode, "only": _troubled(conn) if choice.attention else None}


def _troubled(conn: Conn) -> list[int]:
    """The tables that somebody should look at."""
    return [row["table_id"] for row in _rows(conn, _TROUBLED)]


def _rows(conn: Conn, query: LiteralString, params: Row | None = None) -> list[Row]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, params).fetchall()
