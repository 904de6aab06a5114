"""Keys that are enums, of tables from before such keys were refused: the labels by which lake and delta know rows.

`ALTER TYPE … RENAME VALUE` changes the text of a key in Postgres alone. From then on a correction would miss its row,
so nothing is committed until the label has its name again. A few rows per table.
"""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg

from modak.core.errors import Refused

Conn = psycopg.Connection[Any]

_NOTE: LiteralString = """
    INSERT INTO modak.key_labels SELECT DISTINCT %(table)s::bigint, k.label_oid, k.label
    FROM modak.key_labels_now(%(table)s) k ON CONFLICT DO NOTHING
"""
_RENAMED: LiteralString = """
    SELECT format('Label %%L of the key column %%I was renamed to %%L: rows in the lake are still known as %%L.',
            l.label, k.column_name, k.label, l.label),
        format('Rename it back: ALTER TYPE %%s RENAME VALUE %%L TO %%L.', k.type_name, k.label, l.label)
    FROM modak.key_labels_now(%(table)s) k JOIN modak.key_labels l USING (label_oid)
    WHERE l.table_id = %(table)s AND l.label <> k.label ORDER BY l.label
"""


def problems(conn: Conn, table_id: int) -> list[str]:
    """Which labels were renamed, and how to undo it."""
    return [f"{what} {hint}" for what, hint in conn.execute(_RENAMED, {"table": table_id})]


def require_known(conn: Conn, table_id: int) -> None:
    """Stop when a label was renamed; take new ones down."""
    conn.execute(_NOTE, {"table": table_id})
    found = conn.execute(_RENAMED, {"table": table_id}).fetchone()
    if found is not None:
        raise Refused("catalog.key_label", found[0], hint=found[1])
