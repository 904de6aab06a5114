"""What the foreign catalog of `MODAK_CATALOG_URI` was told of each table, and what must still be taken out of it.

A row is written before the catalog is told for the first time, so that none which may stand there is forgotten.
Unregistering turns it into a withdrawal in its own transaction (`moves.unregister`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg

from modak.core.errors import ModakError
from modak.lake.model import LakeName
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]

_INTEND: LiteralString = """
    INSERT INTO modak.publications (table_id, catalog_uri, metadata_location) VALUES (%s, %s, '')
    ON CONFLICT (table_id, catalog_uri) DO NOTHING
"""
_NOTE: LiteralString = """
    UPDATE modak.publications SET metadata_location = %s, published_at = clock_timestamp()
    WHERE table_id = %s AND catalog_uri = %s
"""
_WAITING: LiteralString = """
    SELECT lake_namespace, lake_name, location FROM modak.withdrawals WHERE catalog_uri = %s ORDER BY asked_at
"""
_DONE: LiteralString = """
    DELETE FROM modak.withdrawals WHERE catalog_uri = %s AND lake_namespace = %s AND lake_name = %s AND location = %s
"""
_TURN: LiteralString = "SELECT pg_try_advisory_lock(hashtextextended('modak publication ' || %s, 0))"


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A table that is to leave the foreign catalog."""

    lake: LakeName
    location: str


@contextmanager
def turn(dsn: Dsn, lake: LakeName) -> Iterator[Conn]:
    """Tell the foreign catalog about one table, alone: a late publication must not follow a withdrawal."""
    with connect(dsn, autocommit=True, application="modak publication") as conn:
        row = conn.execute(_TURN, (str(lake),)).fetchone()
        if not (row and row[0]):
            raise ModakError(
                "publish.busy", f"Somebody else tells the foreign catalog about {lake} now.", retryable=True
            )
        yield conn


def intend(conn: Conn, table_id: int, catalog_uri: str) -> None:
    """Remember that the catalog may know the table from now on."""
    try:
        conn.execute(_INTEND, (table_id, catalog_uri))
    except psycopg.errors.ForeignKeyViolation:
        raise ModakError("catalog.not_registered", "The table is no longer registered.", retryable=True) from None


def note_published(conn: Conn, table_id: int, catalog_uri: str, metadata_location: str) -> None:
    """Remember that the catalog shows this state; nothing is left to note of a table that has gone meanwhile."""
    conn.execute(_NOTE, (metadata_location, table_id, catalog_uri))


def told_of(conn: Conn, table_id: int) -> list[str]:
    """The catalogs that may know a table."""
    query: LiteralString = "SELECT catalog_uri FROM modak.publications WHERE table_id = %s ORDER BY 1"
    return [uri for (uri,) in conn.execute(query, (table_id,))]


def waiting(conn: Conn, catalog_uri: str) -> list[Withdrawal]:
    """What must still leave a catalog, the longest wait first."""
    return [
        Withdrawal(LakeName(tuple(levels.split(".")), name), location)
        for levels, name, location in conn.execute(_WAITING, (catalog_uri,))
    ]


def is_registered(conn: Conn, lake: LakeName) -> bool:
    """Whether a table has that name in the lake (again)."""
    query: LiteralString = "SELECT FROM modak.tables WHERE lake_namespace = %s AND lake_name = %s"
    return conn.execute(query, (lake.namespace_text, lake.name)).fetchone() is not None


def withdrawn(conn: Conn, catalog_uri: str, entry: Withdrawal) -> None:
    """The table has left the catalog."""
    conn.execute(_DONE, (catalog_uri, entry.lake.namespace_text, entry.lake.name, entry.location))
