"""The one point at which a verification reads: a committed pin, then a transaction whose snapshot all tasks join.

The pin keeps T, S and R as they are for us; the transaction locks all partitions of the table (ACCESS SHARE)
before its snapshot is taken, so that no rewrite and no drop comes between. Heap and delta are read under the snapshot,
the lake at the pin's S: together they show the table as it was at the snapshot. A thread renews the pin; a process
that dies leaves the pin to lapse and the transaction to end with its connection.
"""

from __future__ import annotations

import threading
from typing import Any, Self

import psycopg

from modak.catalog import pins
from modak.catalog.records import Pin
from modak.core.errors import Conflict, ModakError
from modak.core.names import TableName
from modak.postgres.connect import GUARDS, connect, session_sql, translate
from modak.postgres.dsn import Dsn
from modak.postgres.snapshot import begin_snapshot

LIFETIME_SECONDS = 120.0
LOCK_MILLIS = 5_000
APPLICATION = "modak verify"


class Point:
    """Holds pin, locks and snapshot while it is entered. `conn` sees the database as all tasks do."""

    pin: Pin
    conn: psycopg.Connection[Any]
    snapshot: str

    def __init__(self, dsn: Dsn, name: TableName, *, lifetime_seconds: float = LIFETIME_SECONDS) -> None:
        self._dsn = dsn
        self._name = name
        self._lifetime = lifetime_seconds
        self._ended = threading.Event()
        self._pulse: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.pin = pins.begin(self._dsn, self._name, self._lifetime)
        try:
            self.conn = connect(self._dsn, autocommit=True, application=APPLICATION)
        except BaseException:
            self._release()
            raise
        try:
            self._begin()
        except psycopg.Error as error:
            self._close()
            raise translate(error) from error
        except BaseException:
            self._close()
            raise
        self._pulse = threading.Thread(target=self._renew, name="modak-verify-pulse", daemon=True)
        self._pulse.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def check(self) -> None:
        """Raise if pin, locks and snapshot have not been held without a gap until now."""
        try:
            self.conn.execute("SELECT 1")
            with connect(self._dsn, autocommit=True, application=APPLICATION) as other:
                held = pins.renew(other, self.pin.pin_id, self._lifetime)
        except psycopg.Error:
            held = False
        if not held:
            raise Conflict(
                "verify.point_lost",
                f"The pin or the snapshot of the verification of {self._name} was lost on the way.",
                hint="What was read proves nothing; run it again.",
            )

    def _begin(self) -> None:
        self.conn.execute(session_sql({**GUARDS, "lock_timeout": f"{LOCK_MILLIS}ms"}))
        self.snapshot = begin_snapshot(self.conn, [self._name])

    def _renew(self) -> None:
        # On connections of its own: the one with the snapshot is busy with the caller's queries.
        while not self._ended.wait(self._lifetime / 3):
            try:
                with connect(self._dsn, autocommit=True, application=APPLICATION) as conn:
                    pins.renew(conn, self.pin.pin_id, self._lifetime)
            except (psycopg.Error, ModakError):
                # It is tried again while the pin lives; if it lapses, `check` says so.
                continue

    def _close(self) -> None:
        self._ended.set()
        self.conn.close()
        if self._pulse is not None:
            self._pulse.join(timeout=5)
        self._release()

    def _release(self) -> None:
        try:
            with connect(self._dsn, autocommit=True, application=APPLICATION) as conn:
                pins.end(conn, self.pin.pin_id)
        except (psycopg.Error, ModakError):
            # The pin lapses by itself.
            return
