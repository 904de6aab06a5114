"""The spill partition: plain INSERT and COPY of historical rows become rows of `modak.delta`.

Registration enables it, reclaim widens it after each drop, unregister disables it. It must always be empty; the worker
looks and alarms. The trigger and the DDL are in `004_spill.sql`. A table with a DEFAULT partition gets a trigger on it
instead, which lets recent rows stay (`023_divert.sql`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres.connect import translate
from modak.postgres.ddl import Hold, impatient

Conn = psycopg.Connection[Any]

_ASTRAY: LiteralString = """
    SELECT CASE WHEN p.partdefid = 0 THEN d.table_id IS NOT NULL ELSE 2 > (
        SELECT count(*) FROM pg_trigger g WHERE g.tgrelid = p.partdefid AND g.tgrelid = d.leaf_oid AND g.tgenabled = 'A'
            AND g.tgname IN ('~modak_divert', '~modak_divert_policed')
            AND g.tgfoid = 'modak.divert_from_default'::regproc) END
    FROM modak.tables t JOIN pg_partitioned_table p ON p.partrelid = t.relid
    LEFT JOIN modak.spills s USING (table_id) LEFT JOIN modak.diversions d USING (table_id)
    WHERE t.table_id = %s AND (num_nonnulls(s.table_id, d.table_id) > 0 OR EXISTS (
        SELECT FROM modak.op_log o WHERE o.table_id = t.table_id AND o.kind = 'register' AND o.phase = 'committed'))
"""


@dataclass(frozen=True, slots=True)
class Spill:
    """The spill partition of a table: it takes rows below `upper` and refuses those below `lower`."""

    name: TableName
    oid: int
    lower: int
    upper: int


def find(conn: Conn, table_id: int) -> Spill | None:
    """The spill partition of a table, if transparent writes are enabled."""
    row = conn.execute(
        "SELECT n.nspname, c.relname, c.oid, s.lower_bound, s.upper_bound FROM modak.spills s"
        " JOIN pg_class c ON c.oid = s.spill_oid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE s.table_id = %s",
        (table_id,),
    ).fetchone()
    return Spill(TableName(row[0], row[1]), row[2], row[3], row[4]) if row else None


def diverts(conn: Conn, table_id: int) -> bool:
    """Whether a DEFAULT partition of the user sends its historical rows to the delta."""
    row = conn.execute(
        "SELECT EXISTS (SELECT FROM modak.diversions d JOIN modak.tables t USING (table_id)"
        " JOIN pg_partitioned_table p ON p.partrelid = t.relid AND p.partdefid = d.leaf_oid WHERE d.table_id = %s)",
        (table_id,),
    ).fetchone()
    return bool(row and row[0])


def is_astray(conn: Conn, table_id: int) -> bool:
    """Whether transparent writes were enabled, or are to be, but a DEFAULT partition has come or gone since."""
    row = conn.execute(_ASTRAY, (table_id,)).fetchone()
    return bool(row and row[0])


def enable(conn: Conn, name: TableName, hold: Hold | None = None) -> str:
    """Let historical rows reach the delta, or find that they do; returns the partition through which they go."""
    reach("spill.before_enable")
    try:
        with conn.transaction():
            if hold is not None:
                hold(conn)
            row = conn.execute(
                "SELECT modak.modak_enable_transparent_writes(%s::regclass)", (_regclass(name),)
            ).fetchone()
    except psycopg.Error as error:
        raise translate(error) from error
    reach("spill.after_enable")
    return str(row[0]) if row else ""


def disable(conn: Conn, name: TableName) -> bool:
    """Let no more historical rows through; whether any were."""
    reach("spill.before_disable")
    try:
        with conn.transaction():
            row = conn.execute(
                "SELECT modak.modak_disable_transparent_writes(%s::regclass)", (_regclass(name),)
            ).fetchone()
    except psycopg.Error as error:
        raise translate(error) from error
    reach("spill.after_disable")
    return bool(row and row[0])


def forget(conn: Conn, table_id: int) -> None:
    """Drop the shadow of a table that was dropped behind our back, its spill partition with it."""
    reach("spill.before_forget")
    shadows = (sql.Identifier("modak", f"shadow_{table_id}{which}") for which in ("", "_default"))
    conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.SQL(", ").join(shadows)))
    reach("spill.after_forget")


def widen(conn: Conn, table_id: int, upper: int, lock_millis: int = 50, hold: Hold | None = None) -> bool:
    """Let the spill take rows up to `upper`, in one short transaction; False when the table is busy."""
    reach("spill.before_widen")
    try:
        with impatient(conn, lock_millis, hold):
            conn.execute("SELECT modak.widen_spill(%s, %s)", (table_id, upper))
    except ModakError as error:
        if error.code == "postgres.busy":
            return False
        raise
    reach("spill.after_widen")
    return True


def stray_rows(conn: Conn, table_id: int) -> int:
    """Rows found in the spill partition: anything but zero is an alarm."""
    spill = find(conn, table_id)
    if spill is None:
        return 0
    query = sql.SQL("SELECT count(*) FROM ONLY {}").format(sql.Identifier(spill.name.schema, spill.name.name))
    row = conn.execute(query).fetchone()
    return int(row[0]) if row else 0


def _regclass(name: TableName) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in (name.schema, name.name))
