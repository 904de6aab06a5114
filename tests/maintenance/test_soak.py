"""Tiering, folds, the pump, forced passes and pinned readers at once, for a while, by a seed that can be replayed."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from modak.catalog import pins
from modak.core.errors import Conflict, ModakError
from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.runtime.maintaining import answer
from modak.tables.fold.run import fold
from modak.tables.load.adopt import adopt
from modak.tables.maintenance import requests
from modak.tables.mirror.cycle import mirror_cycle
from modak.tables.mirror.pump.run import Pump
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.maintenance.lake import Lake
from tests.mirror.pumping import Mirrored
from tests.tables import readers
from tests.tables.corrections import Corrections
from tests.tables.events import Events
from tests.tables.invariants import Row

PASSING = frozenset({"postgres.busy", "catalog.requirement", "lake.changed_underneath", "maintenance.overtaken"})
"""Errors that only mean: somebody else was faster, next time."""


@dataclass
class Soak:
    """Threads that live together until the time is up, and the table as it must be in the end."""

    lake: Lake
    seed: int
    until: float
    rows: dict[tuple[int, int], str] = field(default_factory=dict)
    loaded: set[int] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)

    def thread(self, name: str, act: Callable[[random.Random], None]) -> threading.Thread:
        chance = random.Random(f"{self.seed} {name}")

        def loop() -> None:
            while time.monotonic() < self.until and not self.troubles:
                try:
                    act(chance)
                    self.done[name] = self.done.get(name, 0) + 1
                except ModakError as error:
                    if error.code not in PASSING:
                        self.troubles.append(f"{name}: {error.code} {error.message}")
                except Exception:
                    self.troubles.append(f"{name}: {traceback.format_exc()}")

        return threading.Thread(target=loop, name=name)

    def write(self, chance: random.Random) -> None:
        """A few changes of cold rows, now and then a new partition."""
        cold = Corrections(self.lake.events)
        for _ in range(chance.randint(1, 6)):
            key = chance.choice([key for key in self.rows if key[1] < 200])
            if chance.random() < 0.3:
                cold.delete(*key)
                del self.rows[key]
            else:
                text = f"change {chance.random():.6f}"
                cold.upsert(*key, text)
                self.rows[key] = text
            new = (chance.randint(20_000, 10**9), chance.randrange(200))
            cold.upsert(*new, "new")
            self.rows[new] = "new"
        if chance.random() < 0.05:
            at = 300 + 100 * self.done.get("partitions", 0)
            self.done["partitions"] = self.done.get("partitions", 0) + 1
            self.lake.events.add_partition(at)
            self.lake.events.sql(f"INSERT INTO public.events VALUES ({at}, {at}, 'hot')")
            self.rows[at, at] = "hot"
        time.sleep(chance.random() * 0.2)

    def work(self, _: random.Random) -> None:
        site, epoch, name = self.lake.site, self.lake.leader.epoch, self.lake.events.name
        tier(site, epoch, name)
        adopt(site, epoch, name)
        fold(site, epoch, name)

    def load(self, chance: random.Random) -> None:
        """A batch of cold rows that waits to be adopted."""
        keys = chance.sample(range(200), 3)
        assert self.lake.stage(f"batch {self.done.get('loads', 0)}", *keys)
        self.loaded.update(keys)
        time.sleep(chance.random() * 0.5)

    def force(self, chance: random.Random) -> None:
        requests.file_request(self.lake.site, self.lake.events.name)
        claimed = requests.claim(self.lake.site.writer(self.lake.leader.epoch))
        if claimed is not None:
            report = answer(self.lake.site, self.lake.leader, claimed, engine=self.lake.engine)
            if report is not None:
                bad = [one for one in report.failed if not any(code in (one.error or "") for code in PASSING)]
                self.troubles += [f"{one.name}: {one.error}" for one in bad]
        time.sleep(chance.random() * 0.3)

    def read(self, chance: random.Random) -> None:
        """What a pin names stays readable and the same for as long as it is held."""
        pin = pins.begin(self.lake.site.dsn, self.lake.events.name)
        first = readers.static_rows(pin.metadata_location, pin.snapshot_id)
        time.sleep(chance.random() * 3)
        assert readers.static_rows(pin.metadata_location, pin.snapshot_id) == first
        with self.lake.site.connect() as conn:
            assert pins.end(conn, pin.pin_id)


@dataclass
class Followed(Soak):
    """The same over a mirrored table: its heap is written to, and the pump follows."""

    def write(self, chance: random.Random) -> None:
        """A few small transactions, now and then a larger one."""
        low = chance.randrange(400)
        high = low + (200 if chance.random() < 0.05 else 5)
        statement = chance.choice(
            (
                "INSERT INTO public.things SELECT i, i, 'new' FROM generate_series({}, {}) i ON CONFLICT DO NOTHING",
                "UPDATE public.things SET body = md5(random()::text) WHERE id BETWEEN {} AND {}",
                "UPDATE public.things SET ts = ts + 100 WHERE id BETWEEN {} AND {}",
                "DELETE FROM public.things WHERE id BETWEEN {} AND {}",
            )
        )
        self.lake.events.sql(statement.format(low, high))
        time.sleep(chance.random() * 0.1)

    def work(self, _: random.Random) -> None:
        site, epoch = self.lake.site, self.lake.leader.epoch
        with Pump(site, epoch, site.reader.state(self.lake.events.name).table.table_id) as pump:
            for _turn in range(5):
                # As the daemon does it: a race that was lost is run again from what is there now.
                with suppress(Conflict):
                    pump.turn()
        mirror_cycle(site, epoch, self.lake.events.name)


def soaks(seconds: int, quick: int) -> pytest.MarkDecorator:
    """For long by every engine, and for a moment by the one that needs no session."""
    long = [pytest.mark.full, pytest.mark.timeout(900)]
    return pytest.mark.parametrize(
        ("engine", "seconds"),
        [
            pytest.param("embedded", seconds, marks=long),
            pytest.param("spark", seconds, marks=[pytest.mark.spark, *long]),
            ("embedded", quick),
        ],
    )


@soaks(120, quick=8)
def test_a_mirror_is_followed_and_looked_after_at_once(
    site: Site, leader: Leader, engine: str, seconds: int, request: pytest.FixtureRequest
) -> None:
    seed = int(request.config.getoption("randomly_seed", 0))
    print(f"replay with --randomly-seed={seed}")
    mirrored = Mirrored.create(
        site,
        leader.epoch,
        rows="SELECT i, i, 'row ' || i FROM generate_series(0, 399) i",
        partition_width="100",
    )
    lake = Lake(Events(site, TableName("public", "things")), leader, engine)
    soak = Followed(lake, seed, time.monotonic() + seconds)
    _together(soak)
    soak.work(random.Random(0))
    _nothing_is_left(lake)
    assert mirrored.is_same()


@soaks(180, quick=12)
def test_everything_at_once_loses_nothing_and_revives_nothing(
    lake: Lake, engine: str, seconds: int, request: pytest.FixtureRequest
) -> None:
    seed = int(request.config.getoption("randomly_seed", 0))
    print(f"replay with --randomly-seed={seed}")
    lake.engine = engine
    soak = Soak(lake, seed, time.monotonic() + seconds, {(i, i): f"row {i}" for i in range(251)})
    _together(soak, soak.thread("loads", soak.load))
    assert soak.done["loads"] > 0
    soak.work(random.Random(0))
    _nothing_is_left(lake)
    events = lake.events
    expected: set[Row] = {(*key, body) for key, body in soak.rows.items()}
    expected |= {(10_000 + key, key, "loaded") for key in soak.loaded}
    assert events.everything() == expected


def _together(soak: Soak, *more: threading.Thread) -> None:
    """Everything at once, until the time is up."""
    lake = soak.lake
    lake.policy(
        rewrite_min_input_files=2,
        manifest_rewrite_min_manifests=4,
        snapshot_retention_hours=0,
        snapshot_min_retained=1,
        orphan_sweep_enabled=True,
    )
    threads = [
        soak.thread("writer", soak.write),
        soak.thread("tables", soak.work),
        soak.thread("maintenance", soak.force),
        soak.thread("reader", soak.read),
        soak.thread("another reader", soak.read),
        *more,
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert soak.troubles == []
    print(soak.done)
    assert soak.done["tables"] > 0
    assert soak.done["maintenance"] > 0
    assert soak.done["reader"] > 0
    repair(lake.site, lake.leader.epoch)


def _nothing_is_left(lake: Lake) -> None:
    """Two passes later there is one snapshot, no debt, no tag, and no file that nothing reaches."""
    lake.maintain()
    lake.maintain()
    assert not [file for file in lake.files() if file.deletes]
    assert lake.table.tags == {}
    assert lake.table.snapshot_count == 1
    there = {entry.uri for entry in lake.site.store.list(f"{lake.table.location}/data")}
    assert there == set(lake.site.lake.reachable(lake.table.identifier))
    assert lake.site.reader.unfinished_ops() == ()
