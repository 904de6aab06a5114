"""Connections that wait for the next step instead of being opened anew.

A flow asks for a connection at each of its steps, and most of what a short step costs is the opening. A connection that
comes back well is kept for a moment: first all of its session goes (settings, locks, temporary tables), so that whoever
gets it next cannot tell it from a new one. Setting our dialect again proves that the server still answers. One that
rested for longer is closed, so that a network which has gone silent is met by opening, with its short timeout. Commits
have connections of their own, because the journal names their backend. Memory: at most `MOST` connections at rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from modak.core.errors import ModakError
from modak.postgres.connect import SESSION, connect, session_sql
from modak.postgres.dsn import Dsn

if TYPE_CHECKING:
    import psycopg

    Conn = psycopg.Connection[tuple[Any, ...]]

MOST = 4
REST_SECONDS = 2.0
_FLUSHES = 15_00_00
"""The first server that can be asked to."""


class Pool:
    """The connections of one place to one database; any thread may ask."""

    def __init__(self, dsn: Dsn) -> None:
        self._dsn = dsn
        self._lock = threading.Lock()
        self._resting: list[tuple[Conn, float]] = []
        self._closed = False

    @contextmanager
    def connection(self, *, autocommit: bool = False) -> Iterator[Conn]:
        """A connection for one step: commits at the end of the block, rolls back what an exception leaves."""
        conn = self._take()
        try:
            conn.autocommit = autocommit
            yield conn
            if not conn.closed:
                conn.commit()
        except BaseException:
            with suppress(Exception):
                conn.rollback()
            conn.close()
            raise
        self._give_back(conn)

    def close(self) -> None:
        """Close what rests; what is out is closed when it comes back."""
        with self._lock:
            self._closed = True
        self._forget(0.0)

    def __del__(self) -> None:
        with suppress(Exception):
            self._forget(0.0)

    def _take(self) -> Conn:
        import psycopg

        self._forget(REST_SECONDS)
        while (conn := self._rested()) is not None:
            try:
                conn.execute(session_sql(SESSION))
            except psycopg.Error:
                # The server was away meanwhile; the others will have lost it too.
                conn.close()
                self._forget(0.0)
                continue
            return conn
        opened = connect(self._dsn, autocommit=True)
        # What is prepared on the server goes with the session, and the client would not know.
        opened.prepare_threshold = None
        return opened

    def _rested(self) -> Conn | None:
        with self._lock:
            return self._resting.pop()[0] if self._resting else None

    def _give_back(self, conn: Conn) -> None:
        import psycopg
        from psycopg.pq import TransactionStatus

        try:
            if self._closed or conn.closed or conn.info.transaction_status != TransactionStatus.IDLE:
                conn.close()
                return
            conn.autocommit = True
            conn.isolation_level = conn.read_only = conn.deferrable = None
            if conn.info.server_version >= _FLUSHES:
                # The end of a session would have told the server's statistics at once, and marks are made from them.
                conn.execute("SELECT pg_catalog.pg_stat_force_next_flush()")
            conn.execute("DISCARD ALL")
        except (psycopg.Error, ModakError):
            conn.close()
            return
        with self._lock:
            self._resting.append((conn, time.monotonic()))
            too_many = [self._resting.pop(0)[0] for _ in range(len(self._resting) - MOST)]
        for each in too_many:
            each.close()

    def _forget(self, seconds: float) -> None:
        """Close those that have rested for so long."""
        limit = time.monotonic() - seconds
        with self._lock:
            old = [conn for conn, since in self._resting if since <= limit]
            self._resting = [(conn, since) for conn, since in self._resting if since > limit]
        for conn in old:
            conn.close()
