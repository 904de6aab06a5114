"""Statements of lake retention, each in the caller's transaction: nobody may read, and the delta below R goes.

Readers take the pin lock shared until their pin is committed, and loads until their staged rows are. Retention tries it
exclusively and holds it to the end of its transaction: whoever holds it makes it give up, whoever comes later sees the
new retention line.
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
_HOLD_LINE: LiteralString = "SELECT pg_advisory_xact_lock_shared(modak.pin_lock_key(%s))"
_LINE: LiteralString = "SELECT retention_line FROM modak.cutline WHERE table_id = %s"
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


def hold_line(conn: Conn, table_id: int) -> TierKey | None:
    """The retention line of a table, which stays where it is until the transaction ends."""
    # Again the lock in a statement of its own: a line that moves right now is waited for, and then seen.
    conn.execute(_HOLD_LINE, (table_id,))
    row = conn.execute(_LINE, (table_id,)).fetchone()
    return None if row is None else row[0]


def expire_delta(conn: Conn, table_id: int, below: TierKey) -> int:
    """Remove every version of the delta rows below the retention line; how many. A row just being written stays.

    Its writer must not hold up the commit. Readers do not look below the line, and the next cycle finds the row.
    """
    return conn.execute(_EXPIRE, (table_id, below)).rowcount
