"""The transaction under which an export or a reader reads.

It takes ACCESS SHARE on every leaf *before* its snapshot, so no rewrite, VACUUM FULL or TRUNCATE can come between the
snapshot and the tasks that join it, and it holds both until all tasks have ended. If its connection dies the locks are
gone, and what the tasks have read since proves nothing: `check()` says so, and the export starts again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from modak.core.errors import Conflict, ModakError
from modak.core.names import TableName
from modak.postgres.connect import GUARDS, connect, session_sql, translate
from modak.postgres.dsn import Dsn

_PULSE_SECONDS = 15.0

_TRIES = 5
"""How often partitions may come or go between looking and locking."""

# Straight from the catalog: the functions that list partitions lock the table itself, and for as long as we read.
_LEAVES = """
WITH RECURSIVE tree(oid) AS (
    SELECT oid FROM unnest(%s::regclass[]::oid[]) AS oid
    UNION ALL SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid AND NOT i.inhdetachpending
)
SELECT DISTINCT n.nspname, c.relname
FROM tree JOIN pg_class c ON c.oid = tree.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND c.relname NOT LIKE %s AND NOT c.oid = ANY(%s::oid[])
ORDER BY 1, 2
"""

_HELD = """
SELECT c.oid, n.nspname, c.relname, coalesce(pg_relation_filenode(c.oid), 0)::int8,
       pg_relation_size(c.oid) / current_setting('block_size')::int8, pg_table_size(c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY(%s)
"""

_GONE = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)


def begin_snapshot(
    conn: psycopg.Connection[Any], tables: Sequence[TableName], *also: TableName, spared: Collection[int] = ()
) -> str:
    """Begin a transaction that holds every partition of the tables, and `also`; the id of its exported snapshot.

    The partitioned tables themselves and their spill are left alone, so that partitions can be added while it lasts,
    and so are the partitions whose numbers are `spared`, so that those can go.
    """
    for _ in range(_TRIES):
        leaves = _leaves(conn, tables, spared)
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            _lock(conn, [*leaves, *also])
            row = conn.execute("SELECT pg_export_snapshot()").fetchone()
            if row is not None and _leaves(conn, tables, spared) == leaves:
                return str(row[0])
        except _GONE:
            pass
        conn.execute("ROLLBACK")
    names = ", ".join(map(str, tables))
    raise Conflict("snapshot.unsettled", f"Partitions of {names} keep changing.", hint="Try again in a moment.")


def _leaves(conn: psycopg.Connection[Any], tables: Sequence[TableName], spared: Collection[int]) -> list[TableName]:
    names = [sql.Identifier(name.schema, name.name).as_string(conn) for name in tables]
    found = conn.execute(_LEAVES, (names, r"%\_modak\_spill", list(spared)))
    return [TableName(schema, name) for schema, name in found]


def _lock(conn: psycopg.Connection[Any], tables: Sequence[TableName]) -> None:
    # LOCK TABLE needs no snapshot, so the snapshot of the transaction is taken by the query after it.
    if tables:
        names = [sql.SQL("ONLY {}").format(sql.Identifier(name.schema, name.name)) for name in tables]
        conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(sql.SQL(", ").join(names)))


@dataclass(frozen=True, slots=True)
class HeldLeaf:
    """A leaf under lock, measured under the lock."""

    oid: int
    name: TableName
    relfilenode: int
    pages: int
    bytes: int


class ExportSnapshot:
    """Holds locks and an exported snapshot while it is entered: `id` for the tasks, `pg_snapshot` for the delta."""

    id: str
    pg_snapshot: str
    held: tuple[HeldLeaf, ...]

    def __init__(self, dsn: Dsn, leaves: Sequence[tuple[int, TableName]], *, lock_millis: int = 5_000) -> None:
        self._dsn = dsn
        self._leaves = tuple(leaves)
        self._lock_millis = lock_millis
        self._conn: psycopg.Connection[Any] | None = None
        self._ended = threading.Event()
        self._pulse: threading.Thread | None = None

    def __enter__(self) -> ExportSnapshot:
        self._conn = connect(self._dsn, autocommit=True, application="modak export")
        try:
            self._begin(self._conn)
        except psycopg.Error as error:
            self._conn.close()
            raise translate(error) from error
        except BaseException:
            self._conn.close()
            raise
        self._ended.clear()
        self._pulse = threading.Thread(target=self._keep_alive, name="modak-export-pulse", daemon=True)
        self._pulse.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._conn is not None:
            self._conn.close()
        if self._pulse is not None:
            self._pulse.join(timeout=5)

    def check(self) -> None:
        """Raise `export.snapshot_lost` if the locks and the snapshot have not been held without a gap until now."""
        try:
            if self._conn is None or self._conn.closed:
                raise psycopg.OperationalError("the connection is closed")
            self._conn.execute("SELECT 1")
        except psycopg.Error:
            raise Conflict(
                "export.snapshot_lost",
                "The connection that held the export's locks and snapshot has ended.",
                hint="What was read is discarded and the export starts again.",
            ) from None

    def _begin(self, conn: psycopg.Connection[Any]) -> None:
        conn.execute(session_sql({**GUARDS, "lock_timeout": f"{self._lock_millis}ms"}))
        conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            _lock(conn, [name for _, name in self._leaves])
        except _GONE as error:
            raise self._changed(error.diag.message_primary or "a table is gone") from error
        row = conn.execute("SELECT pg_export_snapshot(), pg_current_snapshot()::text").fetchone()
        if row is None:
            raise ModakError("postgres.error", "Postgres exported no snapshot.")
        self.id, self.pg_snapshot = str(row[0]), str(row[1])
        self.held = self._measure(conn)

    def _measure(self, conn: psycopg.Connection[Any]) -> tuple[HeldLeaf, ...]:
        found = {
            row[0]: HeldLeaf(row[0], TableName(row[1], row[2]), row[3], row[4], row[5])
            for row in conn.execute(_HELD, ([oid for oid, _ in self._leaves],))
        }
        for oid, name in self._leaves:
            if oid not in found or found[oid].name != name:
                raise self._changed(f"{name} is not the table that it was")
        return tuple(found[oid] for oid, _ in self._leaves)

    def _changed(self, what: str) -> Conflict:
        return Conflict(
            "export.leaf_changed",
            f"The partitions to export have changed: {what}.",
            hint="The plan is made again from what is there now.",
        )

    def _keep_alive(self) -> None:
        # Firewalls and poolers drop a connection that is silent for as long as an export can take.
        while not self._ended.wait(_PULSE_SECONDS):
            try:
                self.check()
            except Conflict:
                return
