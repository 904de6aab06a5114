"""How the replication objects of a mirrored table are called. Pure.

The names come from the number of the table, so they stay what they are when the table is renamed or moves to another
schema. Slots belong to the whole server, so theirs tell the databases of one server apart.
"""

from __future__ import annotations

import hashlib
import re

PREFIX = "modak_"


def slot_name(table_id: int, database: str) -> str:
    """The replication slot of a table; `database` is the name of the database (`site.dsn.dbname`)."""
    readable = re.sub(r"[^a-z0-9_]", "", database.lower())[:24]
    digest = hashlib.sha256(database.encode()).hexdigest()[:8]
    return f"{PREFIX}{readable}_{digest}_{table_id}"


def slot_pattern(table_id: int) -> str:
    """A regular expression for the slots of a table, whatever the database was called when they were made."""
    return f"^{PREFIX}[a-z0-9_]*_[0-9a-f]{{8}}_{table_id}$"


def publication_name(table_id: int) -> str:
    """The publication of a table."""
    return f"{PREFIX}{table_id}"
