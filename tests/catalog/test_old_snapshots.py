"""A transaction that keeps its snapshot writes into the tables of now: what it cannot know of them is never lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql

from modak.catalog import capture, moves, spill
from modak.catalog.records import Cutline
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, config, delta, scalar
from tests.catalog.test_divert import with_default
from tests.catalog.test_spill import reclaimed

Conn = psycopg.Connection[Any]

OLD = pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])


@contextmanager
def begun(catalog: Dsn, level: str = "REPEATABLE READ") -> Iterator[Conn]:
    """A session whose transaction has its snapshot."""
    with connect(catalog) as conn:
        conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        conn.execute("SELECT 1 FROM modak.schema_meta")
        yield conn


def run(conn: Conn, table: Built, statement: str) -> None:
    conn.execute(sql.SQL(statement).format(table.ident))


def unregister(conn: Conn, table: Built) -> None:
    conn.execute("DELETE FROM modak.tables WHERE table_id = %s", (table.table_id,))


def register(conn: Conn, table: Built) -> Built:
    """The same table once more; its first partition is sealed."""
    relid = scalar(conn, "SELECT %s::regclass::oid", str(table.name))
    table_id = moves.register(conn, config(table.name, relid))
    moves.begin_cutline(conn, Cutline(table_id=table_id, t=0, snapshot_id=1, metadata_location="file:///lake/m1.json"))
    capture.install(conn, table_id, table.leaves[0])
    return Built(table_id, table.name, table.leaves)


@contextmanager
def told_to_try_again(what: str = "have changed in the meantime") -> Iterator[None]:
    with pytest.raises(errors.SerializationFailure, match=what) as caught:
        yield
    assert caught.value.diag.message_hint == "Try again."


@OLD
@pytest.mark.parametrize("left_behind", [False, True])
def test_a_write_that_does_not_know_the_registration_is_told_to_try_again(
    conn: Conn, catalog: Dsn, level: str, left_behind: bool
) -> None:
    table = build(conn, watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    unregister(conn, table)
    if not left_behind:
        capture.remove(conn, table.leaves[0])
    with begun(catalog, level) as old:
        table = register(conn, table)
        with told_to_try_again("partition .* has changed in the meantime"):
            run(old, table, "UPDATE {} SET body = 'b'")
    with begun(catalog, level) as again:
        run(again, table, "UPDATE {} SET body = 'b'")
        again.commit()
    assert delta(conn, table) == {("1", 10): {"id": "1", "ts": "10", "body": "b"}}


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_trigger_that_was_left_behind_lets_writes_pass_at_every_level(conn: Conn, catalog: Dsn, level: str) -> None:
    table = build(conn, watch=[0])
    unregister(conn, table)
    with begun(catalog, level) as session:
        run(session, table, "INSERT INTO {} VALUES (1, 10, 'a')")
        run(session, table, "UPDATE {} SET body = 'b'")
        session.commit()
    assert delta(conn, table) == {}


def test_a_partition_that_was_sealed_since_is_captured(conn: Conn, catalog: Dsn) -> None:
    table = build(conn)
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    with begun(catalog) as old:
        capture.install(conn, table.table_id, table.leaves[0])
        run(old, table, "UPDATE {} SET body = 'b'")
        old.commit()
    assert delta(conn, table) == {("1", 10): {"id": "1", "ts": "10", "body": "b"}}


@OLD
@pytest.mark.parametrize(
    "change",
    [
        "ADD COLUMN c int DEFAULT 7",
        "RENAME COLUMN body TO text",
        "DROP COLUMN body, ADD COLUMN c text",
        "DROP COLUMN body, ADD COLUMN body text",
    ],
)
def test_a_write_that_does_not_know_the_columns_is_told_to_try_again(
    conn: Conn, catalog: Dsn, level: str, change: str
) -> None:
    table = build(conn, watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    before = delta(conn, table)
    with begun(catalog, level) as old:
        run(conn, table, f"ALTER TABLE {{}} {change}")
        for write in ("INSERT INTO {} VALUES (2, 20, '9')", "UPDATE {} SET id = 3", "DELETE FROM {}"):
            old.execute("SAVEPOINT here")
            with told_to_try_again():
                run(old, table, write)
            old.execute("ROLLBACK TO here")
    assert delta(conn, table) == before


def test_a_younger_column_is_captured_by_who_knows_it(conn: Conn, catalog: Dsn) -> None:
    table = build(conn, watch=[0])
    run(conn, table, "INSERT INTO {} VALUES (1, 10, 'a')")
    with begun(catalog, "READ COMMITTED") as old, begun(catalog) as own:
        run(conn, table, "ALTER TABLE {} ADD COLUMN c int DEFAULT 7")
        run(old, table, "UPDATE {} SET c = 9")
        old.commit()
        own.rollback()
        # What a transaction has changed itself it sees, whatever its snapshot.
        own.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        run(own, table, "ALTER TABLE {} DROP COLUMN body")
        run(own, table, "ALTER TABLE {} ADD COLUMN d int DEFAULT 1")
        run(own, table, "INSERT INTO {} VALUES (2, 20)")
        own.commit()
    assert delta(conn, table) == {
        ("1", 10): {"id": "1", "ts": "10", "body": "a", "c": "9"},
        ("2", 20): {"id": "2", "ts": "20", "c": "7", "d": "1"},
    }


def test_two_columns_one_of_them_its_own_are_told_apart(conn: Conn, catalog: Dsn) -> None:
    table = build(conn, watch=[0])
    with begun(catalog) as old:
        run(conn, table, "ALTER TABLE {} ADD COLUMN c int")
        run(old, table, "ALTER TABLE {} ADD COLUMN d int")
        with told_to_try_again():
            run(old, table, "INSERT INTO {} VALUES (1, 10, 'a', 9, 9)")


def test_a_change_that_was_rolled_back_is_none(conn: Conn, catalog: Dsn) -> None:
    table = build(conn, watch=[0])
    with begun(catalog) as old:
        with conn.transaction(force_rollback=True):
            run(conn, table, "ALTER TABLE {} RENAME COLUMN body TO text")
            run(conn, table, "ALTER TABLE {} ADD COLUMN c int")
        run(old, table, "INSERT INTO {} VALUES (1, 10, 'a')")
        old.commit()
    assert delta(conn, table) == {("1", 10): {"id": "1", "ts": "10", "body": "a"}}


def test_a_users_cast_never_runs_with_our_rights_for_a_type_that_came_since(conn: Conn, catalog: Dsn) -> None:
    conn.execute("CREATE TYPE snare AS ENUM ('set')")
    conn.execute(
        "CREATE FUNCTION snap(snare) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'sprung'; END $$"
    )
    conn.execute("CREATE CAST (snare AS text) WITH FUNCTION snap(snare)")
    table = build(conn, watch=[0])
    with begun(catalog) as old:
        run(conn, table, "ALTER TABLE {} ALTER COLUMN body TYPE snare USING 'set'")
        with told_to_try_again():
            run(old, table, "INSERT INTO {} VALUES (1, 10, 'set')")


@OLD
def test_a_historical_row_with_a_column_that_came_since_is_never_cut_short(
    conn: Conn, catalog: Dsn, level: str
) -> None:
    spilling, diverted = reclaimed(conn), with_default(conn)
    for table in (spilling, diverted):
        with begun(catalog, level) as old:
            run(conn, table, "ALTER TABLE {} ADD COLUMN c int DEFAULT 7")
            with told_to_try_again():
                run(old, table, "INSERT INTO {} VALUES (1, 50, 'cold', 9)")
        with begun(catalog, level) as again:
            run(again, table, "INSERT INTO {} VALUES (1, 50, 'cold', 9)")
            again.commit()
        assert delta(conn, table) == {("1", 50): {"id": "1", "ts": "50", "body": "cold", "c": "9"}}


@OLD
def test_a_historical_row_that_does_not_know_the_spill_partition_is_told_to_try_again(
    conn: Conn, catalog: Dsn, level: str
) -> None:
    with begun(catalog, level) as old:
        table = reclaimed(conn)
        with told_to_try_again("partition .* has changed in the meantime"):
            run(old, table, "INSERT INTO {} VALUES (1, 50, 'cold')")
    table = build(conn)
    spill.enable(conn, table.name)
    unregister(conn, table)
    with begun(catalog, level) as young, pytest.raises(errors.CheckViolation, match="no longer registered"):
        run(young, table, "INSERT INTO {} VALUES (1, -50, 'cold')")
