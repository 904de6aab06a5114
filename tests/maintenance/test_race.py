"""A rewrite beside folds and foreign commits: no row is lost, none comes back, and it gets through."""

from __future__ import annotations

import threading

import pytest

from modak.catalog import pins
from modak.catalog.journal import Journal
from modak.core import faults, underway
from modak.core.ids import OpId, new_op_id
from modak.core.states import OpPhase
from modak.tables.fold.run import fold
from modak.tables.maintenance.run import maintain
from modak.tables.upkeep import release_tags, trim_snapshots
from tests.maintenance import foreign
from tests.maintenance.lake import Lake, did, meanwhile, original
from tests.tables import readers
from tests.tables.corrections import Corrections


def test_a_row_deleted_while_its_file_is_rewritten_stays_deleted(lake: Lake) -> None:
    lake.policy(rewrite_min_input_files=2)
    lake.add(1)
    lake.delete(20)
    acted = meanwhile("rewrite.after_tasks", lambda: lake.delete(21, 50))
    counters = did(lake.maintain(), "debt").counters
    faults.watch(None)
    assert acted
    assert counters["deletes_after"] == 1, "the new file has a vector from its first moment on"
    expected = original(20, 21, 50) | {(10_001, 1, "added")}
    assert lake.rows() == expected
    assert {tuple(row.values()) for row in readers.by_pyiceberg(lake.site, lake.events.name)} == expected
    lake.maintain()
    assert not [file for file in lake.files() if file.deletes]
    assert lake.rows() == expected


def test_a_row_corrected_while_small_files_are_joined_is_there_once(lake: Lake) -> None:
    lake.policy(rewrite_min_input_files=2, rewrite_sort_columns="body")
    lake.add(1)
    lake.add(2)
    meanwhile("rewrite.after_tasks", lambda: lake.correct(7))
    lake.maintain()
    faults.watch(None)
    assert lake.rows() == original(7) | {(7, 7, "corrected"), (10_001, 1, "added"), (10_002, 2, "added")}


def test_deletes_at_every_attempt_do_not_starve_a_rewrite(lake: Lake) -> None:
    lake.policy(rewrite_enabled=False)
    lake.delete(0)
    keys = iter(range(1, 90))
    acted = meanwhile("landing.before_prepare", lambda: lake.delete(next(keys)), times=3)
    assert did(lake.maintain(), "debt").changed
    faults.watch(None)
    assert len(acted) == 3
    assert lake.rows() == original(0, 1, 2, 3)


def test_a_rewrite_that_loses_a_race_looks_again_only_at_what_has_changed_since(lake: Lake) -> None:
    lake.policy(rewrite_enabled=False)
    lake.delete(0, 100)
    acts = {"rewrite.after_tasks": lambda: lake.delete(1, 101), "landing.prepared": lambda: lake.delete(2)}
    carried: list[str] = []

    def watcher(point: str) -> None:
        if point == "rewrite.before_carry":
            carried.append(point)
        if act := acts.pop(point, None):
            faults.watch(None)
            act()
            faults.watch(watcher)

    faults.watch(watcher)
    counters = did(lake.maintain(), "debt").counters
    faults.watch(None)
    assert not acts
    assert len(carried) == 3, "both bins, and then the one that was touched again"
    assert (counters["files_before"], counters["deletes_after"]) == (2, 2)
    assert lake.rows() == original(0, 1, 2, 100, 101)
    lake.check_files()


def test_a_rewrite_whose_connection_breaks_before_it_lands_is_not_thrown_away(lake: Lake) -> None:
    lake.policy(rewrite_enabled=False)
    lake.delete(0)
    ended: list[object] = []
    written: list[str] = []

    def watcher(point: str) -> None:
        if point == "rewrite.before_tasks":
            written.append(point)
        elif point == "catalog.before_commit" and not ended:
            ended.extend(
                lake.events.sql(
                    "SELECT pg_terminate_backend(backend_pid, 2000) FROM modak.op_log"
                    " WHERE kind = 'rewrite-debt' AND phase = 'prepared'"
                )
            )

    faults.watch(watcher)
    assert did(lake.maintain(), "debt").changed
    faults.watch(None)
    assert ended == [(True,)]
    assert written == ["rewrite.before_tasks"]
    assert lake.rows() == original(0)
    lake.check_files()


def test_the_second_rewrite_carries_row_ids_that_the_first_wrote(lake: Lake) -> None:
    lake.policy(rewrite_min_input_files=2)
    lake.add(1)
    lake.add(2)
    lake.maintain()
    lake.delete(5)
    meanwhile("rewrite.after_tasks", lambda: lake.delete(6))
    lake.maintain()
    faults.watch(None)
    assert lake.rows() == original(5, 6) | {(10_001, 1, "added"), (10_002, 2, "added")}


