"""Expiry and everybody else: nobody waits while files are compared, and nothing goes that somebody can still reach."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from modak.catalog import operators, pins
from modak.catalog.records import OpRecord
from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.errors import ModakError
from modak.core.faults import Fault, InjectedFault
from modak.core.states import OpPhase
from modak.core.underway import working
from modak.lake.model import LakeName
from modak.runtime import maintaining
from modak.runtime.maintaining import Maintainer
from modak.storage.uri import local_path, normal
from modak.tables.maintenance import erasures
from modak.tables.maintenance.run import maintain
from modak.tables.repair import repair
from modak.tables.upkeep import trim_snapshots
from tests.maintenance.lake import Lake, did, meanwhile, original

COMPARING = ("expiry.before_compare", "expiry.before_delete", "expiry.after_delete", "expiry.after_compare")
RETENTION = {"snapshot_retention_hours": 0, "snapshot_min_retained": 1}


@pytest.fixture(params=["embedded", pytest.param("spark", marks=pytest.mark.spark)])
def aged(lake: Lake, request: pytest.FixtureRequest) -> Lake:
    """Five snapshots, and files that only the older ones reach; the policy lets go of all but the latest."""
    lake.engine = request.param
    lake.policy(**RETENTION, rewrite_enabled=False, delete_compaction_enabled=False)
    for key in range(4):
        lake.correct(key)
    return lake


def stock_commit(lake: Lake, value: str) -> None:
    """Another tool commits to the table, by Iceberg's own catalog."""
    lake.site.lake.java_table(lake.table.identifier).updateProperties().set("theirs", value).commit()


def superfluous(lake: Lake) -> set[str]:
    """Data files that are there and that nothing reaches."""
    there = {entry.uri for entry in lake.site.store.list(f"{lake.table.location}/data")}
    reached = set(lake.site.lake.reachable(lake.table.identifier))
    assert reached <= there, "something that is reached is gone"
    return there - reached


def test_an_expiry_that_loses_every_race_compares_files_while_others_commit(aged: Lake) -> None:
    keys, lost, compared = iter(range(10, 90)), [0], list[str]()

    def others() -> None:
        aged.correct(next(keys))
        stock_commit(aged, str(len(compared)))

    def watcher(point: str) -> None:
        loses = point == "landing.prepared" and lost[0] < 3
        if not loses and point not in COMPARING:
            return
        faults.watch(None)
        if loses:
            lost[0] += 1
        else:
            compared.append(point)
        others()
        faults.watch(watcher)

    faults.watch(watcher)
    report = aged.maintain()
    faults.watch(None)
    changed = {*range(4), *range(10, next(keys))}
    assert lost == [3]
    assert set(compared) == set(COMPARING)
    (op,) = [op for op in aged.site.reader.history(1) if op.kind == "expire"]
    assert op.attempt == 4, "the others waited for it, and only while it was prepared"
    assert did(report, "expiry").counters["snapshots"] >= 5
    assert did(report, "expiry").counters["files_deleted"] > 0
    assert aged.rows() == original(*changed) | {(key, key, "corrected") for key in changed}
    assert superfluous(aged) == set()
    assert aged.site.reader.unfinished_ops() == ()


def test_what_other_commits_push_out_of_the_log_stays_until_it_has_been_compared(aged: Lake) -> None:
    java = aged.site.lake.java_table(aged.table.identifier)
    java.updateProperties().set("write.metadata.previous-versions-max", "1").commit()
    aged.correct(5)
    with pytest.raises(InjectedFault):
        _struck(aged, "expiry.after_delete")
    (left,) = [op for op in aged.site.reader.unfinished_ops() if op.kind == "expire"]
    # A neighbour in this process is still at it, so nobody else tidies it.
    with working(left.op_id):
        for key in (6, 7, 8):
            aged.correct(key)
        assert aged.site.store.exists(left.cleanup["expired_from"])
    aged.recover()
    assert aged.site.reader.unfinished_ops() == ()
    assert not aged.site.store.exists(left.cleanup["expired_from"])
    assert superfluous(aged) == set()


def _struck(lake: Lake, point: str) -> None:
    faults.arm(Fault(point))
    try:
        lake.maintain()
    finally:
        faults.arm(None)


