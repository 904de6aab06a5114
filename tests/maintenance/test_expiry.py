"""Expiry and everybody else: nobody waits while files are compared, and nothing goes that somebody can still reach."""

from __future__ import annotations

import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.core.underway import working
from modak.storage.uri import normal
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
    repair(aged.site, aged.leader.epoch)
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


def test_an_expiry_after_whose_crash_another_tool_has_swept_comes_to_its_end(aged: Lake) -> None:
    with pytest.raises(InjectedFault):
        _struck(aged, "expiry.before_compare")
    (left,) = [op for op in aged.site.reader.unfinished_ops() if op.kind == "expire"]
    freed = aged.site.lake.freed(aged.table.identifier, left.cleanup["expired_from"])
    manifests = [uri for uri in freed.metadata if "snap-" not in uri]
    assert manifests
    aged.site.store.delete([*freed.files(), *manifests])
    repair(aged.site, aged.leader.epoch)
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
    repair(lake.site, lake.leader.epoch)
    assert lake.site.reader.unfinished_ops() == ()
    assert superfluous(lake)
    assert lake.rows() == original(1) | {(1, 1, "corrected")}


def test_a_neighbour_that_expires_more_while_files_are_compared_is_in_nobodys_way(aged: Lake) -> None:
    writer = aged.site.writer(aged.leader.epoch)

    def another() -> None:
        aged.correct(30, 31)
        aged.policy(**RETENTION, snapshot_max_count=1)
        assert trim_snapshots(aged.site, writer, aged.events.name)

    acted = meanwhile("expiry.before_compare", another)
    aged.maintain()
    faults.watch(None)
    assert acted
    assert aged.table.snapshot_count == 1
    assert superfluous(aged) == set()
    assert aged.site.reader.unfinished_ops() == ()
