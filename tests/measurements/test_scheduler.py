"""Cycles at set times, and who may start them."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from modak.config import load
from modak.core.clock import FrozenClock, SystemClock
from modak.core.errors import UsageError
from modak.measurements.cluster import CompactionRoleGated
from modak.measurements.manager import Manager
from modak.measurements.opening import open_manager, open_state, runner_of, schedules_of
from modak.measurements.scheduler import Scheduler, SchedulerConfig
from modak.storage.objects import Objects
from tests.measurements.support import data_files, fill, manager, tiers

MIDNIGHT = datetime(2026, 12, 1, tzinfo=UTC)


class Gate:
    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def can_compact(self) -> bool:
        return self.allowed

    def role(self) -> str:
        return "reader"


@pytest.fixture
def compactor(folder: Objects, tmp_path: Path) -> Manager:
    return manager(folder, tmp_path)


@pytest.mark.parametrize("text", ["", "5 * * *", "* * * * * *", "61 * * * *", "@hourly", "a b c d e"])
def test_a_bad_schedule_is_refused_when_the_scheduler_is_made(compactor: Manager, text: str) -> None:
    with pytest.raises(UsageError, match="schedule"):
        Scheduler(SchedulerConfig(compactor, ("hourly",), text))


def test_tiers_must_be_named_known_and_enabled(folder: Objects, tmp_path: Path) -> None:
    compactor = manager(folder, tmp_path)
    for names in ((), ("yearly",)):
        with pytest.raises(UsageError):
            Scheduler(SchedulerConfig(compactor, names))
    off = manager(folder, tmp_path, tiers=tiers(folder, SystemClock(), enabled=False))
    with pytest.raises(UsageError, match="switched off"):
        Scheduler(SchedulerConfig(off, ("hourly",)))


def scheduler(compactor: Manager, clock: FrozenClock) -> Scheduler:
    made = Scheduler(SchedulerConfig(compactor, ("hourly", "daily"), schedules={"daily": "0 3 * * *"}, clock=clock))
    made._due = {name: made._next(name, clock.now()) for name in made._schedules}
    return made


def test_ticks_come_at_their_utc_times_and_missed_ones_once(compactor: Manager) -> None:
    clock = FrozenClock(MIDNIGHT)
    due = scheduler(compactor, clock)
    assert due.tick() is None
    clock.sleep(5 * 60)
    assert due.tick() == 1
    assert due.tick() is None
    clock.sleep(5 * 3600)
    assert due.tick() == 2
    assert due.tick() is None
    assert due._due == {
        "hourly": MIDNIGHT + timedelta(hours=6, minutes=5),
        "daily": MIDNIGHT + timedelta(days=1, hours=3),
    }


def test_a_tick_during_a_cycle_comes_right_after_it(compactor: Manager, folder: Objects) -> None:
    fill(folder)
    clock = FrozenClock(MIDNIGHT)
    due = scheduler(compactor, clock)
    clock.sleep(5 * 60)
    missed: list[int | None] = []
    compactor.set_on_compaction_complete(lambda: missed.append(due.tick()))
    compactor.run_compaction_cycle_for_tiers(["hourly"])
    compactor.set_on_compaction_complete(None)
    assert missed == [None]
    assert due.tick() == 2


def test_without_a_gate_everything_is_allowed_and_with_a_closed_one_nothing(compactor: Manager) -> None:
    assert Scheduler(SchedulerConfig(compactor, ("hourly",))).trigger_now() == 1
    gated = Scheduler(SchedulerConfig(compactor, ("hourly",), cluster_gate=Gate(False)))
    gated.start()
    assert not gated.is_running()
    for act in (gated.trigger_now, lambda: gated.trigger_now("db")):
        with pytest.raises(CompactionRoleGated, match="reader"):
            act()
    assert gated.status()["gated"]
    assert compactor.get_current_cycle_id() == 1


def test_it_starts_and_stops_as_often_as_wanted(compactor: Manager) -> None:
    for made in (
        Scheduler(SchedulerConfig(compactor, ("hourly",))),
        Scheduler(SchedulerConfig(compactor, ("hourly",), cluster_gate=Gate(True))),
    ):
        for _ in range(2):
            made.start()
            made.start()
            assert made.is_running()
            assert set(made.status()["next_runs"]) == {"hourly"}
            made.stop()
            made.stop()
            assert not made.is_running()
    off = Scheduler(SchedulerConfig(compactor, ("hourly",), enabled=False))
    off.start()
    assert not off.is_running()


def test_stopping_waits_for_the_cycle_that_runs(folder: Objects, tmp_path: Path) -> None:
    fill(folder)
    compactor = manager(folder, tmp_path)
    begun = threading.Event()

    def slowly() -> None:
        begun.set()
        time.sleep(0.3)

    compactor.set_on_compaction_complete(slowly)
    made = Scheduler(SchedulerConfig(compactor, ("hourly",), "* * * * *", clock=_Ahead()))
    made.start()
    assert begun.wait(30)
    made.stop()
    assert not compactor.is_cycle_running()
    assert compactor.total_jobs_completed == 1


class _Ahead(SystemClock):
    """A clock on which the next minute begins at once."""

    def __init__(self) -> None:
        self._looks = 0

    def now(self) -> datetime:
        self._looks += 1
        return MIDNIGHT + timedelta(minutes=2 if self._looks > 1 else 0)


def test_settings_make_a_scheduler_that_needs_no_database(folder: Objects, tmp_path: Path) -> None:
    fill(folder, files=10)
    chosen = load(
        {
            "MODAK_HOME": str(tmp_path / "home"),
            "MODAK_MEASUREMENTS_ROOT": folder.root,
            "MODAK_MEASUREMENTS_GRACE_SECONDS": "0",
            "MODAK_MEASUREMENTS_DAILY_ENABLED": "false",
            "MODAK_MEASUREMENTS_ISOLATION": "process",
        }
    )
    made = open_manager(chosen, open_state(chosen), runner_of(chosen))
    schedules = schedules_of(chosen)
    assert schedules == {"hourly": "5 * * * *"}
    scheduling = Scheduler(SchedulerConfig(made, tuple(schedules), schedules=schedules))
    scheduling.start()
    try:
        assert scheduling.trigger_now() == 1
        assert scheduling.status()["running"]
    finally:
        scheduling.stop()
    assert made.stats()["total_files_compacted"] == 10
    assert len(data_files(folder)) == 1
