"""Which tables go into the change stream, and how much of an old row Postgres writes for them.

DDL that never queues (`ddl.py`): a helper says what it could not do, and the next cycle does it. Replica identity is a
property of every leaf, and one that is attached later comes with its own, so it is looked at in every cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres.connect import translate
from modak.postgres.ddl import Hold, Statement, attempt

_WITH_GENERATED = 180_000
"""The server version from which on stored generated columns can be published."""

_NOT_FULL = """
WITH RECURSIVE tree AS (
    SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s
    UNION ALL SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid
)
SELECT n.nspname::text, c.relname::text
FROM tree JOIN pg_class c ON c.oid = tree.oid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relreplident <> 'f' AND c.relkind IN ('r', 'p')
ORDER BY 1, 2
"""
# By way of jsonb, because older servers lack some of these columns.
_PUBLICATIONS = """
SELECT p.pubname::text,
    concat_ws('/', p.oid, p.xmin, t.numbers),
    t.relids,
    p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate AND p.pubviaroot AND t.unfiltered
        AND coalesce(to_jsonb(p) ->> 'pubgencols', 's') = 's'
FROM pg_catalog.pg_publication p, LATERAL (
    SELECT string_agg(r.oid::text, ',' ORDER BY r.oid) AS numbers,
        coalesce(array_agg(r.prrelid ORDER BY r.oid), '{}') AS relids,
        coalesce(bool_and(to_jsonb(r) ->> 'prqual' IS NULL AND to_jsonb(r) ->> 'prattrs' IS NULL), true) AS unfiltered
    FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = p.oid) t
WHERE p.pubname = ANY(%s)
"""


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as the server has it."""

    mark: str
    """Another one of the same name would have another, and so would this one once its options or tables were changed,
    even if they were changed back."""
    relids: tuple[int, ...]
    """The tables that were named to it."""
    whole: bool
    """Whether it gives all changes of all their rows and columns, those of partitions as their parent's."""


def create_publication(conn: psycopg.Connection[Any], name: str, tables: Sequence[TableName]) -> bool:
    """Publish tables, partitioned ones under their own name; False when a table was not free."""
    generated = ", publish_generated_columns = stored" if conn.info.server_version >= _WITH_GENERATED else ""
    options = sql.SQL("publish_via_partition_root = true") + sql.SQL(generated)
    reach("publication.creating")
    done = attempt(
        conn,
        sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH ({})").format(sql.Identifier(name), _names(tables), options),
    )
    reach("publication.created")
    return done


def drop_publication(conn: psycopg.Connection[Any], name: str) -> bool:
    """Drop a publication, if it is there; False when a lock was not free."""
    reach("publication.dropping")
    done = attempt(conn, sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
    reach("publication.dropped")
    return done


def find_publications(conn: psycopg.Connection[Any], names: Sequence[str]) -> dict[str, Publication]:
    """Those of the publications that exist."""
    try:
        rows = conn.execute(_PUBLICATIONS, (list(names),))
        return {name: Publication(mark, tuple(map(int, relids)), whole) for name, mark, relids, whole in rows}
    except psycopg.Error as error:
        raise translate(error) from error


def write_full_rows(
    conn: psycopg.Connection[Any],
    table: TableName,
    hold: Hold | None = None,
    before: Callable[[TableName], Sequence[Statement]] = lambda _: (),
) -> tuple[TableName, ...]:
    """Set REPLICA IDENTITY FULL on the table and all its partitions; those whose lock was not free are given back.

    `before` gives statements for the same transaction, when nobody else writes to the relation any more.
    """
    return tuple(name for name in not_full(conn, table) if not _set_identity(conn, name, "FULL", hold, before(name)))


def write_default_identity(conn: psycopg.Connection[Any], tables: Sequence[TableName]) -> tuple[TableName, ...]:
    """Set REPLICA IDENTITY back to the primary key; those tables whose lock was not free are given back."""
    return tuple(name for name in tables if not _set_identity(conn, name, "DEFAULT", None))


def not_full(conn: psycopg.Connection[Any], table: TableName) -> tuple[TableName, ...]:
    """The table and partitions for which Postgres does not write whole old rows."""
    try:
        return tuple(TableName(*row) for row in conn.execute(_NOT_FULL, (table.schema, table.name)))
    except psycopg.Error as error:
        raise translate(error) from error


def _set_identity(
    conn: psycopg.Connection[Any],
    table: TableName,
    identity: str,
    hold: Hold | None,
    before: Sequence[Statement] = (),
) -> bool:
    reach("identity.setting")
    name = sql.Identifier(table.schema, table.name)
    kind = sql.SQL("FULL" if identity == "FULL" else "DEFAULT")
    statement = sql.SQL("ALTER TABLE ONLY {} REPLICA IDENTITY {}").format(name, kind)
    lock = [sql.SQL("LOCK TABLE ONLY {} IN ACCESS EXCLUSIVE MODE").format(name)] if before else []
    done = attempt(conn, [*lock, *before, statement], hold=hold)
    reach("identity.set")
    return done


def _names(tables: Sequence[TableName]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(table.schema, table.name) for table in tables)
