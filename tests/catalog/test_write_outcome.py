"""A commit whose connection breaks: the one transaction is sure of its own outcome."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from modak.catalog.journal import Journal
from modak.catalog.lease import Lease
from modak.catalog.outcome import settle
from modak.catalog.write import CatalogWriter
from modak.core import faults
from modak.core.errors import Conflict, ModakError
from modak.core.faults import Fault, InjectedFault
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built
from tests.catalog.committing import (
    LANDED,
    UNTOUCHED,
    Conn,
    lake_commit,
    prepared_op,
    proxy,
    state_of,
    table,
    through,
    tier,
    writer,
)
from tests.support.proxy import FaultProxy

__all__ = ["proxy", "table", "writer"]


def test_a_commit_whose_answer_was_lost_has_landed(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built, proxy: FaultProxy
) -> None:
    op_id = prepared_op(writer, table)

    def swallow(point: str) -> None:
        if point == "catalog.before_commit":
            proxy.swallow_answers_after(b"COMMIT")

    faults.watch(swallow)
    tier(CatalogWriter(through(catalog, proxy)), op_id, table)
    assert proxy.swallowed.is_set()
    assert state_of(conn, table) == LANDED


def test_a_connection_cut_before_the_commit_has_changed_nothing(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built, proxy: FaultProxy
) -> None:
    op_id = prepared_op(writer, table)

    def cut(point: str) -> None:
        if point == "catalog.before_commit":
            proxy.cut()

    faults.watch(cut)
    with pytest.raises(Conflict) as conflict:
        tier(CatalogWriter(through(catalog, proxy)), op_id, table)
    faults.watch(None)
    assert conflict.value.code == "catalog.commit_lost"
    assert conflict.value.retryable
    assert state_of(conn, table) == UNTOUCHED
    tier(writer, op_id, table)
    assert state_of(conn, table) == LANDED


def test_a_backend_ended_in_the_middle_has_changed_nothing(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built
) -> None:
    op_id = prepared_op(writer, table)

    def end(point: str) -> None:
        if point == "catalog.before_commit":
            conn.execute("SELECT pg_terminate_backend(backend_pid, 2000) FROM modak.op_log WHERE op_id = %s", (op_id,))

    faults.watch(end)
    with pytest.raises(Conflict):
        tier(writer, op_id, table)
    assert state_of(conn, table) == UNTOUCHED


def test_a_half_open_commit_is_ended_and_then_answers(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built
) -> None:
    op_id = prepared_op(writer, table)
    with connect(catalog) as half_open:
        half_open.execute("UPDATE modak.op_log SET backend_pid = pg_backend_pid() WHERE op_id = %s", (op_id,))
        half_open.commit()
        half_open.execute("UPDATE modak.op_log SET phase = 'committed' WHERE op_id = %s", (op_id,))
        assert settle(catalog, op_id, lock_millis=100) is False
        with pytest.raises(psycopg.OperationalError):
            half_open.commit()
    tier(writer, op_id, table)
    assert settle(catalog, op_id) is True


def test_only_the_committer_itself_is_ended(conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built) -> None:
    op_id = prepared_op(writer, table)
    with connect(catalog) as bystander, connect(catalog) as holder:
        pid = bystander.info.backend_pid
        bystander.execute("SELECT 1")
        conn.execute("UPDATE modak.op_log SET backend_pid = %s WHERE op_id = %s", (pid, op_id))
        holder.execute("SELECT FROM modak.op_log WHERE op_id = %s FOR UPDATE", (op_id,))
        with pytest.raises(ModakError) as unknown:
            settle(catalog, op_id, lock_millis=50, patience=0.3)
        assert unknown.value.code == "catalog.outcome_unknown"
        assert unknown.value.retryable
        assert bystander.execute("SELECT 1").fetchone() == (1,)


def test_a_server_that_is_away_leaves_the_outcome_to_the_journal(
    catalog: Dsn, writer: CatalogWriter, table: Built, proxy: FaultProxy
) -> None:
    op_id = prepared_op(writer, table)
    away = through(catalog, proxy)
    proxy.close()
    with pytest.raises(ModakError) as unknown:
        settle(away, op_id, patience=0.2)
    assert unknown.value.code == "catalog.outcome_unknown"


@pytest.mark.parametrize(
    ("point", "state"),
    [("catalog.before_commit", UNTOUCHED), ("catalog.after_commit", LANDED)],
)
def test_a_crash_around_the_commit_leaves_all_or_nothing(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built, point: str, state: tuple[Any, ...]
) -> None:
    op_id = prepared_op(writer, table)
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        tier(writer, op_id, table)
    faults.arm(None)
    assert state_of(conn, table) == state
    assert Journal(writer).landed(op_id) is (state is LANDED)


def test_a_leader_that_commits_ahead_of_others_may_take_longer_than_a_transaction_may_rest(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built
) -> None:
    lease = Lease(catalog, "slow", 30)
    slow = CatalogWriter(catalog, lease.campaign(), idle_millis=100)
    with slow.transaction_ahead(prepared_op(writer, table), lake_commit(table).identifier) as tx:
        assert others_wait(conn, table)
        time.sleep(0.4)
        tx.publish(lake_commit(table))
    lease.release()


def others_wait(conn: Conn, table: Built) -> bool:
    query = "SELECT FROM modak_iceberg.iceberg_tables WHERE table_name = %s FOR UPDATE SKIP LOCKED"
    return conn.execute(query, (table.name.name,)).fetchone() is None
