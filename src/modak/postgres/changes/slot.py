"""Replication slots: the server's promise to keep the WAL of changes that we have not confirmed.

A slot is made together with a snapshot that shows exactly the rows before its first change, moved forward when changes
are safe in the lake, and dropped when nobody follows the table any more. Nothing here holds rows.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from psycopg import sql

from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.postgres.changes.lsn import read_lsn, write_lsn
from modak.postgres.connect import GUARDS, connect, session_sql, translate
from modak.postgres.dsn import Dsn

PLUGIN = "pgoutput"

_ALIVE = {
    "wal_sender_timeout": "0",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "4",
}
"""A reader that is busy with a large batch says nothing for minutes; that it lives is TCP's to find out."""

_NAME = re.compile(r"[a-z0-9_]{1,63}")
_STATE = """
SELECT s.slot_name::text, s.plugin::text, s.database::text, s.active_pid, s.restart_lsn::text,
       s.confirmed_flush_lsn::text, s.wal_status, pg_current_wal_flush_lsn()::text, s.two_phase
FROM pg_replication_slots s WHERE s.slot_name = %s
"""
_HISTORY = """
SELECT (pg_control_system()).system_identifier::text || '/' || left(pg_walfile_name(pg_current_wal_flush_lsn()), 8)
"""
_EVICT = """
SELECT active_pid, pg_terminate_backend(active_pid, %s) FROM pg_replication_slots
WHERE slot_name = %s AND active_pid IS NOT NULL AND active_pid <> pg_backend_pid()
"""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as the server shows it. A slot that lost its WAL has no `restart_lsn`, or `wal_status` lost."""

    name: str
    plugin: str
    database: str
    active_pid: int | None
    restart_lsn: int | None
    confirmed_lsn: int | None
    wal_status: str | None
    flush_lsn: int
    two_phase: bool

    @property
    def lost(self) -> bool:
        """Whether the WAL of its next change is gone, so that the table has to be anchored anew."""
        return self.restart_lsn is None or self.confirmed_lsn is None or self.wal_status == "lost"

    @property
    def retained_bytes(self) -> int:
        """WAL that the server keeps because of the slot."""
        return 0 if self.restart_lsn is None else max(0, self.flush_lsn - self.restart_lsn)

    @property
    def reread_bytes(self) -> int:
        """WAL that every new session reads again before the first change that is new to it."""
        if self.restart_lsn is None or self.confirmed_lsn is None:
            return 0
        return max(0, self.confirmed_lsn - self.restart_lsn)


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A slot just made: `snapshot` shows every row that was there before `consistent_lsn`, and no later one."""

    name: str
    consistent_lsn: int
    snapshot: str


def checked_name(name: str) -> str:
    """The name, if a slot can have it."""
    if not _NAME.fullmatch(name):
        raise Refused(
            "slot.name",
            f"{name!r} cannot be the name of a replication slot.",
            hint="Use at most 63 lower-case letters, digits and underscores.",
        )
    return name


@contextmanager
def created_slot(dsn: Dsn, name: str, *, patience_seconds: float = 30.0) -> Iterator[NewSlot]:
    """Make a slot, and keep its snapshot joinable while entered. The slot stays, whatever happens inside.

    The server first waits for every transaction that is open now; `patience_seconds` bounds that, and then nothing has
    been made.
    """
    command = sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL {} (SNAPSHOT 'export')").format(
        sql.Identifier(checked_name(name)), sql.Identifier(PLUGIN)
    )
    with replication_connection(dsn) as conn:
        reach("slot.creating")
        # Not `cancel`: it holds the interpreter's lock until the server answers, and every thread of ours stands still.
        timer = threading.Timer(patience_seconds, conn.cancel_safe)
        timer.start()
        try:
            row = conn.execute(command).fetchone()
        except psycopg.errors.DuplicateObject as error:
            raise Conflict(
                "slot.exists",
                f"There is a replication slot {name} already.",
                hint="Drop it, or use it.",
                retryable=False,
            ) from error
        except psycopg.Error as error:
            raise translate(error) from error
        finally:
            timer.cancel()
        reach("slot.created")
        if row is None:
            raise ModakError("postgres.error", f"Postgres said nothing about the new slot {name}.")
        yield NewSlot(name, read_lsn(row[1]), str(row[2]))