@pytest.mark.spark
def test_a_file_that_a_foreign_tool_has_compacted_meanwhile_is_left_to_it(lake: Lake) -> None:
    lake.policy(rewrite_min_input_files=2)
    lake.add(1)
    lake.add(2)

    def compact() -> None:
        lake.site.spark.sql(
            "CALL modak.system.rewrite_data_files(table => 'modak.modak.public.events',"
            " options => map('rewrite-all', 'true'))"
        ).collect()

    meanwhile("rewrite.after_tasks", compact)
    report = lake.maintain()
    faults.watch(None)
    assert did(report, "pack").error is None
    assert lake.rows() == original() | {(10_001, 1, "added"), (10_002, 2, "added")}
    assert lake.site.reader.unfinished_ops() == ()


def test_foreign_deletes_that_come_during_a_rewrite_stop_it_and_freeze_the_table(lake: Lake) -> None:
    lake.delete(1)
    meanwhile("rewrite.after_tasks", lambda: foreign.equality_delete(lake, [[2]], accepted=False))
    report = maintain(lake.site, lake.leader.epoch, lake.events.name, engine="embedded")
    faults.watch(None)
    assert "lake.foreign_rows" in (did(report, "debt").error or "")
    assert lake.site.reader.state(lake.events.name).table.frozen is not None
    assert [one.skipped for one in report.passes[1:3]] == ["a foreign snapshot has frozen publication"] * 2
    assert lake.rows() == original(1)


def test_a_failed_step_is_journaled_and_the_later_ones_run(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.policy(snapshot_retention_hours=0, snapshot_min_retained=1, rewrite_min_input_files=2)
    lake.delete(1)
    lake.add(2)
    path = lake.files()[0].file.path.removeprefix("file://")
    with open(path, "rb") as file:
        content = file.read()
    with open(path, "wb") as file:
        file.write(b"broken")
    report = maintain(lake.site, lake.leader.epoch, lake.events.name, engine="embedded")
    assert report.failed
    assert did(report, "expiry").changed
    op = next(op for op in lake.site.reader.history(1) if op.kind == "maintenance")
    assert op.error is not None
    assert op.counters["expiry"]["snapshots"] > 0
    with open(path, "wb") as file:
        file.write(content)
    lake.maintain()
    assert lake.rows() == original(1) | {(10_002, 2, "added")}


def test_what_a_rewrite_reads_is_not_expired_under_it(lake: Lake) -> None:
    lake.policy(snapshot_max_count=1, snapshot_min_retained=1, rewrite_enabled=False)
    lake.delete(1)
    base = lake.table.snapshot_id

    def trim() -> None:
        lake.policy(snapshot_max_count=1, snapshot_min_retained=1)
        for key in (2, 3, 4):
            lake.delete(key)
        trim_snapshots(lake.site, lake.site.writer(lake.leader.epoch), lake.events.name)
        assert base in {each.id for each in lake.site.lake.snapshots(lake.table)}

    acted = meanwhile("rewrite.before_tasks", trim)
    lake.maintain()
    faults.watch(None)
    assert acted
    assert lake.rows() == original(1, 2, 3, 4)


def test_no_snapshot_is_trimmed_that_was_current_since_an_operation_began(lake: Lake) -> None:
    writer = lake.site.writer(lake.leader.epoch)
    lake.policy(snapshot_max_count=1, snapshot_min_retained=1)
    op_id = new_op_id(lake.site.clock)
    with underway.working(op_id):
        Journal(writer).begin(op_id, 1, "load", {})
        for key in (1, 2, 3):
            lake.delete(key)
        assert trim_snapshots(lake.site, writer, lake.events.name) == 0
    Journal(writer).abandon(op_id, OpPhase.PLANNED)
    assert trim_snapshots(lake.site, writer, lake.events.name) == 3


def test_a_pass_does_not_take_the_work_of_another_thread_for_the_leftovers_of_a_crash(lake: Lake) -> None:
    pin = pins.begin(lake.site.dsn, lake.events.name)
    lake.correct(1)
    with lake.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)
    released: list[bool] = []

    def release() -> None:
        writer = lake.site.writer(lake.leader.epoch)
        released.append(release_tags(lake.site, writer, lake.events.name))

    def beside() -> None:
        other = threading.Thread(target=release)
        other.start()
        other.join()

    meanwhile("fold.after_write", beside)
    Corrections(lake.events).upsert(2, 2, "corrected")
    fold(lake.site, lake.leader.epoch, lake.events.name)
    faults.watch(None)
    assert released == [True]
    assert lake.table.tags == {}
    assert lake.rows() == original(1, 2) | {(1, 1, "corrected"), (2, 2, "corrected")}
    assert lake.site.reader.unfinished_ops() == ()


def test_an_operation_belongs_to_the_thread_that_began_it_for_as_long_as_that_lives() -> None:
    op_id, ended = OpId("20260101t000000000-00000000"), threading.Event()
    other = threading.Thread(target=lambda: (underway.begun(op_id), ended.wait()))
    other.start()
    while op_id not in underway._owners:
        pass
    assert underway.is_under_way(op_id)
    ended.set()
    other.join()
    assert not underway.is_under_way(op_id), "its thread is gone"
    underway.begun(op_id)
    assert not underway.is_under_way(op_id), "to itself it may be a leftover"
    with underway.working(op_id):
        assert underway.is_under_way(op_id)
    assert not underway.is_under_way(op_id)
