"""Leadership: a lease row with an epoch, measured by the server's clock.

Whoever finds the lease expired takes it with the next epoch. Every commit checks its epoch under a lock on the row, so
a leader that slept through its lease changes nothing; the lease itself holds no session lock and no open transaction. A
connection behind a transaction pooler is refused, because the commit protocol relies on its backend staying the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, LiteralString

import psycopg
import structlog

from modak.core.clock import Clock, SystemClock
from modak.core.errors import Refused
from modak.core.faults import reach
from modak.postgres.connect import connect, translate
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]

_LOG = structlog.get_logger()
_NAP = 0.25
"""How soon somebody who waits for the lease notices that it is to stop."""
_TAKE: LiteralString = """
    UPDATE modak.leader SET holder = %(holder)s, epoch = epoch + 1, backend_pid = pg_backend_pid(),
        acquired_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
    WHERE expires_at <= clock_timestamp()
    RETURNING epoch
"""
_RENEW: LiteralString = """
    UPDATE modak.leader SET expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
    WHERE holder = %(holder)s AND epoch = %(epoch)s AND expires_at > clock_timestamp()
"""
_STILL_OURS: LiteralString = """
    SELECT 1 FROM modak.leader WHERE holder = %(holder)s AND epoch = %(epoch)s AND expires_at > clock_timestamp()
"""
_RELEASE: LiteralString = """
    WITH free AS (
        UPDATE modak.leader SET expires_at = '-infinity' WHERE holder = %(holder)s AND epoch = %(epoch)s RETURNING epoch
    )
    SELECT pg_notify('modak_leader', free.epoch::text) FROM free
"""
_SECONDS_LEFT: LiteralString = """
    SELECT CASE WHEN isfinite(expires_at) THEN extract(epoch FROM expires_at - clock_timestamp())::float8 ELSE 0 END
    FROM modak.leader
"""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One time of leading; every commit names it."""

    number: int
    holder: str


class Lease:
    """One process's part in the election. `holder` must differ between processes."""

    def __init__(
        self,
        dsn: Dsn,
        holder: str,
        lease_seconds: float,
        clock: Clock | None = None,
        open_connection: Callable[[Dsn], Conn] | None = None,
    ) -> None:
        self._dsn = dsn
        self._holder = holder
        self._seconds = lease_seconds
        self._clock = clock or SystemClock()
        self._open = open_connection or self._opened
        self._conn: Conn | None = None
        self._pid: int | None = None
        self._epoch: Epoch | None = None
        self._deadline = 0.0

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that we lead, as far as our own clock can tell."""
        return self._epoch if self._clock.monotonic() < self._deadline else None

    def campaign(self) -> Epoch | None:
        """Take the lease if it is free; None while somebody else leads."""
        sent = self._clock.monotonic()
        reach("lease.before_campaign")
        row = self._ask(_TAKE)
        reach("lease.after_campaign")
        if row is None:
            return None
        self._epoch = Epoch(int(row[0]), self._holder)
        self._deadline = sent + self._seconds
        _LOG.info("lease.taken", holder=self._holder, epoch=self._epoch.number)
        return self._epoch

    def renew(self) -> bool:
        """Prolong the lease of our own epoch; False means that it is lost and all work must stop."""
        sent = self._clock.monotonic()
        if self._epoch is None:
            return False
        reach("lease.before_renew")
        renewed = self._ask(_RENEW) is not None
        reach("lease.after_renew")
        if renewed:
            self._deadline = sent + self._seconds
            return True
        if self._ask(_STILL_OURS) is not None:
            # A commit of our own holds the row; the lease is as good as before, only not longer.
            return True
        _LOG.warning("lease.lost", holder=self._holder, epoch=self._epoch.number)
        self._epoch = None
        return False

    def release(self) -> None:
        """Hand over at once."""
        if self._epoch is not None:
            reach("lease.before_release")
            self._ask(_RELEASE)
            reach("lease.after_release")
            self._epoch = None
        self.close()

    def wait(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until it is worth another try: the lease runs out, its holder lets it go, or the time is over."""
        row = self._ask(_SECONDS_LEFT)
        left = max(float(row[0]), 0.0) + 0.01 if row else seconds
        # What is waited for is a real socket, so it is waited for in real time.
        deadline = time.monotonic() + min(seconds, left)
        try:
            conn = self._connection()
            conn.execute("LISTEN modak_leader")
            while (rest := deadline - time.monotonic()) > 0 and not stopped():
                if next(conn.notifies(timeout=min(rest, _NAP), stop_after=1), None) is not None:
                    return
        except psycopg.Error as error:
            self.close()
            raise translate(error) from error

    def close(self) -> None:
        """Close the connection; the lease runs out by itself."""
        if self._conn is not None:
            self._conn.close()
        self._conn, self._pid = None, None

    def _ask(self, statement: LiteralString) -> tuple[Any, ...] | None:
        """The row that a statement returned or touched; None when it touched none or the row was locked."""
        epoch = self._epoch.number if self._epoch else None
        try:
            conn = self._connection()
            conn.execute("SELECT set_config('lock_timeout', %s, false)", (f"{int(self._seconds * 250)}ms",))
            cursor = conn.execute(statement, {"holder": self._holder, "seconds": self._seconds, "epoch": epoch})
            if cursor.description is not None:
                return cursor.fetchone()
            return () if cursor.rowcount > 0 else None
        except psycopg.errors.LockNotAvailable:
            return None
        except psycopg.Error as error:
            self.close()
            raise translate(error) from error

    def _opened(self, where: Dsn) -> Conn:
        # A connection that is cut off in silence must be noticed before the lease is over, not minutes later.
        seconds = max(int(self._seconds), 1)
        quick = {"connect_timeout": str(max(seconds, 2)), "tcp_user_timeout": str(seconds * 1000)}
        own = {key for key, _ in where.options}
        options = (*where.options, *((key, value) for key, value in quick.items() if key not in own))
        return connect(replace(where, options=options), autocommit=True, application="modak lease")

    def _connection(self) -> Conn:
        if self._conn is None or self._conn.closed:
            self._conn = self._open(self._dsn)
            self._pid = _backend_pid(self._conn)
            self._probe_for_pooler(self._pid)
        if _backend_pid(self._conn) != self._pid:
            self.close()
            raise _behind_a_pooler()
        return self._conn

    def _probe_for_pooler(self, pid: int) -> None:
        # A pooler with one idle backend gives it to everybody in turn; two open sessions never share one otherwise.
        with self._open(self._dsn) as other:
            if _backend_pid(other) == pid:
                self.close()
                raise _behind_a_pooler()


def _backend_pid(conn: Conn) -> int:
    row = conn.execute("SELECT pg_backend_pid()").fetchone()
    return int(row[0]) if row else 0


def _behind_a_pooler() -> Refused:
    return Refused(
        "lease.pooler",
        "Postgres is reached through a transaction pooler: the backend changes between two transactions.",
        hint="Point MODAK_PG_URL at Postgres itself, or at a session pool.",
    )
