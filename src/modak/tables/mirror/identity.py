"""What Postgres has to write down for us: whole old rows for the table and every leaf, and no TRUNCATE of a leaf alone.

A leaf that is attached later comes with a replica identity of its own, and a TRUNCATE of a leaf says nothing to the
publication of its root. So every cycle looks at all leaves. DDL here never queues: what was busy is named, and the next
cycle does it.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from modak.catalog.records import TableRecord
from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres import ddl
from modak.postgres.changes.publication import write_full_rows
from modak.postgres.connect import translate

Conn = psycopg.Connection[Any]

# Under the lock of the leaf: whoever wrote to it under the other identity has committed before here.
_NOTE_INDEX = sql.SQL("""
    INSERT INTO modak.mirror_diffs (table_id, lower_bound, upper_bound, after_lsn, reason)
    SELECT l.table_id, p.lower_bound, p.upper_bound, pg_current_wal_insert_lsn(), {reason}
    FROM pg_class c JOIN modak.cutline l ON l.table_id = {table} AND l.frontier IS NOT NULL
    LEFT JOIN modak.partitions p ON p.table_id = l.table_id AND p.leaf_oid = c.oid AND p.state <> 'dropped'
    WHERE c.oid = to_regclass(format('%I.%I', {schema}::text, {name}::text)) AND c.relreplident = 'i'
        AND c.relkind = 'r' AND c.relispartition
""")
_OID = "SELECT to_regclass(format('%%I.%%I', %s::text, %s::text))::oid"


def ensure_identity(conn: Conn, table: TableRecord, hold: ddl.Hold | None = None) -> tuple[TableName, ...]:
    """Put replica identity and TRUNCATE guards where they are missing; those that were busy are given back.

    `conn` is in autocommit mode. Cheap when there is nothing to do: one query each.
    """
    busy = set(write_full_rows(conn, table.name, hold, lambda leaf: [_noted_index(table, leaf)]))
    for leaf in unguarded(conn, table):
        if not _guard(conn, table, leaf, hold):
            busy.add(leaf)
    return tuple(sorted(busy, key=str))


def _noted_index(table: TableRecord, leaf: TableName) -> sql.Composed:
    """Note the stretch of a leaf that had the identity of another index: its rows could change keys without a trace.

    The change stream shows the identity of a table, and only of leaves it does not.
    """
    return _NOTE_INDEX.format(
        reason=sql.Literal(f"{leaf} had the replica identity of an index"),
        table=sql.Literal(table.table_id),
        schema=sql.Literal(leaf.schema),
        name=sql.Literal(leaf.name),
    )


def unguarded(conn: Conn, table: TableRecord) -> tuple[TableName, ...]:
    """The table and leaves that lack the guard against TRUNCATE."""
    try:
        rows = conn.execute("SELECT * FROM modak.unguarded(%s)", (table.table_id,)).fetchall()
    except psycopg.Error as error:
        raise translate(error) from error
    return tuple(TableName(schema, name) for schema, name in rows)


def remove_guards(conn: Conn, table_id: int) -> bool:
    """Take the guards off again; False when a lock was not free."""
    reach("mirror.before_unguard")
    done = ddl.attempt(conn, f"SELECT modak.remove_truncate_guards({table_id:d})")
    reach("mirror.after_unguard")
    return done


def _guard(conn: Conn, table: TableRecord, leaf: TableName, hold: ddl.Hold | None) -> bool:
    reach("mirror.before_guard")
    oid = conn.execute(_OID, (leaf.schema, leaf.name)).fetchone()
    if oid is None or oid[0] is None:
        return True
    install = f"SELECT modak.install_truncate_guard({table.table_id:d}, {int(oid[0]):d})"
    done = ddl.attempt(conn, install, hold=hold)
    reach("mirror.after_guard")
    return done
