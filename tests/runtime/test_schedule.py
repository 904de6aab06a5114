"""What comes next: in turn, never two of one table, failures wait alone, still tables cost nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.catalog.fleet import Glance
from modak.core.clock import SystemClock
from modak.core.errors import ModakError, NotLeader
from modak.core.names import TableName
from modak.runtime.crew import Crew
from modak.runtime.schedule import LONGEST_BACKOFF_SECONDS, REST_SECONDS, Item, Kind, Schedule


def seen(table_id: int, **more: object) -> Glance:
    table = Glance(
        table_id=table_id,
        name=TableName("public", f"t{table_id}"),
        mode="tiered",
        has_lines=True,
        has_retention=False,
        has_delta=False,
        paused=False,
        can_rest=True,
        mark="a",
        metadata_location="m1",
        published="m1",
    )
    return replace(table, **more)  # type: ignore[arg-type]


def due(schedule: Schedule, now: float = 0.0) -> list[tuple[int, Kind]]:
    """Everything that is handed out, each item ending at once as one that changed something."""
    found = []
    while (item := schedule.take(now)) is not None:
        found.append((item.table_id, item.kind))
        schedule.ended(item, now, rests=False)
    return found


def test_kinds_come_in_the_order_of_a_pass_and_only_where_they_are_due() -> None:
    schedule = Schedule()
    everything = seen(1, has_delta=True, has_retention=True, published=None)
    schedule.offer([everything], 0.0, publishing=True)
    assert due(schedule) == [(1, Kind.TIER), (1, Kind.FOLD), (1, Kind.RETAIN), (1, Kind.PUBLISH)]
    schedule.offer([seen(1), seen(2, mode="mirrored", has_delta=True), seen(3, has_lines=False)], 0.0)
    assert due(schedule) == [(1, Kind.TIER)]


def test_a_table_that_is_held_back_gets_nothing() -> None:
    schedule = Schedule()
    schedule.offer([seen(1, paused=True, has_delta=True, published=None)], 0.0, publishing=True)
    assert due(schedule) == []


def test_a_still_table_is_passed_over_until_its_mark_changes_or_an_hour_has_gone() -> None:
    schedule = Schedule()
    schedule.offer([seen(1)], 0.0)
    item = schedule.take(0.0)
    assert item is not None
    schedule.ended(item, 0.0, rests=True)
    for offered, now, wanted in (
        (seen(1), 10.0, []),
        (seen(1, mark="b"), 10.0, [(1, Kind.TIER)]),
        (seen(1), REST_SECONDS, [(1, Kind.TIER)]),
        (seen(1, can_rest=False), 10.0, [(1, Kind.TIER)]),
    ):
        again = replace_rested(schedule)
        again.offer([offered], now)
        assert due(again, now) == wanted


def replace_rested(schedule: Schedule) -> Schedule:
    other = Schedule()
    other._rested = dict(schedule._rested)
    return other


def test_the_table_that_has_waited_longest_comes_first() -> None:
    schedule = Schedule()
    served: list[int] = []
    for round_ in range(6):
        schedule.offer([seen(n, mark=str(round_)) for n in (1, 2, 3)], float(round_))
        item = schedule.take(float(round_))
        assert item is not None
        served.append(item.table_id)
        schedule.ended(item, float(round_), rests=True)
    assert served == [1, 2, 3, 1, 2, 3]


def test_two_items_of_one_table_never_run_together() -> None:
    schedule = Schedule()
    schedule.offer([seen(1, has_delta=True), seen(2, has_delta=True)], 0.0)
    first, second = schedule.take(0.0), schedule.take(0.0)
    assert first is not None
    assert second is not None
    assert {first.table_id, second.table_id} == {1, 2}
    assert schedule.take(0.0) is None
    schedule.ended(first, 0.0, rests=False)
    third = schedule.take(0.0)
    assert third is not None
    assert (third.table_id, third.kind) == (first.table_id, Kind.FOLD)


def test_a_fleet_that_takes_longer_than_the_interval_gets_every_kind_of_work_done() -> None:
    schedule, tables, interval = Schedule(), 300, 10
    everything = [seen(n, has_delta=True, has_retention=True, published=None) for n in range(tables)]
    done: dict[int, list[Kind]] = {n: [] for n in range(tables)}
    for now in range(5 * tables):
        if now % interval == 0:
            # A second for each piece of work: a whole sweep is thirty times as long as the interval.
            schedule.offer(everything, float(now), publishing=True)
        item = schedule.take(float(now))
        assert item is not None
        done[item.table_id].append(item.kind)
        schedule.ended(item, float(now), rests=False)
    assert all(kinds == [*Kind, Kind.TIER] for kinds in done.values())


def test_a_round_that_has_time_for_everything_keeps_the_order_of_a_pass_whatever_was_due_before() -> None:
    schedule = Schedule()
    for now in range(3):
        schedule.offer([seen(1)], float(now))
        assert due(schedule, float(now)) == [(1, Kind.TIER)]
    schedule.offer([seen(1, has_delta=True, published=None)], 3.0, publishing=True)
    assert due(schedule, 3.0) == [(1, Kind.TIER), (1, Kind.FOLD), (1, Kind.PUBLISH)]


def test_a_kind_that_waits_after_a_failure_does_not_hold_up_the_others_of_a_busy_table() -> None:
    schedule, found = Schedule(backoff_seconds=3.0), []
    for now in range(9):
        schedule.offer([seen(1, has_delta=True, published=None)], float(now), publishing=True)
        item = schedule.take(float(now))
        assert item is not None
        found.append(item.kind)
        if item.kind is Kind.FOLD:
            schedule.failed(item, float(now), "a.code")
        else:
            schedule.ended(item, float(now), rests=False)
    tier, fold, publish = Kind.TIER, Kind.FOLD, Kind.PUBLISH
    assert found == [tier, fold, publish, tier, fold, publish, tier, publish, tier]


def test_more_work_runs_and_fails_than_is_shown() -> None:
    schedule = Schedule()
    schedule.offer([seen(n) for n in range(120)], 0.0)
    for _ in range(60):
        item = schedule.take(0.0)
        assert item is not None
        schedule.failed(item, 0.0, "a.code")
    for _ in range(60):
        assert schedule.take(0.0) is not None
    shown = schedule.shown(0.0)
    assert (len(shown["running"]), len(shown["failing"])) == (50, 50)
    assert shown["counts"] == {"running": 60, "failing": 60}


def test_one_that_fails_backs_off_alone_longer_each_time_and_its_other_work_goes_on() -> None:
    schedule = Schedule(backoff_seconds=10.0)
    pauses = []
    now = 0.0
    for _ in range(8):
        schedule.offer([seen(1, has_delta=True), seen(2, mark=str(now))], now)
        found = []
        while (item := schedule.take(now)) is not None:
            found.append((item.table_id, item.kind))
            if (item.table_id, item.kind) == (1, Kind.TIER):
                pauses.append(schedule.failed(item, now, "a.code"))
            else:
                schedule.ended(item, now, rests=True)
        assert (1, Kind.FOLD) in found
        assert (2, Kind.TIER) in found
        schedule.offer([seen(1)], now + 0.1)
        assert schedule.take(now + 0.1) is None
        now = schedule.failures[1, Kind.TIER].until
    assert pauses == [10.0, 20.0, 40.0, 80.0, 160.0, *([LONGEST_BACKOFF_SECONDS] * 3)]
    item = schedule.take(now)
    assert item is not None
    schedule.ended(item, now, rests=True)
    assert schedule.failures == {}


def test_a_table_that_is_gone_is_forgotten() -> None:
    schedule = Schedule()
    schedule.offer([seen(1)], 0.0)
    item = schedule.take(0.0)
    assert item is not None
    schedule.failed(item, 0.0, "a.code")
    schedule.offer([seen(2)], 0.0)
    assert schedule.failures == {}
    assert schedule.shown(0.0)["tables"] == 1


@given(st.lists(st.sampled_from(["take", "end", "fail", "offer"]), max_size=60), st.integers(1, 5))
def test_whatever_happens_no_table_runs_twice_at_once_and_none_starves(steps: list[str], tables: int) -> None:
    schedule = Schedule(backoff_seconds=1.0)
    running: list[Item] = []
    now = 0.0
    for step in [*steps, "offer"]:
        now += 0.5
        if step == "offer":
            schedule.offer([seen(n, mark=str(now)) for n in range(tables)], now)
        elif step == "take" and (item := schedule.take(now)) is not None:
            running.append(item)
        elif running and step in ("end", "fail"):
            item = running.pop(0)
            if step == "end":
                schedule.ended(item, now, rests=False)
            else:
                schedule.failed(item, now, "a.code")
        assert max(Counter(item.table_id for item in running).values(), default=0) <= 1
        assert {item.table_id for item in running} == set(schedule.running)
    now += LONGEST_BACKOFF_SECONDS
    for item in running:
        schedule.ended(item, now, rests=False)
    schedule.offer([seen(n, mark=str(now)) for n in range(tables)], now)
    assert {table for table, _ in due(schedule, now)} == set(range(tables))


class Hands:
    """Work that takes until it is let go, and remembers how much of it ran at once."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def __call__(self, item: Item) -> bool:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.01)
        with self._lock:
            self._now -= 1
            self.done.append(item.table_id)
        if item.table_id == 3:
            raise ModakError("a.code", "It failed.")
        if item.table_id == 4:
            raise ValueError("It crashed.")
        return True


