"""Statements of lake retention, each in the caller's transaction: nobody may read, and the delta below R goes.

Readers take the pin lock shared until their pin is committed. Retention tries it exclusively and holds it to the end of
its transaction: whoever is reading makes it give up, whoever comes later sees the new retention line.
"""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg

from modak.core.axis import TierKey
from modak.core.errors import Conflict

Conn = psycopg.Connection[Any]

_UNPINNED: LiteralString = """
    SELECT NOT EXISTS (SELECT FROM modak.read_pins WHERE table_id = %s AND expires_at > clock_timestamp())
"""
_EXPIRE: LiteralString = """
    DELETE FROM modak.delta WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM modak.delta WHERE table_id = %s AND tier_key < %s FOR UPDATE SKIP LOCKED))
"""


def require_no_pins(conn: Conn, table_id: int) -> None:
    """Stop while anybody reads, or begins to read; until the transaction ends nobody else can begin."""
    # The lock first and in a statement of its own: a pin that is not committed yet is not to be seen.
    quiet = conn.execute("SELECT pg_try_advisory_xact_lock(modak.pin_lock_key(%s))", (table_id,)).fetchone()
    unpinned = conn.execute(_UNPINNED, (table_id,)).fetchone()
    if not (quiet and quiet[0] and unpinned and unpinned[0]):
        raise Conflict(
            "catalog.pinned", f"A reader holds a pin on table {table_id}.", hint="What it needs goes after its end."
        )


def expire_delta(conn: Conn, table_id: int, below: TierKey) -> int:
    """Remove every version of the delta rows below the retention line; how many. A row just being written stays.

    Its writer must not hold up the commit. Readers do not look below the line, and the next cycle finds the row.
    """
    return conn.execute(_EXPIRE, (table_id, below)).rowcount
