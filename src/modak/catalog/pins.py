"""Pins from the worker's side: taking one for a read of its own, and deleting only what no pin needs.

A pin is committed before anything is read (`begin` uses a transaction of its own). A pass that deletes holds the
table's pin lock exclusively: readers who are pinning right now make it give up, later ones wait for it and then see
what it has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from modak.catalog.read import CatalogReader
from modak.catalog.records import Pin
from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres.connect import connect, translate
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]


def begin(dsn: Dsn, name: TableName, lifetime_seconds: float = 900.0) -> Pin:
    """Take a pin and commit it."""
    reach("pins.before_begin")
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in (name.schema, name.name))
    try:
        with connect(dsn, application="modak pin") as conn:
            conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            row = conn.execute(
                "SELECT p.table_id, b.pin_id FROM modak.modak_read_begin(%s::regclass, make_interval(secs => %s)) b"
                " CROSS JOIN LATERAL (SELECT t.table_id FROM modak.tables t WHERE t.relid = %s::regclass) p",
                (quoted, lifetime_seconds, quoted),
            ).fetchone()
            conn.commit()
            pins = CatalogReader(conn).live_pins(row[0]) if row else ()
    except psycopg.Error as error:
        raise translate(error) from error
    reach("pins.after_begin")
    for pin in pins:
        if row and pin.pin_id == row[1]:
            return pin
    raise ModakError("catalog.pin_lost", f"The pin on {name} expired at once.", retryable=True)


def renew(conn: Conn, pin_id: int, lifetime_seconds: float = 900.0) -> bool:
    """Prolong a pin; False when it has lapsed, and then the read must fail."""
    reach("pins.before_renew")
    with conn.transaction():
        row = conn.execute(
            "SELECT modak.modak_read_renew(%s, make_interval(secs => %s))", (pin_id, lifetime_seconds)
        ).fetchone()
    reach("pins.after_renew")
    return bool(row and row[0])


def end(conn: Conn, pin_id: int) -> bool:
    """Release a pin; False when it had not held until now, and then the read must fail."""
    reach("pins.before_end")
    with conn.transaction():
        row = conn.execute("SELECT modak.modak_read_end(%s)", (pin_id,)).fetchone()
    reach("pins.after_end")
    return bool(row and row[0])


@contextmanager
def deleting(conn: Conn, table_id: int) -> Iterator[tuple[Pin, ...] | None]:
    """Hold the table's pin lock while deleting; yields the live pins, or None when a reader is pinning right now.

    The lock belongs to the session, because DETACH CONCURRENTLY refuses a transaction. While it is held, no commit for
    the same table may run on another connection.
    """
    row = conn.execute("SELECT pg_try_advisory_lock(modak.pin_lock_key(%s))", (table_id,)).fetchone()
    if not conn.autocommit:
        conn.commit()
    if not (row and row[0]):
        yield None
        return
    try:
        pins = CatalogReader(conn).live_pins(table_id)
        if not conn.autocommit:
            conn.commit()
        yield pins
    finally:
        if not conn.closed:
            conn.rollback()
            conn.execute("SELECT pg_advisory_unlock(modak.pin_lock_key(%s))", (table_id,))
            if not conn.autocommit:
                conn.commit()


def sweep(conn: Conn, grace_seconds: float = 60.0) -> int:
    """Delete pins that lapsed a while ago; returns how many."""
    reach("pins.before_sweep")
    with conn.transaction():
        gone = conn.execute(
            "DELETE FROM modak.read_pins WHERE expires_at < clock_timestamp() - make_interval(secs => %s)",
            (grace_seconds,),
        ).rowcount
    reach("pins.after_sweep")
    return gone
