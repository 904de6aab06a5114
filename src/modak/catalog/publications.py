"""Which metadata of each table the foreign catalog of `MODAK_CATALOG_URI` was told of last."""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg

Conn = psycopg.Connection[Any]

_NOTE: LiteralString = """
    INSERT INTO modak.publications (table_id, catalog_uri, metadata_location) VALUES (%s, %s, %s)
    ON CONFLICT (table_id, catalog_uri)
    DO UPDATE SET metadata_location = excluded.metadata_location, published_at = clock_timestamp()
"""


def note_published(conn: Conn, table_id: int, catalog_uri: str, metadata_location: str) -> None:
    """Remember that the catalog shows this state; commits."""
    conn.execute(_NOTE, (table_id, catalog_uri, metadata_location))
    conn.commit()
