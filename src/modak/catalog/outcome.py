"""What became of a commit whose acknowledgement was lost.

The journal row decides, and only under its lock: without it, a transaction still in progress looks as if it had not
landed. A connection that is half open can hold that lock for minutes, so its backend, named by the journal, is ended.
"""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg
import structlog

from modak.core.clock import Clock, SystemClock
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId
from modak.core.states import LANDED
from modak.postgres.connect import connect, translate
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]

_LOG = structlog.get_logger()
_PAUSE = 0.5
_END_COMMITTER: LiteralString = """
    SELECT pg_terminate_backend(l.pid, 2000) FROM pg_locks l
    WHERE l.pid = %s AND l.pid <> pg_backend_pid() AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND l.relation = 'modak.op_log'::regclass
    LIMIT 1
"""


def settle(
    dsn: Dsn, op_id: OpId, *, patience: float = 60.0, lock_millis: int = 2000, clock: Clock | None = None
) -> bool:
    """Whether the commit of an operation has landed. If not, it cannot any more, unless its own process tries again.

    Waits for a server that is away, up to `patience` seconds; then the outcome stays unknown until the next start.
    """
    time = clock or SystemClock()
    deadline = time.monotonic() + patience
    while True:
        try:
            answer = _ask(dsn, op_id, lock_millis)
        except ModakError as error:
            if not error.retryable:
                raise
            _LOG.warning("commit.outcome_pending", op=op_id, reason=error.message)
            answer = None
        if answer is not None:
            return answer
        if time.monotonic() >= deadline:
            raise ModakError(
                "catalog.outcome_unknown",
                f"Whether operation {op_id} has landed cannot be asked now.",
                hint="Nothing is lost: the journal decides as soon as Postgres answers again.",
                retryable=True,
            )
        time.sleep(_PAUSE)


def _ask(dsn: Dsn, op_id: OpId, lock_millis: int) -> bool | None:
    with connect(dsn, autocommit=True, application="modak settle") as conn:
        try:
            with conn.transaction(force_rollback=True):
                conn.execute("SELECT set_config('lock_timeout', %s, true)", (f"{lock_millis}ms",))
                row = conn.execute("SELECT phase FROM modak.op_log WHERE op_id = %s FOR UPDATE", (op_id,)).fetchone()
        except psycopg.errors.LockNotAvailable:
            _end_committer(conn, op_id)
            return None
        except psycopg.Error as error:
            raise translate(error) from error
    if row is None:
        raise Refused("journal.unknown_op", f"The journal has no operation {op_id}.")
    return row[0] in LANDED


def _end_committer(conn: Conn, op_id: OpId) -> None:
    row = conn.execute("SELECT backend_pid FROM modak.op_log WHERE op_id = %s", (op_id,)).fetchone()
    if row is None or row[0] is None:
        return
    reach("catalog.before_terminate")
    ended = conn.execute(_END_COMMITTER, (row[0],)).fetchone()
    reach("catalog.after_terminate")
    _LOG.warning("commit.backend_ended", op=op_id, pid=row[0], ended=bool(ended and ended[0]))
