"""Random lives of a store: whatever users, workers, crashes and clocks do, a read shows exactly the model.

Each life is drawn from a seed, which is part of the test's name: the same seed lives the same life again. One of
them is drawn anew by every run: it is its `--randomly-seed`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING

import pytest

import modak.entities
from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.errors import Conflict
from modak.core.faults import InjectedFault
from modak.entities.compaction import compact
from modak.entities.config import CompactionConfig
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.plan import GRACE_MS
from modak.entities.reconciling import reconcile
from modak.entities.verifying import verify
from tests.entities.world import SCHEMA, World, key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STEPS = 50
EVERYDAY_STEPS = 20
EVERYDAY = 11
FRAMED = 38
"""In this life a filter that ran before the newest version is found would show older ones."""
SWEEP = (29, *range(100, 115))
NUMBERS = range(25)


class Life:
    """A store, its users and workers, and what ought to be in it."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.model: dict[int, str] = {}
        self.written: set[str] = set()
        self.clock = FrozenClock(datetime.now(UTC))
        world.clock = self.clock
        world.configure(batch_size=5, max_batch_bytes=3 * 1024, target_file_size_mb=0)
        world.compaction = CompactionConfig(dirty_ratio_pct=30, max_parallel_files=3)
        self.told: list[str] = []

    # What users do.

    def write(self) -> None:
        for number in self.random.sample(NUMBERS, self.random.randint(1, 4)):
            self.model[number] = f"v{len(self.told)}.{number}"
            self.written.add(self.model[number])
            self.world.put(number, title=self.model[number], tags=["x"] * self.random.randrange(3), qty=number)

    def delete(self) -> None:
        for number in self.random.sample(sorted(self.model), min(len(self.model), 2)):
            (self.world.delete if self.random.random() < 0.6 else self.world.bury)(number)
            del self.model[number]

    def write_badly(self) -> None:
        number = self.random.choice(NUMBERS)
        self.model[number] = f"odd {len(self.told)}"
        self.written.add(self.model[number])
        self.world.put(number, title=self.model[number], qty=70_000)

    # What workers do.

    def flush(self) -> None:
        flush(self.world.store)

    def init(self) -> None:
        init(self.world.store, SCHEMA, replace_delta=True)

    def compact(self) -> None:
        compact(self.world.store)

    def collect(self) -> None:
        reconcile(self.world.store, SCHEMA, gc=True)

    def repair(self) -> None:
        reconcile(self.world.store, SCHEMA, repair=True)

    # What the world does.

    def jump(self) -> None:
        self.clock.at += timedelta(minutes=self.random.choice((-60, -1, 1, 20, 600)))
        self.world.sql(
            "UPDATE change_log SET changed_at = changed_at + %s WHERE flushed_at = 0",
            (self.random.choice((-3_600_000, 3_600_000)),),
        )

    def step(self) -> None:
        users = (self.write, self.write, self.write, self.delete, self.write_badly, self.jump)
        workers = (self.flush, self.flush, self.flush, self.compact, self.init, self.collect, self.repair)
        act = self.random.choice((*users, *workers))
        crashing = act in workers and self.random.random() < 0.4
        self.told.append(f"{act.__name__}{' and crash' if crashing else ''}")
        listed, removed = self.world.manifest.paths, {e.path: e.removed_at for e in self.world.manifest.removed}
        before = set(self.world.paths())
        if crashing:
            self._crash_in(act)
        else:
            act()
        self._check_deleted(act, before - set(self.world.paths()), listed, removed)

    def _crash_in(self, act: object) -> None:
        left = self.random.randrange(30)

        def strike(point: str) -> None:
            nonlocal left
            left -= 1
            if left < 0 and not point.startswith("objects."):
                raise InjectedFault(point)

        faults.watch(strike)
        try:
            act()  # type: ignore[operator]
        except InjectedFault as fault:
            self.told[-1] += f" at {fault}"
        finally:
            faults.watch(None)

    def _check_deleted(self, act: object, gone: set[str], listed: frozenset[str], removed: dict[str, int]) -> None:
        assert not gone & listed
        if act == self.collect:
            assert all(self.world.store.now_ms - removed[path] >= GRACE_MS for path in gone)

    def check(self) -> None:
        assert self.world.titles() == self.model
        self.world.check_objects()

    def check_frames(self, spark: SparkSession) -> None:
        """All rows, those that a condition keeps, and single ones, as users read them."""
        now = {key(number): title for number, title in self.model.items()}

        def seen(**asked: object) -> dict[str, str]:
            found = modak.entities.read(spark, self.world.store, SCHEMA, ["title"], **asked).collect()  # type: ignore[arg-type]
            rows = {row["row_id"]: row["title"] for row in found}
            assert len(rows) == len(found), "a row is there twice"
            return rows

        assert seen() == now
        # Every older version fits the condition, and few of the newest do.
        some = self.written - set(self.random.sample(sorted(now.values()), len(now) * 3 // 4))
        kept = {row_id: title for row_id, title in now.items() if title in some}
        assert seen(where=f"title in ({', '.join(map(repr, sorted(some | {'never'})))})") == kept
        single = [key(number) for number in self.random.sample(NUMBERS, 8)]
        assert seen(row_ids=single) == {row_id: now[row_id] for row_id in single if row_id in now}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the everyday seed and one that this run draws; all others only to the full run."""
    if "seed" in metafunc.fixturenames:
        drawn = int(metafunc.config.getoption("randomly_seed", 0))
        swept = [pytest.param(seed, marks=pytest.mark.full) for seed in SWEEP if seed != drawn]
        metafunc.parametrize("seed", [*{EVERYDAY: None, drawn: None}, *swept], ids=str)


def test_a_read_shows_the_model_whatever_happens(world: World, seed: int) -> None:
    life = Life(world, seed)
    print(f"the life is that of --randomly-seed={seed}")
    try:
        for _ in range(STEPS if seed in SWEEP else EVERYDAY_STEPS):
            life.step()
            life.check()
        life.flush()
        life.compact()
        life.check()
        assert verify(world.store, SCHEMA).sound
    except BaseException:
        print("\n".join(life.told))
        raise


@pytest.mark.spark
def test_a_frame_shows_the_model_whatever_happens(spark: SparkSession, world: World) -> None:
    life = Life(world, FRAMED)
    met = set()
    try:
        for _ in range(EVERYDAY_STEPS // 5):
            for _ in range(5):
                life.step()
            life.check_frames(spark)
            met.add((bool(world.manifest.base), bool(world.manifest.delta), world.dirty() > 0))
        assert (True, True, True) in met
    except BaseException:
        print("\n".join(life.told))
        raise


def test_writers_workers_of_every_kind_and_readers_at_once(world: World) -> None:
    world.configure(batch_size=20, max_batch_bytes=7 * 1024, max_retries=50, base_backoff_ms=5)
    world.many(0, 20)
    init(world.store, SCHEMA)
    stop = threading.Event()
    failures: list[BaseException] = []
    done: list[str] = []
    deadline = time.monotonic() + 90
    last: dict[int, dict[int, str | None]] = {0: {}, 1: {}}

    def guarded(act: object) -> threading.Thread:
        def run() -> None:
            try:
                act()  # type: ignore[operator]
            except BaseException as error:
                failures.append(error)
                stop.set()

        return threading.Thread(target=run)

    def write(lane: int) -> None:
        chance = random.Random(lane)
        for turn in count():
            # Whoever has to find the lock free comes late on a busy machine.
            if stop.is_set() or (turn >= 60 and len(set(done)) == 2) or time.monotonic() > deadline:
                return
            number = 2 * chance.randrange(20) + lane
            if chance.random() < 0.25:
                world.delete(number)
                last[lane][number] = None
            else:
                world.put(number, title=f"{lane} {turn}")
                last[lane][number] = f"{lane} {turn}"

    def loop(act: object) -> None:
        while not stop.is_set():
            reports = act(world.store)  # type: ignore[operator]
            errors = [report.error for report in reports if report.error is not None]
            assert not errors, errors
            if any(report.skipped for report in reports):
                stop.wait(0.05)

    def again(act: Callable[[], object]) -> None:
        # These do not skip a schema that somebody else works on: they say so.
        while not stop.is_set():
            try:
                act()
            except Conflict as conflict:
                if conflict.code != "entities.locked":
                    raise
                stop.wait(0.05)
            else:
                done.append(act.__name__)

    def begin_anew() -> None:
        init(world.store, SCHEMA, replace_delta=True)

    def collect() -> None:
        reconcile(world.store, SCHEMA, gc=True)

    def look() -> None:
        # A row that nobody touches is in every read, once.
        world.put(500, title="still")
        while not stop.is_set():
            assert world.titles()[500] == "still"

    writers = [guarded(lambda lane=lane: write(lane)) for lane in (0, 1)]
    workers = [guarded(lambda act=act: loop(act)) for act in (flush, flush, compact)] + [guarded(look)]
    workers += [guarded(lambda act=act: again(act)) for act in (begin_anew, collect)]
    for thread in (*writers, *workers):
        thread.start()
    for thread in writers:
        thread.join(120)
    stop.set()
    for thread in workers:
        thread.join(60)
    assert not failures, failures
    assert set(done) == {"begin_anew", "collect"}
    expected: dict[int, str | None] = {number: f"row {number}" for number in range(20)} | last[0] | last[1]
    kept = {number: title for number, title in expected.items() if title is not None} | {500: "still"}
    assert world.titles() == kept
    flush(world.store)
    compact(world.store)
    assert world.titles() == kept
    assert verify(world.store, SCHEMA).sound
