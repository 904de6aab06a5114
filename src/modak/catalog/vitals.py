"""What the whole fleet looks like for `/metrics`: a few queries over all tables, and the journal read as it grows.

The journal is followed by time: each reading takes what has begun since the last one and what was still open then, so
its cost does not grow with its age. Memory: a row per table, and the ids of operations that are under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

Conn = psycopg.Connection[Any]
Row = dict[str, Any]

_TABLES: LiteralString = """
    SELECT s.table_id, s.schema_name, s.table_name, s.mode, s.cutline_t, s.cutline_s, s.delta_backlog, s.read_pins,
        s.staged_loads, s.unfinished_ops, s.frozen IS NOT NULL AS frozen, s.copying,
        jsonb_array_length(s.problems) AS problems, z.table_id IS NOT NULL AS paused,
        extract(epoch FROM clock_timestamp() - s.delta_oldest_at)::float8 AS delta_oldest_seconds,
        extract(epoch FROM clock_timestamp() - s.cutline_updated_at)::float8 AS cutline_age_seconds,
        CASE WHEN s.mirror_frontier IS NOT NULL AND NOT pg_is_in_recovery()
            THEN greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), s.mirror_frontier), 0)::float8 END AS mirror_lag_bytes,
        m.lag_seconds AS mirror_lag_seconds, q.requests,
        extract(epoch FROM clock_timestamp() - m.checked_at)::float8 AS mirror_silent_seconds,
        l.counters, jsonb_array_length(l.warnings) AS warnings,
        extract(epoch FROM clock_timestamp() - l.collected_at)::float8 AS stats_age_seconds,
        o.oldest_staged_seconds
    FROM modak.status s
    LEFT JOIN modak.lake_stats l USING (table_id)
    LEFT JOIN modak.pauses z USING (table_id)
    LEFT JOIN modak.mirror_health m USING (table_id)
    LEFT JOIN (
        SELECT r.table_id, count(*) AS requests FROM modak.maintenance_requests r WHERE r.finished_at IS NULL GROUP BY 1
    ) q USING (table_id)
    LEFT JOIN LATERAL (
        SELECT extract(epoch FROM clock_timestamp() - min(b.created_at))::float8 AS oldest_staged_seconds
        FROM modak.load_labels b WHERE b.table_id = s.table_id AND b.state = 'staged'
    ) o ON s.staged_loads > 0
    ORDER BY s.schema_name, s.table_name
"""
_SLOTS: LiteralString = """
    SELECT r.slot_name::text AS slot, r.active,
        coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn), 0)::float8 AS retained
    FROM pg_replication_slots r
    WHERE r.database = current_database() AND starts_with(r.slot_name::text, 'modak')
        AND NOT r.temporary AND NOT pg_is_in_recovery()
"""
_WITHDRAWALS: LiteralString = """
    SELECT count(*) AS waiting, coalesce(extract(epoch FROM clock_timestamp() - min(asked_at)), 0)::float8 AS oldest
    FROM modak.withdrawals
"""
_TAIL: LiteralString = """
    SELECT o.op_id, o.kind, o.phase, o.started_at, o.error, o.counters, o.cleanup ? 'made' AS landed,
        extract(epoch FROM o.finished_at - o.started_at)::float8 AS seconds,
        coalesce(quote_ident(t.schema_name) || '.' || quote_ident(t.table_name), '') AS table
    FROM modak.op_log o LEFT JOIN modak.tables t USING (table_id)
    WHERE o.started_at > %(since)s OR o.op_id = ANY (%(open)s)
    ORDER BY o.started_at
    LIMIT 10000
"""
_OPEN: LiteralString = "SELECT op_id FROM modak.op_log WHERE phase NOT IN ('done', 'abandoned', 'failed')"
_ENDED = frozenset({"done", "failed", "abandoned"})
_OVERLAP = timedelta(minutes=2)
"""A transaction may write its journal row down later than another that began after it."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """The fleet at one moment."""

    tables: list[Row]
    slots: list[Row]
    withdrawals: list[Row] = field(default_factory=list)
    """How many unregistered tables still stand in foreign catalogs, and for how long: one row."""


@dataclass
class JournalTail:
    """Operations as they end, each once."""

    since: datetime
    _open: set[str] = field(default_factory=set)
    _told: dict[str, datetime] = field(default_factory=dict)

    def read(self, conn: Conn) -> Iterable[Row]:
        """The operations that have ended since the last reading."""
        rows = _rows(conn, _TAIL, {"since": self.since - _OVERLAP, "open": list(self._open)})
        ended = []
        for row in rows:
            op_id = row["op_id"]
            if op_id in self._told:
                continue
            if row["phase"] in _ENDED:
                self._open.discard(op_id)
                self._told[op_id] = row["started_at"]
                ended.append(row)
            else:
                self._open.add(op_id)
        # One that is open may be older than all that was told before it, which must not be told again.
        self.since = max([self.since, *(row["started_at"] for row in rows)])
        old = self.since - 2 * _OVERLAP
        self._told = {op: at for op, at in self._told.items() if at > old}
        return ended


def begin_tail(conn: Conn) -> JournalTail:
    """Follow the journal from now on; what is under way now will be told as well, however long ago it began."""
    row = conn.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    tail = JournalTail(row[0])
    before = _rows(conn, _TAIL, {"since": row[0] - _OVERLAP, "open": []})
    tail._told = {each["op_id"]: each["started_at"] for each in before if each["phase"] in _ENDED}
    # Last, so that one that ends between the two looks is told.
    tail._open = {op_id for (op_id,) in conn.execute(_OPEN)}
    return tail


def read_vitals(conn: Conn) -> Vitals:
    """Look at every table, every slot of ours, and what must still leave a foreign catalog."""
    return Vitals(_rows(conn, _TABLES), _rows(conn, _SLOTS), _rows(conn, _WITHDRAWALS))


def _rows(conn: Conn, query: LiteralString, params: Row | None = None) -> list[Row]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, params).fetchall()
