"""Random lives of a table: whatever happens to its rows and to the worker, a seam read shows exactly the model.

Each life is drawn from a seed, which is part of the test's name: the same seed lives the same life again. Users write,
correct, move and delete rows by every way there is; the worker tiers, folds and expires, and crashes at any point that
it reaches; readers hold snapshots across all of it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import modak
from modak.core import faults
from modak.core.faults import InjectedFault
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables import amend
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.repair import repair
from modak.tables.retention.run import retain
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.invariants import Invariants

pytestmark = pytest.mark.spark

STEPS = 32
WIDTH = 100
RETENTION = 350
EVERYDAY = (943397,)
"""The gate lives the same life each time; whoever looks for new ones adds seeds here or to the sweep."""
SWEEP = range(1, 21)

Row = tuple[int, int, str]


class Life:
    """A table, the process that works on it, its readers, and what ought to be in it."""

    def __init__(self, settings: Any, warehouse: str, seed: int) -> None:
        self.settings = settings
        self.random = random.Random(seed)
        self.stack = contextlib.ExitStack()
        self.model: dict[tuple[int, int], str] = {}
        self.readers: list[tuple[contextlib.ExitStack, Any, set[Row]]] = []
        self.front = 300
        self.last_id = 1000
        self.told: list[str] = []
        self._open()
        self.events = Events.create(self.site)
        self.model = {(i, i): f"row {i}" for i in range(251)}
        register(self.site, RegisterRequest(self.events.name, ("id",), "ts", lake_retention=str(RETENTION)))
        self.truth = Invariants(self.site.dsn, warehouse)

    def _open(self) -> None:
        self.site: Site = self.stack.enter_context(open_site(self.settings))
        _ = self.site.spark
        self.leader: Leader = self.stack.enter_context(Leader.campaign(self.site, 5))

    def restart(self) -> None:
        self.stack.close()
        self._open()
        self.events.site = self.site
        repair(self.site, self.leader.epoch)

    def close(self) -> None:
        for stack, _, _ in self.readers:
            stack.close()
        self.stack.close()

    # What users do.

    def insert_hot(self) -> None:
        self._insert(self.random.randrange(self._cut_line(), self.front))

    def insert_history(self) -> None:
        low, high = self._floor(), self._cut_line()
        if low < high:
            self._insert(self.random.randrange(low, high))

    def grow(self) -> None:
        self.events.add_partition(self.front)
        self.front += WIDTH
        self._insert(self.front - 1)

    def upsert(self) -> None:
        at = self._some() or self._new(self.random.randrange(self._floor(), self.front))
        if self.random.random() < 0.3:
            at = self._new(self.random.randrange(self._floor(), self.front))
        body = self._body()
        image = f'{{"id": {at[0]}, "ts": {at[1]}, "body": "{body}"}}'
        self.events.sql(f"SELECT modak_upsert('public.events', '{image}')")
        self.model[at] = body

    def delete(self) -> None:
        at = self._some()
        if at:
            self.events.sql(f"SELECT modak_delete('public.events', '{at[0]}', {at[1]})")
            del self.model[at]

    def update_from_python(self) -> None:
        at = self._some()
        if at:
            body = self._body()
            amend.update(self.site, self.events.name, {"id": at[0], "ts": at[1]}, {"body": body})
            self.model[at] = body

    def update_plainly(self) -> None:
        at, body = self._some(), self._body()
        if at and self._in_heap(at):
            self.events.sql(f"UPDATE public.events SET body = '{body}' WHERE id = {at[0]} AND ts = {at[1]}")
            self.model[at] = body

    def delete_plainly(self) -> None:
        at = self._some()
        if at and self._in_heap(at):
            self.events.sql(f"DELETE FROM public.events WHERE id = {at[0]} AND ts = {at[1]}")
            del self.model[at]

    def move(self) -> None:
        at = self._some()
        to = self.random.randrange(self._floor(), self.front)
        if at and self._in_heap(at) and (at[0], to) not in self.model:
            self.events.sql(f"UPDATE public.events SET ts = {to} WHERE id = {at[0]} AND ts = {at[1]}")
            self.model[at[0], to] = self.model.pop(at)

    # What readers do.

    def begin_reading(self) -> None:
        if len(self.readers) < 2:
            stack = contextlib.ExitStack()
            at = stack.enter_context(modak.snapshot(self.site.spark, ["public.events"], settings=self.settings))
            self.readers.append((stack, at, self._rows()))

    def end_reading(self) -> None:
        if self.readers:
            stack, at, expected = self.readers.pop(self.random.randrange(len(self.readers)))
            assert self._read(at) == expected
            stack.close()

    # What the worker does.

    def work(self) -> None:
        act: Callable[..., Any] = self.random.choice([tier, tier, fold, fold, retain])
        self.told.append(act.__name__)
        if self.random.random() < 0.5:
            self._crash_in(act)
        act(self.site, self.leader.epoch, self.events.name)
        line = self.site.reader.state(self.events.name).cutline.retention_line
        if line is not None:
            self.model = {at: body for at, body in self.model.items() if at[1] >= line}

    def _crash_in(self, act: Callable[..., Any]) -> None:
        left = self.random.randrange(60)

        def strike(point: str) -> None:
            nonlocal left
            # The lease renews itself by the clock, in a thread of its own.
            if point.startswith("lease."):
                return
            left -= 1
            if left == 0:
                self.told.append(f"crash at {point}")
                raise InjectedFault(point)

        faults.watch(strike)
        try:
            act(self.site, self.leader.epoch, self.events.name)
        except InjectedFault:
            faults.watch(None)
            self.restart()
        finally:
            faults.watch(None)

    def check(self) -> None:
        with modak.snapshot(self.site.spark, ["public.events"], settings=self.settings) as at:
            assert self._read(at) == self._rows(), self.told

    def _read(self, at: Any) -> set[Row]:
        rows = [tuple(row) for row in at.read("public.events").collect()]
        assert len(rows) == len(set(rows)), "a row is there twice"
        return set(rows)

    def _rows(self) -> set[Row]:
        return {(at[0], at[1], body) for at, body in self.model.items()}

    def _insert(self, ts: int) -> None:
        at, body = self._new(ts), self._body()
        self.events.sql(f"INSERT INTO public.events VALUES ({at[0]}, {at[1]}, '{body}')")
        self.model[at] = body

    def _in_heap(self, at: tuple[int, int]) -> bool:
        return bool(self.events.sql(f"SELECT 1 FROM public.events WHERE id = {at[0]} AND ts = {at[1]}"))

    def _some(self) -> tuple[int, int] | None:
        return self.random.choice(sorted(self.model)) if self.model else None

    def _new(self, ts: int) -> tuple[int, int]:
        self.last_id += 1
        return self.last_id, ts

    def _body(self) -> str:
        return f"text {self.random.randrange(10**9)}"

    def _cut_line(self) -> int:
        t = self.site.reader.state(self.events.name).cutline.t
        assert t is not None
        return t

    def _floor(self) -> int:
        line = self.site.reader.state(self.events.name).cutline.retention_line
        return max(0, line or 0)


ACTS: tuple[tuple[Callable[[Life], None], int], ...] = (
    (Life.insert_hot, 2),
    (Life.insert_history, 3),
    (Life.grow, 3),
    (Life.upsert, 6),
    (Life.delete, 4),
    (Life.update_from_python, 2),
    (Life.update_plainly, 3),
    (Life.delete_plainly, 2),
    (Life.move, 3),
    (Life.begin_reading, 2),
    (Life.end_reading, 2),
    (Life.work, 12),
)


@pytest.fixture
def begin(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Callable[[int], Life]]:
    lives: list[Life] = []

    def started(seed: int) -> Life:
        lives.append(Life(settings_for(fresh_database, warehouse, spark_home), warehouse, seed))
        return lives[-1]

    yield started
    for life in lives:
        life.close()


@pytest.mark.parametrize("seed", EVERYDAY)
def test_a_random_life_reads_as_its_model(begin: Callable[[int], Life], seed: int) -> None:
    _live(begin(seed), STEPS)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SWEEP)
def test_many_random_lives_read_as_their_models(begin: Callable[[int], Life], seed: int) -> None:
    _live(begin(seed), 3 * STEPS)


def _live(life: Life, steps: int) -> None:
    acts, weights = zip(*ACTS, strict=True)
    for step in range(steps):
        (act,) = life.random.choices(acts, weights)
        life.told.append(act.__name__)
        act(life)
        if step % 8 == 7:
            life.check()
    while life.readers:
        life.end_reading()
    for act in (tier, fold, retain, tier):
        act(life.site, life.leader.epoch, life.events.name)
    line = life._floor()
    life.model = {at: body for at, body in life.model.items() if at[1] >= line}
    life.check()