def test_a_crew_does_everything_with_so_many_hands_and_survives_what_fails() -> None:
    hands, schedule = Hands(), Schedule()
    codes: dict[int, str] = {}
    with Crew(
        schedule, hands, SystemClock(), 2, lambda item, _seconds, code: codes.update({item.table_id: code})
    ) as crew:
        crew.offer([seen(n) for n in range(12)])
        while not crew.drained(1.0):
            continue
        crew.check()
    assert sorted(hands.done) == list(range(12))
    assert hands.most == 2
    assert {n: code for n, code in codes.items() if code} == {3: "a.code", 4: "daemon.crashed"}
    assert {table for table, _ in schedule.failures} == {3, 4}


@pytest.mark.parametrize(
    "ending", [NotLeader("lease.lost", "Lost."), ModakError("spark.gateway_lost", "Gone.", retryable=True)]
)
def test_a_lost_lease_and_a_dead_jvm_end_the_crew(ending: ModakError) -> None:
    def act(_item: Item) -> bool:
        raise ending

    with Crew(Schedule(), act, SystemClock(), 2) as crew:
        crew.offer([seen(1), seen(2)])
        while not crew.drained(1.0):
            continue
        with pytest.raises(ModakError) as raised:
            crew.check()
    assert raised.value.code == ending.code


def test_leaving_does_not_wait_for_ever() -> None:
    begun, go = threading.Event(), threading.Event()

    def act(_item: Item) -> bool:
        begun.set()
        go.wait(30)
        return True

    crew = Crew(Schedule(), act, SystemClock(), 1)
    with crew:
        crew.offer([seen(1)])
        assert begun.wait(30)
        crew.leave(0.05)
    go.set()
