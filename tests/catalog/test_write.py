"""The one transaction: all or nothing, guarded by epoch, journal row and base pointer, sure of its own outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, LiteralString

import psycopg
import pytest

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch, Lease
from modak.catalog.outcome import settle
from modak.catalog.read import CatalogReader
from modak.catalog.records import Cutline, DeltaRange, NewPartition
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core import faults
from modak.core.clock import SystemClock
from modak.core.errors import Conflict, ModakError, NotLeader, Refused
from modak.core.faults import Fault, InjectedFault
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase, PartitionState
from modak.lake.model import LakeName, Prepared
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, config, delta, scalar
from tests.support.proxy import FaultProxy

Conn = psycopg.Connection[Any]

BASE = "file:///lake/m1.json"
NEW = "file:///lake/m2.json"


@pytest.fixture
def writer(catalog: Dsn) -> CatalogWriter:
    return CatalogWriter(catalog)


@pytest.fixture
def proxy(catalog: Dsn) -> Iterator[FaultProxy]:
    with FaultProxy(catalog.host, catalog.port) as opened:
        yield opened


@pytest.fixture
def table(conn: Conn) -> Built:
    built = build(conn, watch=[0])
    conn.execute(
        "INSERT INTO modak_iceberg.iceberg_tables VALUES ('modak', 'modak.public', %s, %s, NULL, 'TABLE')",
        (built.name.name, BASE),
    )
    for state in ("sealing", "tiering"):
        conn.execute(
            "UPDATE modak.partitions SET state = %s WHERE table_id = %s AND partition_name = %s",
            (state, built.table_id, f"{built.name.name}_0"),
        )
    return built


def prepared_op(writer: CatalogWriter, table: Built) -> OpId:
    op_id = new_op_id(SystemClock())
    journal = Journal(writer)
    journal.begin(op_id, table.table_id, "tiering", {"partitions": [0]}, ["file:///lake/data/op"])
    journal.phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
    journal.phase(op_id, OpPhase.WRITING, OpPhase.PREPARED, attempt=1, folders=["file:///lake/metadata/op"])
    return op_id


def lake_commit(table: Built, base: str | None = BASE, new: str = NEW) -> Prepared:
    name = LakeName(("modak", "public"), table.name.name)
    return Prepared(name, base, new, snapshot_id=2, base_snapshot_id=1, attempt_folder="file:///lake/metadata/op")


def tier(writer: CatalogWriter, op_id: OpId, table: Built, **changes: Any) -> None:
    """A tiering commit of partition 0."""
    with writer.transaction(op_id) as tx:
        tx.require_not_frozen(table.table_id)
        tx.publish(changes.get("prepared", lake_commit(table)))
        tx.advance(table.table_id, changes.get("from_t", 0), 100, 2, NEW)
        names = changes.get("names", [f"{table.name.name}_0"])
        tx.partitions(table.table_id, names, PartitionState.TIERING, PartitionState.TIERED)
        tx.require_no_new_pins(table.table_id, 1, changes.get("tagged", ()))
        tx.count(rows=5)
        tx.tidy_later(obsolete=["file:///lake/old.json"])


def state_of(conn: Conn, table: Built) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = conn.execute(
        "SELECT c.t, c.snapshot_id, c.metadata_location, i.metadata_location, i.previous_metadata_location, p.state"
        " FROM modak.cutline c JOIN modak.tables t USING (table_id) JOIN modak.partitions p USING (table_id)"
        " JOIN modak_iceberg.iceberg_tables i ON i.table_name = t.lake_name"
        " WHERE table_id = %s AND p.partition_name = %s",
        (table.table_id, f"{table.name.name}_0"),
    ).fetchone()
    assert row is not None
    return row


UNTOUCHED = (0, 1, BASE, BASE, None, "tiering")
LANDED = (100, 2, NEW, NEW, BASE, "tiered")


def test_everything_moves_together(conn: Conn, catalog: Dsn, writer: CatalogWriter, table: Built) -> None:
    op_id = prepared_op(writer, table)
    tier(writer, op_id, table)
    assert state_of(conn, table) == LANDED
    op = CatalogReader(catalog).op(op_id)
    assert op is not None
    assert op.landed
    assert op.phase is OpPhase.COMMITTED
    assert op.counters == {"rows": 5}
    assert op.cleanup == {"obsolete": ["file:///lake/old.json"]}
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
    Journal(writer).abandon(op_id, OpPhase.PREPARED, "taken over")
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


def through(dsn: Dsn, proxy: FaultProxy) -> Dsn:
    return replace(dsn, host="127.0.0.1", port=proxy.port)


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
    journal.fail(op_id, OpPhase.PREPARED, "disk full")
    journal.abandon(op_id, OpPhase.FAILED)
    with pytest.raises(Conflict):
        journal.note(op_id, counters={"files": 4})


def test_a_reader_cannot_write(catalog: Dsn) -> None:
    reader = CatalogReader(catalog)
    with pytest.raises(ModakError) as refused:
        reader._rows("DELETE FROM modak.delta RETURNING 1")
    assert refused.value.code == "postgres.read_only"