@contextmanager
def replication_connection(dsn: Dsn) -> Iterator[psycopg.Connection[Any]]:
    """A connection that understands replication commands, with our session settings and no timeouts."""
    door = replace(
        dsn, options=(*(pair for pair in dsn.options if pair[0] != "replication"), ("replication", "database"))
    )
    conn = connect(door, autocommit=True, application="modak changes")
    try:
        conn.execute(session_sql({**GUARDS, **_ALIVE}))
        yield conn
    finally:
        conn.close()


def slot_state(conn: psycopg.Connection[Any], slot: str) -> SlotState | None:
    """The slot as it is now, if there is one."""
    try:
        row = conn.execute(_STATE, (slot,)).fetchone()
    except psycopg.Error as error:
        raise translate(error) from error
    if row is None:
        return None
    name, plugin, database, active_pid, restart, confirmed, wal_status, flush, two_phase = row
    return SlotState(
        name=name,
        plugin=plugin,
        database=database,
        active_pid=active_pid,
        restart_lsn=None if restart is None else read_lsn(restart),
        confirmed_lsn=None if confirmed is None else read_lsn(confirmed),
        wal_status=wal_status,
        flush_lsn=read_lsn(flush),
        two_phase=two_phase,
    )


def usable_slot(conn: psycopg.Connection[Any], name: str) -> SlotState:
    """The slot, if changes can still be read from it."""
    state = slot_state(conn, name)
    if state is None or state.lost or state.plugin != PLUGIN:
        what = "is gone" if state is None else "has lost its WAL" if state.lost else "belongs to something else"
        raise Refused("slot.lost", f"The replication slot {name} {what}.", hint="Anchor the table anew.")
    return state


def wal_history(conn: psycopg.Connection[Any]) -> str | None:
    """Whose WAL positions are: the server's own number and its timeline, which a restore or a failover changes.

    None where the server does not tell us: everybody may ask, unless somebody took that away.
    """
    try:
        row = conn.execute(_HISTORY).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return None
    except psycopg.Error as error:
        raise translate(error) from error
    return str(row[0]) if row else None


def advance(conn: psycopg.Connection[Any], name: str, lsn: int) -> None:
    """Confirm everything before a position; a position that is confirmed already changes nothing."""
    state = usable_slot(conn, name)
    if state.confirmed_lsn is not None and lsn <= state.confirmed_lsn:
        return
    reach("slot.advancing")
    try:
        conn.execute("SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", (name, write_lsn(lsn)))
    except psycopg.Error as error:
        raise translate(error) from error
    reach("slot.advanced")


def evict(conn: psycopg.Connection[Any], name: str, wait_millis: int = 5_000) -> int | None:
    """End the backend that holds the slot and wait for its end; its process id, or None when nobody held it."""
    reach("slot.evicting")
    try:
        row = conn.execute(_EVICT, (wait_millis, name)).fetchone()
    except psycopg.Error as error:
        raise translate(error) from error
    reach("slot.evicted")
    if row is None:
        return None
    if not row[1]:
        raise slot_held(name, row[0])
    return int(row[0])


def slot_held(name: str, pid: int) -> ModakError:
    """Somebody else reads from the slot."""
    return ModakError(
        "slot.held",
        f"Process {pid} of the server holds the replication slot {name}.",
        hint="It is tried again; a holder that stays is evicted.",
        retryable=True,
    )


def drop_slot(conn: psycopg.Connection[Any], name: str) -> bool:
    """Drop the slot; False when there is none. A slot that somebody reads is `postgres.busy`."""
    reach("slot.dropping")
    try:
        conn.execute("SELECT pg_drop_replication_slot(%s)", (name,))
    except psycopg.errors.UndefinedObject:
        return False
    except psycopg.Error as error:
        raise translate(error) from error
    reach("slot.dropped")
    return True
