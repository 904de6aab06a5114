"""Somebody else commits to the lake table while we work: rearranged rows are taken along, changed ones are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from modak.core import faults
from modak.core.errors import Refused
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables import landing
from modak.tables.foreign import accept
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.status import collect
from tests.tables.events import Events
from tests.tables.invariants import Invariants, Row

pytestmark = pytest.mark.spark

LAKE = "modak.modak.public.events"
ROWS: set[Row] = {(i, i, f"row {i}") for i in range(251)} | {(350, 350, "new")}
FREEZE_POINTS = ("foreign.before_freeze", "foreign.after_freeze")
ACCEPT_POINTS = ("foreign.before_accept", "foreign.after_accept")
VISITED = {*FREEZE_POINTS, *ACCEPT_POINTS}


def rewrite(site: Site) -> None:
    """A compaction by Spark itself, through its own catalog."""
    site.spark.sql(
        f"CALL modak.system.rewrite_data_files(table => '{LAKE}', options => map('rewrite-all', 'true'))"
    ).collect()


@pytest.fixture
def truth(site: Site, warehouse: str) -> Invariants:
    return Invariants(site.dsn, warehouse)


@pytest.fixture
def grown(events: Events, leader: Leader) -> Events:
    """Two partitions are in the lake, a third has aged."""
    events.register()
    events.tier(leader)
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    return events


def once_at(point: str, act: Callable[[], None]) -> None:
    """Do something in mid-flow, the first time that the flow is at a point."""
    done = threading.Event()

    def watcher(reached: str) -> None:
        if reached == point and not done.is_set():
            done.set()
            act()

    faults.watch(watcher)


def strays(truth: Invariants) -> set[str]:
    """Files that nothing references; Spark's own catalog leaves checksums beside what it writes."""
    ((pointer,),) = truth.sql("SELECT metadata_location FROM modak_iceberg.iceberg_tables")
    return {file for file in truth.files() if not file.endswith(".crc")} - truth.referenced(pointer)


@pytest.mark.parametrize("point", ["landing.before_prepare", "landing.prepared", "landing.committed"])
def test_a_foreign_compaction_in_mid_flow_loses_nothing(
    grown: Events, leader: Leader, truth: Invariants, point: str
) -> None:
    once_at(point, lambda: rewrite(grown.site))
    with capture_logs() as logged:
        grown.tier(leader)
    faults.watch(None)
    again = [entry for entry in logged if entry["event"] == "lake.commit_again"]
    assert len(again) == (0 if point == "landing.committed" else 1)
    assert truth.everything() == ROWS
    assert grown.everything() == ROWS
    truth.check_journal()
    truth.check_partitions()
    assert strays(truth) == set()


@pytest.mark.full
@pytest.mark.parametrize(("point", "landed"), [("landing.prepared", False), ("catalog.after_commit", True)])
def test_a_foreign_compaction_between_a_crash_and_the_restart_loses_nothing(
    grown: Events, leader: Leader, truth: Invariants, point: str, landed: bool
) -> None:
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        grown.tier(leader)
    faults.arm(None)
    assert truth.state.cutline.t == (300 if landed else 200)
    rewrite(grown.site)
    repair(grown.site, leader.epoch)
    assert truth.everything() == ROWS
    while grown.tier(leader).changed:
        pass
    assert truth.state.cutline.t == 300
    assert truth.everything() == ROWS
    assert grown.everything() == ROWS
    assert len(truth.lake_rows()) == 251
    truth.check_journal()
    truth.check_partitions()
    assert strays(truth) == set()


def test_a_commit_that_keeps_losing_goes_ahead_of_the_others(grown: Events, leader: Leader, truth: Invariants) -> None:
    compacted: list[str] = []

    def compact(reached: str) -> None:
        # Always just before ours: whoever is not held off wins every race.
        if reached == "landing.prepared":
            here = len(compacted)
            worker = threading.Thread(target=lambda: (rewrite(grown.site), compacted.append("done")))
            worker.start()
            worker.join(3 if here >= landing.POLITE_TRIES else 120)

    faults.watch(compact)
    with capture_logs() as logged:
        grown.tier(leader)
    faults.watch(None)
    again = [entry for entry in logged if entry["event"] == "lake.commit_again"]
    assert len(again) == landing.POLITE_TRIES
    until = time.monotonic() + 60
    while len(compacted) <= landing.POLITE_TRIES and time.monotonic() < until:
        time.sleep(0.1)
    assert truth.everything() == ROWS
    truth.check_journal()
    truth.check_partitions()