def test_a_branch_or_tag_that_somebody_gives_to_an_old_snapshot_meanwhile_keeps_it(aged: Lake) -> None:
    first, second, *_ = [each.id for each in aged.site.lake.snapshots(aged.table)]

    def name_them() -> None:
        manage = aged.site.lake.java_table(aged.table.identifier).manageSnapshots()
        manage.createBranch("theirs", first).createTag("kept", second).commit()

    acted = meanwhile("landing.prepared", name_them)
    assert did(aged.maintain(), "expiry").changed
    faults.watch(None)
    assert acted
    kept = [each.id for each in aged.site.lake.snapshots(aged.table)]
    assert kept[:2] == [first, second]
    assert superfluous(aged) == set()
    assert did(aged.maintain(), "expiry").skipped == "no snapshot may expire"


def test_a_snapshot_that_somebody_has_rolled_back_to_meanwhile_is_spared(aged: Lake) -> None:
    old = next(iter(aged.site.lake.snapshots(aged.table)))

    def roll_back() -> None:
        aged.site.lake.java_table(aged.table.identifier).manageSnapshots().setCurrentSnapshot(old.id).commit()

    acted = meanwhile("landing.prepared", roll_back)
    maintain(aged.site, aged.leader.epoch, aged.events.name, engine=aged.engine)
    faults.watch(None)
    assert acted
    assert aged.table.snapshot_id == old.id
    assert superfluous(aged) == set()


def test_a_freed_file_that_somebody_adds_again_before_the_comparison_stays(aged: Lake) -> None:
    aged.policy(**RETENTION)
    site, table = aged.site, aged.table
    first = next(iter(site.lake.snapshots(table)))
    (file,) = [found.file for found in site.lake.files(table.identifier, first.id, column="ts") if found.lower == 0]

    def add_again() -> None:
        assert normal(file.path) not in set(site.lake.reachable(table.identifier))
        java, theirs = site.lake._java, site.lake.java_table(table.identifier)
        update = theirs.newAppend()
        handle = java.method(".AppendFiles", "appendFile", ".AppendFiles", ".DataFile").bindTo(update)
        java.feed([file], theirs.specs(), java.consumer(handle))
        update.commit()

    acted = meanwhile("expiry.before_compare", add_again)
    assert did(aged.maintain(), "expiry").counters["files_deleted"] > 0
    faults.watch(None)
    assert acted
    assert normal(file.path) in set(site.lake.reachable(table.identifier))
    assert superfluous(aged) == set()


def test_a_freed_file_that_lies_outside_the_tables_folder_is_not_ours_to_delete(aged: Lake) -> None:
    site, table = aged.site, aged.table
    (file,) = [found.file for found in aged.files() if found.lower == 100]
    outside = Path(local_path(table.location) or "").with_name("elsewhere.parquet")
    outside.write_bytes(Path(local_path(file.path) or "").read_bytes())
    other = replace(file, json=file.json.replace(file.path, outside.as_uri()), path=outside.as_uri())
    java = site.lake._java
    for gone, added in ((file, other), (other, file)):
        theirs = site.lake.java_table(table.identifier)
        update = theirs.newRewrite().validateFromSnapshot(theirs.currentSnapshot().snapshotId())
        for method, one in (("deleteFile", gone), ("addFile", added)):
            handle = java.method(".RewriteFiles", method, ".RewriteFiles", ".DataFile").bindTo(update)
            java.feed([one], theirs.specs(), java.consumer(handle))
        update.commit()
    assert normal(other.path) in set(site.lake.reachable(table.identifier))
    assert did(aged.maintain(), "expiry").counters["files_deleted"] > 0
    assert normal(other.path) not in set(site.lake.reachable(table.identifier))
    assert outside.exists()
    assert superfluous(aged) == set()


def test_an_expiry_after_whose_crash_another_tool_has_swept_comes_to_its_end(aged: Lake) -> None:
    with pytest.raises(InjectedFault):
        _struck(aged, "expiry.before_compare")
    (left,) = [op for op in aged.site.reader.unfinished_ops() if op.kind == "expire"]
    freed = aged.site.lake.freed(aged.table.identifier, left.cleanup["expired_from"])
    manifests = [uri for uri in freed.metadata if "snap-" not in uri]
    assert manifests
    aged.site.store.delete([*freed.files(), *manifests])
    aged.recover()
    assert aged.site.reader.unfinished_ops() == ()
    assert not any(aged.site.store.exists(uri) for uri in freed.metadata)
    assert superfluous(aged) == set()


