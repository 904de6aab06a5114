"""The one transaction: all or nothing, guarded by epoch, journal row and base pointer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, LiteralString

import pytest

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch, Lease
from modak.catalog.read import CatalogReader
from modak.catalog.records import Cutline, NewPartition
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core import faults
from modak.core.clock import SystemClock
from modak.core.errors import Conflict, ModakError, NotLeader, Refused
from modak.core.ids import new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.model import LakeName, Prepared
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, config, scalar
from tests.catalog.committing import (
    BASE,
    LANDED,
    NEW,
    UNTOUCHED,
    Conn,
    lake_commit,
    prepared_op,
    proxy,
    state_of,
    table,
    tier,
    writer,
)

__all__ = ["proxy", "table", "writer"]


def test_everything_moves_together(conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built) -> None:
    op_id = prepared_op(writer, table)
    tier(writer, op_id, table)
    assert state_of(conn, table) == LANDED
    op = CatalogReader(catalog).op(op_id)
    assert op is not None
    assert op.landed
    assert op.phase is OpPhase.COMMITTED
    assert op.counters == {"rows": 5}
    assert op.cleanup == {"made": 2, "obsolete": ["file:///lake/old.json"]}
    assert op.folders == ("file:///lake/data/op", "file:///lake/metadata/op")
    assert op.backend_pid is not None
    assert op.xact_id is not None
    Journal(writer).finish(op_id, {"tidied": 1})
    assert op_id not in {each.op_id for each in CatalogReader(catalog).unfinished_ops()}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"from_t": 50}, "catalog.cutline_moved"),
        ({"names": ["nowhere"]}, "catalog.partition_moved"),
        ({"prepared": "stale"}, "lake.pointer_moved"),
        ({"prepared": "create"}, "lake.pointer_moved"),
    ],
)
def test_a_stale_base_changes_nothing_and_may_be_tried_again(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built, changes: dict[str, Any], code: str
) -> None:
    bases = {"stale": "file:///lake/m0.json", "create": None}
    if "prepared" in changes:
        changes = {"prepared": lake_commit(table, bases[changes["prepared"]])}
    op_id = prepared_op(writer, table)
    with pytest.raises(Conflict) as conflict:
        tier(writer, op_id, table, **changes)
    assert conflict.value.code == code
    assert conflict.value.retryable
    assert state_of(conn, table) == UNTOUCHED
    op = CatalogReader(catalog).op(op_id)
    assert op is not None
    assert op.phase is OpPhase.PREPARED
    Journal(writer).phase(op_id, OpPhase.PREPARED, OpPhase.PREPARED, attempt=2)
    tier(writer, op_id, table)
    assert state_of(conn, table) == LANDED


def test_an_error_in_the_block_sends_nothing(conn: Conn, writer: CatalogWriter, table: Built) -> None:
    op_id = prepared_op(writer, table)

    def fail() -> None:
        with writer.transaction(op_id) as tx:
            tx.publish(lake_commit(table))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert state_of(conn, table) == UNTOUCHED


def test_an_operation_that_is_not_prepared_cannot_commit(conn: Conn, writer: CatalogWriter, table: Built) -> None:
    op_id = prepared_op(writer, table)
    Journal(writer).abandon(op_id, OpPhase.PREPARED)
    with pytest.raises(Conflict) as conflict:
        tier(writer, op_id, table)
    assert conflict.value.code == "journal.moved_on"
    assert state_of(conn, table) == UNTOUCHED


def test_an_operation_commits_once(conn: Conn, writer: CatalogWriter, table: Built) -> None:
    op_id = prepared_op(writer, table)
    tier(writer, op_id, table)
    with pytest.raises(Conflict):
        tier(writer, op_id, table)
    assert state_of(conn, table) == LANDED


def test_a_leader_that_slept_through_its_lease_changes_nothing(conn: Conn, catalog: Dsn, table: Built) -> None:
    lease = Lease(catalog, "sleeper", lease_seconds=0.4)
    epoch = lease.campaign()
    assert epoch is not None
    stale = CatalogWriter(catalog, epoch)
    op_id = prepared_op(stale, table)
    conn.execute("SELECT pg_sleep(0.5)")
    with pytest.raises(NotLeader):
        tier(stale, op_id, table)
    successor = Lease(catalog, "successor", lease_seconds=30)
    next_epoch = successor.campaign()
    assert next_epoch is not None
    assert next_epoch.number == epoch.number + 1
    with pytest.raises(NotLeader):
        tier(stale, op_id, table)
    with pytest.raises(NotLeader), stale.step() as step:
        step.freeze(table.table_id, {"snapshot": 1})
    with pytest.raises(NotLeader):
        Journal(stale).abandon(op_id, OpPhase.PREPARED)
    assert state_of(conn, table) == UNTOUCHED
    tier(CatalogWriter(catalog, next_epoch), op_id, table)
    assert state_of(conn, table) == LANDED
    successor.release()
    lease.close()


def test_nobody_takes_over_in_the_middle_of_a_commit(conn: Conn, catalog: Dsn, table: Built) -> None:
    lease = Lease(catalog, "leader", lease_seconds=1)
    epoch = lease.campaign()
    assert epoch is not None
    writer = CatalogWriter(catalog, epoch)
    op_id = prepared_op(writer, table)
    rival = Lease(catalog, "rival", lease_seconds=1)
    seen: list[Epoch | None] = []

    def pause(point: str) -> None:
        if point == "catalog.before_commit":
            conn.execute("SELECT pg_sleep(1.1)")
            seen.append(rival.campaign())

    faults.watch(pause)
    tier(writer, op_id, table)
    faults.watch(None)
    assert seen == [None]
    assert state_of(conn, table) == LANDED
    assert rival.campaign() is not None
    rival.release()
    lease.close()


def test_a_foreign_commit_in_between_is_met_at_the_pointer(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built
) -> None:
    op_id = prepared_op(writer, table)
    with connect(catalog) as foreign:
        foreign.execute(
            "UPDATE modak_iceberg.iceberg_tables SET metadata_location = 'file:///foreign.json' WHERE table_name = %s",
            (table.name.name,),
        )
        caught: list[BaseException] = []

        def commit() -> None:
            try:
                tier(writer, op_id, table)
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        conn.execute("SELECT pg_sleep(0.3)")
        foreign.commit()
        thread.join()
    (error,) = caught
    assert isinstance(error, Conflict)
    assert error.code == "lake.pointer_moved"


def test_a_frozen_table_is_not_published(conn: Conn, writer: CatalogWriter, table: Built) -> None:
    op_id = prepared_op(writer, table)
    with writer.step() as step:
        step.freeze(table.table_id, {"snapshot": 77, "operation": "append"})
    with pytest.raises(Refused, match="77"):
        tier(writer, op_id, table)
    with writer.step() as step:
        step.freeze(table.table_id, None)
    tier(writer, op_id, table)
    assert state_of(conn, table) == LANDED


def test_requirements_and_changes_of_other_rooms_join_the_transaction(
    conn: Conn, writer: CatalogWriter, table: Built
) -> None:
    op_id = prepared_op(writer, table)
    update: LiteralString = "UPDATE modak.load_labels SET state = 'committed' WHERE label = %s"
    steps: dict[str, Callable[[CommitTransaction], None]] = {
        "not today": lambda tx: tx.require("not today", "SELECT false"),
        "label": lambda tx: tx.change("label", update, ["none"]),
    }

    def commit(step: Callable[[CommitTransaction], None]) -> None:
        with writer.transaction(op_id) as tx:
            tx.publish(lake_commit(table))
            step(tx)

    for complaint, step in steps.items():
        with pytest.raises(Conflict, match=complaint):
            commit(step)
    assert state_of(conn, table) == UNTOUCHED


def test_a_line_that_would_go_back_is_refused_in_words(conn: Conn, writer: CatalogWriter, table: Built) -> None:
    op_id = prepared_op(writer, table)
    with pytest.raises(Refused, match="cannot go back") as refused, writer.transaction(op_id) as tx:
        tx.advance(table.table_id, 0, -5, 2, NEW)
    assert refused.value.code == "catalog.illegal_step"


def test_all_lines_move_from_exactly_what_was_read(
    conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built
) -> None:
    was = CatalogReader(catalog).cutline(table.table_id)
    assert was is not None
    becomes = replace(was, t=100, retention_line=50, frontier="0/16B3748", snapshot_id=3)
    with writer.transaction(prepared_op(writer, table)) as tx:
        tx.move(was, becomes)
    now = CatalogReader(catalog).cutline(table.table_id)
    assert now is not None
    assert (now.t, now.retention_line, now.frontier, now.snapshot_id) == (100, 50, "0/16B3748", 3)
    with pytest.raises(Conflict), writer.step() as step:
        step.move(was, becomes)
    with writer.step() as step:
        step.publish_foreign(now, 9, "file:///lake/foreign.json")


def test_a_registration_and_its_lake_table_appear_together(conn: Conn, catalog: Dsn, writer: CatalogWriter) -> None:
    name = TableName("public", "registered_here")
    lake = LakeName(("modak", "public"), name.name)
    journal = Journal(writer)
    op_id = new_op_id(SystemClock())
    journal.begin(op_id, None, "register", {})
    journal.phase(op_id, OpPhase.PLANNED, OpPhase.PREPARED)
    leaf = NewPartition(name="registered_here_0", lower=0, upper=100, leaf_oid=77, leaf_schema="public")
    with writer.transaction(op_id) as tx:
        tx.publish(Prepared(lake, None, BASE, None, None, "file:///lake/f"))
        tx.register(
            config(name, 4_000_000_010), Cutline(table_id=0, t=0, snapshot_id=None, metadata_location=BASE), [leaf]
        )
    state = CatalogReader(catalog).state(name)
    assert state.table.table_id == tx.table_id
    assert [part.name for part in state.partitions] == ["registered_here_0"]
    op = CatalogReader(catalog).op(op_id)
    assert op is not None
    assert op.table_id == tx.table_id
    assert scalar(conn, "SELECT metadata_location FROM modak_iceberg.iceberg_tables WHERE table_name = %s", name.name)
    again = new_op_id(SystemClock())
    journal.begin(again, state.table.table_id, "unregister", {})
    journal.phase(again, OpPhase.PLANNED, OpPhase.PREPARED)
    with writer.transaction(again) as tx:
        tx.unpublish(lake, BASE)
        tx.unregister(state.table.table_id)
    assert CatalogReader(catalog).table(name) is None


def test_leaves_come_go_and_are_followed(conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built) -> None:
    first, second, third = table.leaves
    with writer.step() as step:
        step.forget_partition(table.table_id, third)
        step.update_partition(table.table_id, second, "renamed", "public", 100, 250)
        step.note_leaf(table.table_id, f"{table.name.name}_0", first, 123, 456)
        assert step.note_problem(table.table_id, "renamed", "a gap")
        assert not step.note_problem(table.table_id, "renamed", "a gap")
    parts = {part.name: part for part in CatalogReader(catalog).partitions(table.table_id)}
    assert set(parts) == {f"{table.name.name}_0", "renamed"}
    assert (parts["renamed"].upper, parts["renamed"].problem) == (250, "a gap")
    assert (parts[f"{table.name.name}_0"].relfilenode, parts[f"{table.name.name}_0"].trigger_oid) == (123, 456)
    with pytest.raises(Conflict), writer.step() as step:
        step.update_partition(table.table_id, first, "x", "public", 0, 999)
    with pytest.raises(Conflict), writer.step() as step:
        step.forget_partition(table.table_id, third)


def test_the_journal_refuses_illegal_and_stale_steps(writer: CatalogWriter, table: Built) -> None:
    journal = Journal(writer)
    op_id = prepared_op(writer, table)
    with pytest.raises(ModakError, match="cannot go"):
        journal.phase(op_id, OpPhase.PREPARED, OpPhase.COMMITTED)
    with pytest.raises(Conflict):
        journal.phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
    with pytest.raises(Conflict):
        journal.finish(op_id)
    journal.note(op_id, folders=["file:///more"], counters={"files": 3}, cleanup={"obsolete": []})
    journal.fail(op_id, OpPhase.PREPARED, ModakError("storage.full", "The disk is full."))
    with pytest.raises(ModakError, match="cannot go"):
        journal.abandon(op_id, OpPhase.FAILED)
    with pytest.raises(Conflict):
        journal.note(op_id, counters={"files": 4})
    ended = CatalogReader(writer.dsn).op(op_id)
    assert ended is not None
    assert (ended.phase, ended.error) == (OpPhase.FAILED, "storage.full: The disk is full.")
    assert ended.finished_at is not None
    assert op_id not in {op.op_id for op in CatalogReader(writer.dsn).unfinished_ops()}


def test_a_reader_cannot_write(catalog: Dsn) -> None:
    reader = CatalogReader(catalog)
    with pytest.raises(ModakError) as refused:
        reader._rows("DELETE FROM modak.delta RETURNING 1")
    assert refused.value.code == "postgres.read_only"
