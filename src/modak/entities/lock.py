"""One worker at a time per schema: a session advisory lock on a connection that belongs to nothing else.

The key is a hash of the database, the change log and the schema. The lock ends with its connection, so a worker that
died never blocks the next one; `check` tells a worker whose connection was lost before it publishes anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from modak.core.errors import Conflict
from modak.core.faults import reach
from modak.core.names import TableName
from modak.entities.address import Address
from modak.entities.tables import identifier, no_tables
from modak.postgres.connect import GUARDS, connect, session_sql, translate

_KEY = """
hashtextextended(current_database() || '/' || to_regclass(%(table)s)::oid::text || '/' || %(schema)s::text, 7223)
"""
_TRY = f"SELECT pg_try_advisory_lock({_KEY})"
_RELEASE = f"SELECT pg_advisory_unlock({_KEY})"
_HELD = f"""
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted AND objsubid = 1
               AND (classid::int8 << 32 | objid::int8) = {_KEY})
"""  # noqa: S608 - composed of constants


class SchemaLock:
    """A lock that is held."""

    def __init__(self, conn: psycopg.Connection[Any], schema_id: int, table: TableName) -> None:
        self._conn = conn
        self._names = _names(conn, schema_id, table)

    def check(self) -> None:
        """Raise `entities.lock_lost` if the lock has not been held without a gap until now."""
        try:
            row = self._conn.execute(_HELD, self._names).fetchone()
        except psycopg.Error:
            row = None
        if row is None or not row[0]:
            raise Conflict(
                "entities.lock_lost",
                "The connection that held the schema's lock has ended, or a pooler stands before Postgres.",
                hint="Nothing was published; name the server itself and not a pooler.",
            )


def acquire_schema_lock(conn: psycopg.Connection[Any], schema_id: int, table: str = "change_log") -> bool:
    """Try to take the lock of a schema on this connection, so that no other flush or compaction works on it."""
    name = TableName.parse(table)
    row = conn.execute(_TRY, _names(conn, schema_id, name)).fetchone()
    if row is None or row[0] is None:
        # A log that is not there has no key: nobody holds its lock, and nobody can take it.
        raise no_tables(name)
    return bool(row[0])


def release_schema_lock(conn: psycopg.Connection[Any], schema_id: int, table: str = "change_log") -> bool:
    """Give the lock of a schema back; False if this connection did not hold it."""
    row = conn.execute(_RELEASE, _names(conn, schema_id, TableName.parse(table))).fetchone()
    return row is not None and bool(row[0])


@contextmanager
def schema_lock(address: Address, schema_id: int, table: str) -> Iterator[SchemaLock | None]:
    """Hold the lock of a schema for a block, or give `None` where somebody else holds it."""
    conn = connect(address.fresh(), autocommit=True, application="modak entities lock")
    try:
        conn.execute(session_sql(GUARDS))
        if not acquire_schema_lock(conn, schema_id, table):
            yield None
            return
        reach("entities.locked")
        try:
            yield SchemaLock(conn, schema_id, TableName.parse(table))
        finally:
            if not conn.broken:
                release_schema_lock(conn, schema_id, table)
    except psycopg.Error as error:
        raise translate(error) from error
    finally:
        # Closing ends the session, and with it the lock, whatever state it is in.
        conn.close()


def _names(conn: psycopg.Connection[Any], schema_id: int, table: TableName) -> dict[str, object]:
    return {"table": identifier(table).as_string(conn), "schema": schema_id}
