"""Pins: protected from before their commit to their end, by lock and by row."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from modak.catalog import pins
from modak.catalog.read import CatalogReader
from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import build, scalar

Conn = psycopg.Connection[Any]


def test_a_pin_names_what_it_protects_and_ends_once(conn: Conn, catalog: Dsn) -> None:
    table = build(conn, t=0)
    pin = pins.begin(catalog, table.name)
    assert (pin.t, pin.snapshot_id, pin.metadata_location) == (0, 1, "file:///lake/m1.json")
    assert CatalogReader(catalog).live_pins(table.table_id) == (pin,)
    assert pins.renew(conn, pin.pin_id, 3600)
    assert pins.end(conn, pin.pin_id)
    assert not pins.end(conn, pin.pin_id)
    assert CatalogReader(catalog).live_pins(table.table_id) == ()


def test_a_lapsed_pin_is_neither_renewed_nor_ended_well(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    pin = pins.begin(catalog, table.name)
    conn.execute(
        "UPDATE modak.read_pins SET expires_at = now() - interval '5 minutes' WHERE pin_id = %s", (pin.pin_id,)
    )
    assert CatalogReader(catalog).live_pins(table.table_id) == ()
    assert not pins.renew(conn, pin.pin_id)
    assert not pins.end(conn, pin.pin_id)
    other = pins.begin(catalog, table.name)
    conn.execute(
        "UPDATE modak.read_pins SET expires_at = now() - interval '5 minutes' WHERE pin_id = %s", (other.pin_id,)
    )
    assert pins.sweep(conn) == 1


def test_a_pin_protects_before_it_is_committed(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    with connect(catalog) as reader:
        reader.execute("SELECT * FROM modak_read_begin(%s::regclass)", (str(table.name),))
        with pins.deleting(conn, table.table_id) as seen:
            assert seen is None
        reader.commit()
    with pins.deleting(conn, table.table_id) as seen:
        assert seen is not None
        assert len(seen) == 1


def test_a_pass_that_deletes_holds_new_readers_off_until_it_ends(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    with connect(catalog) as deleter, connect(catalog, autocommit=True) as reader:
        reader.execute("SET lock_timeout = '100ms'")
        with pins.deleting(deleter, table.table_id) as seen:
            assert seen == ()
            with pytest.raises(psycopg.errors.LockNotAvailable):
                reader.execute("SELECT * FROM modak_read_begin(%s::regclass)", (str(table.name),))
        reader.execute("SELECT * FROM modak_read_begin(%s::regclass)", (str(table.name),))


def test_a_pass_that_fails_gives_the_lock_back(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    with connect(catalog) as deleter:
        with pytest.raises(psycopg.errors.DivisionByZero), pins.deleting(deleter, table.table_id):
            deleter.execute("SELECT 1 / 0")
        with pins.deleting(conn, table.table_id) as seen:
            assert seen == ()


def test_a_pin_inside_an_older_snapshot_is_refused(conn: Conn) -> None:
    table = build(conn)
    conn.execute("SET default_transaction_isolation = 'repeatable read'")
    with pytest.raises(psycopg.errors.ActiveSqlTransaction):
        conn.execute("SELECT * FROM modak_read_begin(%s::regclass)", (str(table.name),))


@pytest.mark.superuser
def test_pins_follow_the_readers_own_rights(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    conn.execute("DROP ROLE IF EXISTS pin_reader; CREATE ROLE pin_reader")
    pin = pins.begin(catalog, table.name)
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL ROLE pin_reader")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
            conn.execute("SELECT * FROM modak_read_begin(%s::regclass)", (str(table.name),))
        assert not scalar(conn, "SELECT modak_read_end(%s)", pin.pin_id)
    with conn.transaction(force_rollback=True):
        conn.execute(f"GRANT SELECT ON {table.name} TO pin_reader".encode())
        conn.execute("SET LOCAL ROLE pin_reader")
        own = scalar(conn, "SELECT pin_id FROM modak_read_begin(%s::regclass, '1 hour')", str(table.name))
        assert scalar(conn, "SELECT modak_read_renew(%s)", own)
        assert scalar(conn, "SELECT modak_read_end(%s)", own)
    assert pins.end(conn, pin.pin_id)


def test_a_table_that_is_not_registered_says_what_to_do(conn: Conn, catalog: Dsn) -> None:
    conn.execute("CREATE TABLE IF NOT EXISTS public.unregistered (id int)")
    with pytest.raises(ModakError, match="not registered"):
        pins.begin(catalog, TableName("public", "unregistered"))


@pytest.mark.parametrize("lifetime", ["0", "-1 hour", "8 days"])
def test_a_pin_has_a_sane_lifetime(conn: Conn, lifetime: str) -> None:
    table = build(conn)
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        conn.execute("SELECT modak_read_begin(%s::regclass, %s::interval)", (str(table.name), lifetime))