def test_an_expiry_whose_metadata_somebody_has_deleted_leaves_its_files_to_a_sweep(lake: Lake) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    with pytest.raises(InjectedFault):
        _struck(lake, "expiry.before_compare")
    (left,) = [op for op in lake.site.reader.unfinished_ops() if op.kind == "expire"]
    lake.site.store.delete([left.cleanup["expired_from"]])
    lake.recover()
    assert lake.site.reader.unfinished_ops() == ()
    assert superfluous(lake)
    assert lake.rows() == original(1) | {(1, 1, "corrected")}


@pytest.mark.parametrize("moment", ["expiry.before_compare", "expiry.before_delete"])
def test_a_neighbour_that_expires_more_while_files_are_compared_is_in_nobodys_way(
    aged: Lake, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    writer, again = aged.site.writer(aged.leader.epoch), list[int]()
    monkeypatch.setattr("modak.tables.maintenance.freeing.pause", lambda times: again.append(times) or 0.0)

    def another() -> None:
        aged.correct(30, 31)
        aged.policy(**RETENTION, snapshot_max_count=1)
        assert trim_snapshots(aged.site, writer, aged.events.name)

    acted = meanwhile(moment, another)
    aged.maintain()
    seen = [op for op in aged.site.reader.history(1) if op.kind == "expire" and op.landed]
    faults.watch(None)
    assert acted
    assert aged.table.snapshot_count == 1
    assert [op.phase for op in seen] == [OpPhase.COMMITTED, OpPhase.DONE], "the later one waits for the earlier"
    assert again == []
    aged.recover()
    assert superfluous(aged) == set()
    assert aged.site.reader.unfinished_ops() == ()


def _left(lake: Lake) -> OpRecord:
    """An expiry that has landed and deleted nothing yet."""
    with pytest.raises(InjectedFault):
        _struck(lake, "expiry.before_compare")
    (left,) = [op for op in lake.site.reader.unfinished_ops() if op.kind == "expire"]
    return left


@contextlib.contextmanager
def pointing_at(lake: Lake, metadata_location: str) -> Iterator[None]:
    """Somebody changes the pointer by hand, and afterwards sets it right."""
    right = lake.table.metadata_location
    statement = "UPDATE modak_iceberg.iceberg_tables SET metadata_location = '{}'"
    lake.events.sql(statement.format(metadata_location))
    yield
    lake.events.sql(statement.format(right))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits before trying again."""
    monkeypatch.setattr("modak.tables.maintenance.freeing.pause", lambda _: 0.0)


@pytest.mark.usefixtures("hasty")
def test_while_the_lake_has_not_what_is_published_no_freed_file_goes(lake: Lake) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    _left(lake)
    assert lake.table.oldest_metadata is not None
    there = set(lake.site.store.list(lake.table.location))
    with pointing_at(lake, lake.table.oldest_metadata):
        lake.recover()
        assert set(lake.site.store.list(lake.table.location)) == there
    assert len(lake.site.reader.unfinished_ops()) == 1
    lake.recover()
    assert lake.site.reader.unfinished_ops() == ()
    assert superfluous(lake) == set()
    assert lake.rows() == original(1) | {(1, 1, "corrected")}


@pytest.mark.usefixtures("hasty")
def test_while_the_lake_has_not_what_a_reader_has_pinned_no_freed_file_goes(lake: Lake) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    left = _left(lake)
    pin = pins.begin(lake.site.dsn, lake.events.name)
    gone = next(each.id for each in lake.site.lake.snapshots(lake.site.lake.load_at(*_named(lake, left))))
    lake.events.sql(f"UPDATE modak.read_pins SET snapshot_id = {gone}")
    there = set(lake.site.store.list(lake.table.location))
    lake.recover()
    assert set(lake.site.store.list(lake.table.location)) == there
    with lake.site.connect() as conn:
        pins.end(conn, pin.pin_id)
    lake.recover()
    assert lake.site.reader.unfinished_ops() == ()
    assert superfluous(lake) == set()


def _named(lake: Lake, left: OpRecord) -> tuple[LakeName, str]:
    return lake.table.identifier, str(left.cleanup["expired_from"])


def test_an_expiry_takes_nothing_once_another_table_has_the_name(lake: Lake) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    left = _left(lake)
    folder = Path(local_path(lake.table.location) or "", "metadata")
    another = json.loads(Path(local_path(lake.table.metadata_location) or "").read_text())
    another |= {"table-uuid": str(uuid.uuid4())}
    (folder / "00000-another.metadata.json").write_text(json.dumps(another))
    there = set(lake.site.store.list(f"{lake.table.location}/data"))
    with pointing_at(lake, (folder / "00000-another.metadata.json").as_uri()):
        lake.recover()
        assert left.op_id not in {op.op_id for op in lake.site.reader.unfinished_ops()}
    assert set(lake.site.store.list(f"{lake.table.location}/data")) == there


@pytest.mark.usefixtures("hasty")
def test_other_work_goes_on_while_files_cannot_be_compared(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    _left(lake)

    def failing(*_: object) -> None:
        raise ModakError("lake.failed", "a manifest cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(type(lake.site.lake), "freed", failing)
        lake.correct(2)
        lake.recover()
    assert [op.kind for op in lake.site.reader.unfinished_ops()] == ["expire"]
    assert lake.rows() == original(1, 2) | {(key, key, "corrected") for key in (1, 2)}
    lake.recover()
    assert lake.site.reader.unfinished_ops() == ()
    assert superfluous(lake) == set()


@pytest.mark.parametrize("noted", ["freed", "expired"])
def test_an_expiry_that_an_older_version_has_journaled_by_names_comes_to_its_end(lake: Lake, noted: str) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    left = _left(lake)
    freed = lake.site.lake.freed(*_named(lake, left))
    names = json.dumps([*freed.files(), *freed.metadata])
    lake.events.sql(
        f"UPDATE modak.op_log SET cleanup = cleanup - 'expired_from' || '{{\"{noted}\": {names}}}'"
        f" WHERE op_id = '{left.op_id}'"
    )
    lake.recover()
    assert lake.site.reader.unfinished_ops() == ()
    lake.check_files()
    assert lake.rows() == original(1) | {(1, 1, "corrected")}


def test_while_a_pin_keeps_an_expiry_open_its_files_are_deleted_once(lake: Lake) -> None:
    lake.policy(**RETENTION, rewrite_enabled=False, delete_compaction_enabled=False)
    java = lake.site.lake.java_table(lake.table.identifier)
    java.updateProperties().set("write.metadata.previous-versions-max", "1").commit()
    lake.correct(1)
    pin = pins.begin(lake.site.dsn, lake.events.name)
    lake.correct(2)
    assert did(lake.maintain(), "expiry").counters["files_deleted"] > 0
    (left,) = [op for op in lake.site.reader.unfinished_ops() if op.kind == "expire"]
    assert normal(pin.metadata_location) in left.cleanup["obsolete"]
    seen: list[str] = []
    faults.watch(seen.append)
    lake.recover()
    faults.watch(None)
    assert "storage.deleting" not in seen
    with lake.site.connect() as conn:
        pins.end(conn, pin.pin_id)
    lake.recover()
    assert left.op_id not in {op.op_id for op in lake.site.reader.unfinished_ops()}
    assert not lake.site.store.exists(pin.metadata_location)


def test_a_snapshot_that_a_reader_is_just_pinning_is_not_trimmed(lake: Lake) -> None:
    writer = lake.site.writer(lake.leader.epoch)
    lake.correct(1)
    with lake.site.connect() as reader:
        row = reader.execute("SELECT snapshot_id FROM modak.modak_read_begin('public.events')").fetchone()
        lake.correct(2)
        lake.correct(3)
        lake.policy(**RETENTION, snapshot_max_count=1)
        assert trim_snapshots(lake.site, writer, lake.events.name) == 0
        assert _expiry(lake).attempt == 1, "who is pinning may take his time"
        assert did(lake.maintain(), "expiry").skipped == "deferred: A reader is just pinning public.events."
        assert _expiry(lake).attempt == 1
        reader.commit()
    assert row is not None
    assert row[0] in {each.id for each in lake.site.lake.snapshots(lake.table)}
    assert trim_snapshots(lake.site, writer, lake.events.name) > 0
    assert row[0] in {each.id for each in lake.site.lake.snapshots(lake.table)}
    lake.free()
    assert superfluous(lake) == set()


def _expiry(lake: Lake) -> OpRecord:
    """The latest."""
    return next(op for op in lake.site.reader.history(1) if op.kind == "expire")


def test_only_the_thread_of_maintenance_compares_files(lake: Lake) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    left, compared = _left(lake), list[str]()
    faults.watch(lambda point: compared.append(point) if point in COMPARING else None)
    repair(lake.site, lake.leader.epoch)
    lake.correct(2, 3)
    lake.policy(**RETENTION, snapshot_max_count=1)
    assert trim_snapshots(lake.site, lake.site.writer(lake.leader.epoch), lake.events.name)
    assert compared == []
    assert [op.kind for op in lake.site.reader.unfinished_ops()].count("expire") == 2
    assert lake.site.store.exists(left.cleanup["expired_from"])
    lake.maintain()
    faults.watch(None)
    assert set(compared) == set(COMPARING)
    assert superfluous(lake) == set()
    lake.recover()
    assert lake.site.reader.unfinished_ops() == ()


@pytest.mark.spark
def test_the_maintainer_frees_files_whatever_the_policy_says_unless_the_table_is_paused(lake: Lake) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    _left(lake)
    lake.policy(maintenance_enabled=False)
    maintainer = Maintainer(lake.site, lake.leader, lambda: False)
    with lake.site.connect(autocommit=True) as conn:
        assert operators.pause(conn, 1, "somebody")
        maintainer.turn()
        assert superfluous(lake)
        assert operators.resume(conn, 1)
    maintainer.turn()
    assert superfluous(lake) == set()
    assert "expire" not in {op.kind for op in lake.site.reader.unfinished_ops()}


def test_a_table_whose_files_cannot_be_freed_is_looked_at_again_after_a_while(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.policy(**RETENTION)
    lake.correct(1)
    _left(lake)
    clock, tried = FrozenClock(datetime.now(UTC)), list[object]()
    monkeypatch.setattr(lake.site, "clock", clock)

    def failing(*arguments: object) -> int:
        tried.append(arguments[-1])
        if len(tried) == 1:
            raise ValueError("nobody has thought of this")
        return 1

    monkeypatch.setattr(maintaining, "finish_expiries", failing)
    maintainer = Maintainer(lake.site, lake.leader, lambda: False)
    for seconds in (0, maintaining.FREEING_SECONDS - 1, 1, 1, maintaining.FREEING_SECONDS):
        clock.sleep(seconds)
        maintainer.turn()
    assert tried == [lake.events.name] * 3


def test_too_many_snapshots_are_a_tenth_less_afterwards(lake: Lake) -> None:
    writer, name = lake.site.writer(lake.leader.epoch), lake.events.name
    for key in range(10):
        lake.delete(key)
    assert lake.table.snapshot_count == 11
    lake.policy(**RETENTION, snapshot_max_count=10)
    assert trim_snapshots(lake.site, writer, name) == 2
    lake.delete(50)
    assert lake.table.snapshot_count == 10
    assert trim_snapshots(lake.site, writer, name) == 0
    lake.policy(snapshot_retention_hours=0, snapshot_min_retained=9, snapshot_max_count=9)
    assert trim_snapshots(lake.site, writer, name) == 1


def test_an_erasure_has_not_ended_while_files_of_expired_snapshots_are_there(lake: Lake) -> None:
    lake.policy(**RETENTION)
    writer, name = lake.site.writer(lake.leader.epoch), lake.events.name
    asked = erasures.ask(lake.site, name, "id = 5")
    lake.delete(5)
    erasures.erased(writer, asked, 0, {})
    _left(lake)
    assert erasures.finish(lake.site, writer, name) == 1
    lake.recover()
    assert erasures.finish(lake.site, writer, name) == 0
    assert superfluous(lake) == set()
