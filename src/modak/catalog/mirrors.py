"""What the catalog keeps about mirrored tables beside their lines: the pump's health, names that follow the heap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import psycopg

from modak.core.errors import Conflict
from modak.core.names import TableName

Conn = psycopg.Connection[Any]

_NOTE: LiteralString = """
    INSERT INTO modak.mirror_health AS h
        (table_id, error, failing_since, lag_bytes, lag_seconds, retained_bytes, slot_active, paused, flushes, changes)
    SELECT %(table_id)s, %(error)s, CASE WHEN %(error)s::text IS NOT NULL THEN clock_timestamp() END, %(lag_bytes)s,
        %(lag_seconds)s, %(retained_bytes)s, %(slot_active)s, %(paused)s, %(flushes)s, %(changes)s
    WHERE EXISTS (SELECT FROM modak.tables WHERE table_id = %(table_id)s AND mode = 'mirrored')
    ON CONFLICT (table_id) DO UPDATE SET error = excluded.error,
        failing_since = CASE WHEN excluded.error IS NOT NULL THEN coalesce(h.failing_since, excluded.failing_since) END,
        lag_bytes = excluded.lag_bytes, lag_seconds = excluded.lag_seconds, retained_bytes = excluded.retained_bytes,
        slot_active = excluded.slot_active, paused = excluded.paused, flushes = h.flushes + excluded.flushes,
        changes = h.changes + excluded.changes, checked_at = clock_timestamp()
"""
_READ: LiteralString = """
    SELECT table_id, error, failing_since, lag_bytes, lag_seconds, retained_bytes, slot_active, paused, flushes,
        changes, checked_at
    FROM modak.mirror_health
"""
_COMPLETE: LiteralString = """
    SELECT greatest(
        coalesce(h.checked_at - make_interval(secs => h.lag_seconds), t.created_at),
        (SELECT max(o.started_at) FROM modak.op_log o
            WHERE o.table_id = t.table_id AND o.kind = 'reanchor' AND o.phase IN ('committed', 'done')))
    FROM modak.tables t LEFT JOIN modak.mirror_health h USING (table_id) WHERE t.table_id = %s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorHealth:
    """How the pump of one table is doing; `flushes` and `changes` count up over its life."""

    table_id: int
    error: str | None = None
    failing_since: datetime | None = None
    lag_bytes: int = 0
    lag_seconds: float = 0.0
    retained_bytes: int = 0
    slot_active: bool = False
    paused: str | None = None
    flushes: int = 0
    changes: int = 0
    checked_at: datetime | None = None


def note_health(conn: Conn, health: MirrorHealth) -> None:
    """Write down how a table is doing; `flushes` and `changes` are added to what was there."""
    names = ("error", "lag_bytes", "lag_seconds", "retained_bytes", "slot_active", "paused", "flushes", "changes")
    conn.execute(_NOTE, {"table_id": health.table_id, **{name: getattr(health, name) for name in names}})


def note_pause(conn: Conn, table_id: int, why: str) -> None:
    """Write down why a table that has told before stands still from now on."""
    conn.execute("UPDATE modak.mirror_health SET paused = %s WHERE table_id = %s", (why, table_id))


def read_health(conn: Conn) -> dict[int, MirrorHealth]:
    """How every mirrored table was doing when its pump last told."""
    with conn.cursor() as cursor:
        rows: Sequence[tuple[Any, ...]] = cursor.execute(_READ).fetchall()
        names = [column.name for column in cursor.description or ()]
    return {row[0]: MirrorHealth(**dict(zip(names, row, strict=True))) for row in rows}


def complete_until(conn: Conn, table_id: int) -> datetime | None:
    """When the lake certainly had everything: by what was told last, the last comparison, or the registration."""
    row = conn.execute(_COMPLETE, (table_id,)).fetchone()
    return row[0] if row else None


def follow_name(conn: Conn, table_id: int, name: TableName) -> None:
    """The heap has another name or schema now."""
    done = conn.execute(
        "UPDATE modak.tables SET schema_name = %s, table_name = %s WHERE table_id = %s",
        (name.schema, name.name, table_id),
    ).rowcount
    if done != 1:
        raise Conflict("catalog.not_registered", f"Table {table_id} is no longer registered.")
