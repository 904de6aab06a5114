"""What operators do beside the flows: hold a table back, ask for maintenance; and what the workers say of themselves.

None of it touches the lines of a table, so nothing here checks the leader's epoch. A pause takes effect with the next
round; what runs, ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from modak.core.errors import Refused
from modak.core.faults import reach

Conn = psycopg.Connection[Any]

_REQUEST: LiteralString = """
    INSERT INTO modak.maintenance_requests (table_id, requested_by) VALUES (%(table)s, %(by)s)
    ON CONFLICT (table_id) WHERE claimed_at IS NULL
    DO UPDATE SET requested_at = clock_timestamp(), requested_by = excluded.requested_by
    RETURNING request_id, xmax = 0
"""
_BEAT: LiteralString = """
    INSERT INTO modak.workers (holder, host, pid, version, role, epoch, address, started_at, doing)
    VALUES (%(holder)s, %(host)s, %(pid)s, %(version)s, %(role)s, %(epoch)s, %(address)s,
        clock_timestamp() - make_interval(secs => %(age)s), %(doing)s)
    ON CONFLICT (holder) DO UPDATE SET role = excluded.role, epoch = excluded.epoch, address = excluded.address,
        doing = excluded.doing, seen_at = clock_timestamp()
"""
_WORKERS: LiteralString = """
    SELECT w.holder, w.host, w.pid, w.version, w.role, w.epoch, w.address, w.started_at, w.seen_at, w.doing,
        extract(epoch FROM clock_timestamp() - w.seen_at)::float8 AS silent_seconds,
        clock_timestamp() - w.seen_at > make_interval(secs => %s) AS late
    FROM modak.workers w ORDER BY w.started_at, w.holder
"""
LATE_SECONDS = 7.0
"""A worker writes every two seconds; one that has missed three turns is stopped, cut off or dead."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A table that is held back."""

    table_id: int
    paused_at: datetime
    paused_by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Worker:
    """A process of the group, as its last heartbeat tells."""

    holder: str
    host: str
    pid: int
    version: str
    role: str
    epoch: int | None
    address: str | None
    started_at: datetime
    seen_at: datetime
    doing: Mapping[str, Any]
    silent_seconds: float
    late: bool
    """What it says of itself may no longer hold: its heartbeat has not come."""


@dataclass(frozen=True, slots=True)
class Lead:
    """The lease as it stands now."""

    holder: str | None
    epoch: int
    acquired_at: datetime | None
    seconds_left: float


def pause(conn: Conn, table_id: int, by: str, reason: str = "") -> bool:
    """Hold a table back; False: it is already."""
    reach("operators.before_pause")
    done = conn.execute(
        "INSERT INTO modak.pauses (table_id, paused_by, reason) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
        (table_id, by, reason),
    ).rowcount
    conn.commit()
    reach("operators.after_pause")
    return done == 1


def resume(conn: Conn, table_id: int) -> bool:
    """Let a table go on; False: it was not held back."""
    reach("operators.before_resume")
    done = conn.execute("DELETE FROM modak.pauses WHERE table_id = %s", (table_id,)).rowcount
    conn.commit()
    reach("operators.after_resume")
    return done == 1


def pauses(conn: Conn) -> dict[int, Pause]:
    """The tables that are held back."""
    with conn.cursor(row_factory=class_row(Pause)) as cursor:
        rows = cursor.execute("SELECT table_id, paused_at, paused_by, reason FROM modak.pauses").fetchall()
    return {row.table_id: row for row in rows}


def refuse_if_held(conn: Conn, table_id: int) -> None:
    """Refuse what a table that is held back must be spared."""
    query: LiteralString = """
        SELECT quote_ident(t.schema_name) || '.' || quote_ident(t.table_name), z.paused_by, z.reason
        FROM modak.pauses z JOIN modak.tables t USING (table_id) WHERE z.table_id = %s
    """
    row = conn.execute(query, (table_id,)).fetchone()
    if row is not None:
        table, who, why = row
        raise Refused(
            "tables.paused",
            f"{table} is held back by {who}{f': {why}' if why else ''}.",
            hint=f"Let it go on first: modak-worker resume --table {table}",
        )


def request_maintenance(conn: Conn, table_id: int, by: str) -> tuple[int, bool]:
    """File a request for a maintenance pass: its number, and whether it is new (one that waits is refreshed)."""
    refuse_if_held(conn, table_id)
    reach("operators.before_request")
    row = conn.execute(_REQUEST, {"table": table_id, "by": by}).fetchone()
    conn.commit()
    reach("operators.after_request")
    assert row is not None
    return int(row[0]), bool(row[1])


def beat(conn: Conn, worker: Mapping[str, Any]) -> None:
    """Write this process down as alive; `age` is how many seconds ago it started."""
    conn.execute(_BEAT, {**worker, "doing": Jsonb(worker["doing"])})
    conn.commit()


def leave(conn: Conn, holder: str) -> None:
    """Forget this process, and those that nobody has heard of for a day."""
    conn.execute(
        "DELETE FROM modak.workers WHERE holder = %s OR seen_at < clock_timestamp() - interval '1 day'", (holder,)
    )
    conn.commit()


def workers(conn: Conn) -> list[Worker]:
    """Every process of the group that has been heard of."""
    with conn.cursor(row_factory=class_row(Worker)) as cursor:
        return cursor.execute(_WORKERS, (LATE_SECONDS,)).fetchall()


def lead(conn: Conn) -> Lead:
    """Who leads, and for how long without another renewal."""
    query: LiteralString = """
        SELECT CASE WHEN expires_at > clock_timestamp() THEN holder END AS holder, epoch, acquired_at,
            CASE WHEN isfinite(expires_at)
                THEN greatest(extract(epoch FROM expires_at - clock_timestamp()), 0) ELSE 0 END::float8 AS seconds_left
        FROM modak.leader
    """
    with conn.cursor(row_factory=class_row(Lead)) as cursor:
        found = cursor.execute(query).fetchone()
    assert found is not None
    return found