def test_tiering_wins_against_foreign_compactions_in_a_loop(events: Events, leader: Leader, truth: Invariants) -> None:
    events.register()
    events.tier(leader)
    stop = threading.Event()
    committed: list[int] = []
    trouble: list[Exception] = []

    def compact() -> None:
        while not stop.is_set():
            try:
                rewrite(events.site)
                committed.append(1)
            except Exception as error:
                # A foreign commit may lose against ours, and then says so.
                trouble.append(error)

    compactor = threading.Thread(target=compact)
    compactor.start()
    try:
        for lower in (300, 400, 500):
            events.add_partition(lower)
            events.sql(f"INSERT INTO public.events VALUES ({lower + 50}, {lower + 50}, 'new')")
            events.tier(leader)
    finally:
        stop.set()
        compactor.join(120)
    assert committed, trouble
    rows = {(i, i, f"row {i}") for i in range(251)} | {(at, at, "new") for at in (350, 450, 550)}
    assert truth.everything() == rows
    truth.check_journal()
    truth.check_partitions()


@pytest.mark.parametrize(
    "change",
    [f"DELETE FROM {LAKE} WHERE ts = 7", f"INSERT INTO {LAKE} VALUES (9999, 99, 'foreign')"],
    ids=["delete", "insert"],
)
@pytest.mark.parametrize("point", ["landing.before_prepare", "landing.prepared"])
def test_a_foreign_change_of_rows_freezes_publication_until_it_is_accepted(
    grown: Events, leader: Leader, truth: Invariants, change: str, point: str
) -> None:
    before = truth.state.cutline
    once_at(point, lambda: grown.site.spark.sql(change).collect() and None)
    with pytest.raises(Refused) as refused:
        grown.tier(leader)
    assert refused.value.code == "lake.foreign_rows"
    faults.watch(None)
    assert truth.state.cutline == before
    assert truth.everything() == ROWS
    frozen = grown.tier(leader)
    assert "foreign snapshot" in (frozen.blocked or "")
    assert "foreign" in str(collect(grown.site))
    accept(grown.site, grown.name)
    grown.tier(leader)
    cold = set(truth.lake_rows())
    assert ((7, 7, "row 7") in cold) != change.startswith("DELETE")
    assert ((9999, 99, "foreign") in cold) == change.startswith("INSERT")
    assert truth.state.cutline.t == 300
    truth.check_journal()
    assert strays(truth) == set()


@pytest.mark.parametrize("point", FREEZE_POINTS)
def test_a_crash_while_freezing_still_freezes(grown: Events, leader: Leader, truth: Invariants, point: str) -> None:
    grown.site.spark.sql(f"DELETE FROM {LAKE} WHERE ts = 7").collect()
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        grown.tier(leader)
    faults.arm(None)
    if point == "foreign.before_freeze":
        with pytest.raises(Refused):
            grown.tier(leader)
    assert "foreign snapshot" in (grown.tier(leader).blocked or "")
    assert truth.everything() == ROWS


@pytest.mark.parametrize("point", ACCEPT_POINTS)
def test_a_crash_while_accepting_is_made_good_by_accepting_again(
    grown: Events, leader: Leader, truth: Invariants, point: str
) -> None:
    grown.site.spark.sql(f"DELETE FROM {LAKE} WHERE ts = 7").collect()
    with pytest.raises(Refused):
        grown.tier(leader)
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        accept(grown.site, grown.name)
    faults.arm(None)
    accept(grown.site, grown.name)
    grown.tier(leader)
    assert truth.everything() == ROWS - {(7, 7, "row 7")}
