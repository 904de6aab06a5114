"""Operations that run beside the leader's own loop, and how others see that somebody is still at them.

A session lock stands for the process (or thread) that works on the operation. When it dies the lock goes with its
connection, and the next pass of the leader undoes what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import LiteralString

from modak.core.ids import OpId
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn

OWNED = frozenset({"ingest", "adopt"})
"""Kinds of operations that hold such a lock."""

_HOLD: LiteralString = "SELECT pg_advisory_lock(hashtextextended('modak op ' || %s, 0))"
_ASK: LiteralString = "SELECT pg_try_advisory_lock(hashtextextended('modak op ' || %s, 0))"


@contextmanager
def held(dsn: Dsn, op_id: OpId) -> Iterator[None]:
    """Work on an operation: nobody else touches it while the block runs."""
    with connect(dsn, autocommit=True, application="modak work") as conn:
        conn.execute(_HOLD, (op_id,))
        yield


def is_held(dsn: Dsn, op_id: OpId) -> bool:
    """Whether somebody works on an operation."""
    with connect(dsn, autocommit=True) as conn:
        got = conn.execute(_ASK, (op_id,)).fetchone()
        return not (got and got[0])
