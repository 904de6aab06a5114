"""DDL that never queues.

A DDL statement that waits for its lock makes every later reader and writer of the table wait behind it. So every DDL of
ours waits a few milliseconds at most, gives up, and is tried again in the next cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors, pq, sql

from modak.core.errors import ModakError
from modak.postgres.connect import translate

Statement = sql.SQL | sql.Composed | str
Hold = Callable[[psycopg.Connection[Any]], None]
"""What must be so while the DDL happens; it raises where it is not, and keeps it so until the transaction ends."""
_BUSY = (errors.LockNotAvailable, errors.DeadlockDetected)


def attempt(
    conn: psycopg.Connection[Any],
    statement: Statement | Sequence[Statement],
    lock_millis: int = 50,
    hold: Hold | None = None,
) -> bool:
    """Run DDL in a transaction of its own; False when a lock was not free, and then nothing has changed."""
    statements = [statement] if isinstance(statement, str | sql.SQL | sql.Composed) else list(statement)
    try:
        with _impatient(conn, lock_millis, hold):
            for each in statements:
                conn.execute(each)
    except _BUSY:
        return False
    except psycopg.Error as error:
        raise translate(error) from error
    return True


def attempt_outside(conn: psycopg.Connection[Any], statement: Statement, lock_millis: int = 50) -> bool:
    """Run a statement that refuses a transaction block (DETACH CONCURRENTLY); False when a lock was not free.

    Such a statement has steps of its own: after False, look at the state that it left (`Leaf.detach_pending`).
    """
    _require_idle(conn)
    before = conn.autocommit
    conn.autocommit = True
    try:
        conn.execute("SELECT pg_catalog.set_config('lock_timeout', %s, false)", (f"{lock_millis}ms",))
        try:
            conn.execute(statement)
        finally:
            if not conn.broken:
                conn.execute("RESET lock_timeout")
    except _BUSY:
        return False
    except psycopg.Error as error:
        raise translate(error) from error
    finally:
        if not conn.closed:
            conn.autocommit = before
    return True


@contextmanager
def impatient(conn: psycopg.Connection[Any], lock_millis: int = 50, hold: Hold | None = None) -> Iterator[None]:
    """A transaction whose every lock comes within milliseconds, else `postgres.busy` and nothing has changed."""
    try:
        with _impatient(conn, lock_millis, hold):
            yield
    except psycopg.Error as error:
        raise translate(error) from error


@contextmanager
def _impatient(conn: psycopg.Connection[Any], lock_millis: int, hold: Hold | None) -> Iterator[None]:
    _require_idle(conn)
    with conn.transaction():
        conn.execute("SELECT pg_catalog.set_config('lock_timeout', %s, true)", (f"{lock_millis}ms",))
        if hold is not None:
            hold(conn)
        yield


def _require_idle(conn: psycopg.Connection[Any]) -> None:
    # Inside a transaction the lock would be kept until its end, whatever happens to the statement.
    if conn.info.transaction_status not in (pq.TransactionStatus.IDLE, pq.TransactionStatus.UNKNOWN):
        raise ModakError("postgres.in_transaction", "DDL needs a connection without an open transaction.")
