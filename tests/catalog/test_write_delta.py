"""The delta in the one transaction: what was read goes with it, what came later or is being read stays."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from modak.catalog.records import DeltaRange
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict
from modak.core.ids import OpId
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, delta, scalar
from tests.catalog.committing import (
    LANDED,
    UNTOUCHED,
    Conn,
    prepared_op,
    proxy,
    state_of,
    table,
    tier,
    writer,
)

__all__ = ["proxy", "table", "writer"]


def test_delta_rows_that_the_export_has_seen_go_and_later_ones_stay(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built
) -> None:
    conn.execute(f"INSERT INTO {table.name} VALUES (1, 10, 'seen'), (2, 20, 'seen'), (3, 30, 'seen')".encode())
    with connect(catalog) as open_writer, connect(catalog) as exporter:
        open_writer.execute(f"UPDATE {table.name} SET body = 'in progress' WHERE id = 2".encode())
        exporter.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        row = exporter.execute("SELECT pg_current_snapshot()::text").fetchone()
        assert row is not None
        open_writer.commit()
    conn.execute(f"UPDATE {table.name} SET body = 'late' WHERE id = 3".encode())
    op_id = prepared_op(writer, table)
    with writer.transaction(op_id) as tx:
        tx.retire_delta(table.table_id, DeltaRange(0, 100), row[0])
    assert tx.counters == {"delta_removed": 1, "delta_kept": 0}
    assert {key: (image or {})["body"] for key, image in delta(conn, table).items()} == {
        ("2", 20): "in progress",
        ("3", 30): "late",
    }


def retiring(writer: CatalogWriter, op_id: OpId, table: Built, seen: str) -> Any:
    return writer.transaction_retiring(op_id, table.table_id, DeltaRange(0, 100), seen)


def late_rows(conn: Conn, table: Built) -> str:
    """Three delta rows, and a snapshot that sees them."""
    conn.execute(f"INSERT INTO {table.name} VALUES (1, 10, 'seen'), (2, 20, 'seen'), (3, 30, 'seen')".encode())
    return str(scalar(conn, "SELECT pg_current_snapshot()::text"))


def until_removed(conn: Conn, table: Built, but: int = 0) -> None:
    """Wait until another transaction has its hands on every delta row but so many."""
    free = "SELECT count(*) FROM (SELECT FROM modak.delta WHERE table_id = %s FOR UPDATE SKIP LOCKED) free"
    for _ in range(500):
        if scalar(conn, free, table.table_id) == but:
            return
        time.sleep(0.02)
    raise AssertionError("nothing is removed")


def test_delta_rows_are_removed_while_the_commit_is_prepared_and_go_with_it(
    conn: Conn, writer: CatalogWriter, table: Built
) -> None:
    seen = late_rows(conn, table)
    conn.execute(f"UPDATE {table.name} SET body = 'late' WHERE id = 3".encode())
    op_id = prepared_op(writer, table)
    with retiring(writer, op_id, table, seen) as tx:
        until_removed(conn, table, but=1)
        assert set(delta(conn, table)) == {("1", 10), ("2", 20), ("3", 30)}
        tx.retire_delta(table.table_id, DeltaRange(0, 100), seen)
    assert tx.counters == {"delta_removed": 2, "delta_kept": 0}
    assert {key: (image or {})["body"] for key, image in delta(conn, table).items()} == {("3", 30): "late"}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_reader_that_comes_keeps_delta_rows_whose_removal_has_begun(
    conn: Conn, writer: CatalogWriter, table: Built, when: str
) -> None:
    seen, op_id = late_rows(conn, table), prepared_op(writer, table)
    if when == "before":
        conn.execute("SELECT modak_read_begin(%s::regclass)", (str(table.name),))
    with retiring(writer, op_id, table, seen) as tx:
        if when == "meanwhile":
            until_removed(conn, table)
            conn.execute("SELECT modak_read_begin(%s::regclass)", (str(table.name),))
        tx.retire_delta(table.table_id, DeltaRange(0, 100), seen)
    assert tx.counters == {"delta_removed": 0, "delta_kept": 3}
    assert len(delta(conn, table)) == 3


def test_delta_rows_whose_removal_has_begun_stay_when_the_preparation_fails(
    conn: Conn, writer: CatalogWriter, table: Built
) -> None:
    seen, op_id = late_rows(conn, table), prepared_op(writer, table)

    def prepare() -> None:
        with retiring(writer, op_id, table, seen):
            until_removed(conn, table)
            raise KeyError("prepare")

    with pytest.raises(KeyError):
        prepare()
    assert len(delta(conn, table)) == 3
    conn.execute("DELETE FROM modak.delta WHERE table_id = %s", (table.table_id,))


def test_a_connection_that_breaks_during_the_preparation_costs_only_the_removal_that_had_begun(
    conn: Conn, writer: CatalogWriter, table: Built
) -> None:
    seen, op_id = late_rows(conn, table), prepared_op(writer, table)
    with retiring(writer, op_id, table, seen) as tx:
        until_removed(conn, table)
        ended = "SELECT pg_terminate_backend(backend_pid, 5000) FROM modak.op_log WHERE op_id = %s"
        assert scalar(conn, ended, op_id)
        assert len(delta(conn, table)) == 3
        tx.retire_delta(table.table_id, DeltaRange(0, 100), seen)
    assert tx.counters == {"delta_removed": 3, "delta_kept": 0}
    assert delta(conn, table) == {}


def test_a_row_in_somebodys_hands_is_left_out_of_a_removal(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built
) -> None:
    seen, op_id = late_rows(conn, table), prepared_op(writer, table)
    with connect(catalog) as user:
        user.execute(f"UPDATE {table.name} SET body = 'in progress' WHERE id = 2".encode())
        with retiring(writer, op_id, table, seen) as tx:
            tx.retire_delta(table.table_id, DeltaRange(0, 100), seen)
        user.commit()
    assert tx.counters == {"delta_removed": 2, "delta_kept": 0}
    assert {key: (image or {})["body"] for key, image in delta(conn, table).items()} == {("2", 20): "in progress"}


def test_a_pin_taken_after_the_prepare_makes_it_prepare_again_with_a_tag(
    conn: Conn, writer: CatalogWriter, table: Built
) -> None:
    op_id = prepared_op(writer, table)
    conn.execute("SELECT modak_read_begin(%s::regclass)", (str(table.name),))
    with pytest.raises(Conflict) as conflict:
        tier(writer, op_id, table)
    assert conflict.value.code == "catalog.new_pin"
    assert state_of(conn, table) == UNTOUCHED
    tier(writer, op_id, table, tagged={1})
    assert state_of(conn, table) == LANDED


def test_a_pin_being_taken_counts_as_taken_and_holds_no_commit_up(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built
) -> None:
    op_id = prepared_op(writer, table)
    with connect(catalog) as reader:
        reader.execute("SELECT modak_read_begin(%s::regclass)", (str(table.name),))
        with pytest.raises(Conflict) as conflict:
            tier(writer, op_id, table)
        assert conflict.value.code == "catalog.new_pin"
        assert state_of(conn, table) == UNTOUCHED
        tier(writer, op_id, table, tagged={1})
    assert state_of(conn, table) == LANDED
