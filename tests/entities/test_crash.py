"""A crash at every point of every flow, by exception: whoever comes next loses nothing and doubles nothing.

One store lives through all crashes, with new changes each time. The everyday run takes a sample of the points, drawn by
`--randomly-seed`; the full run takes all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.entities.compaction import compact
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.reconciling import reconcile
from modak.entities.tables import install
from tests.entities.world import SCHEMA, World

COMMON = {
    "entities.locked",
    "entities.before_upload",
    "entities.uploaded",
    "entities.before_copy",
    "entities.copied",
    "entities.tmp_deleted",
    "manifest.before_save",
    "manifest.saved",
}
IN_A_FLUSH = COMMON | {
    "entities.share_started",
    "entities.share_written",
    "flush.snapshot_taken",
    "flush.before_export",
    "flush.after_export",
    "flush.before_quarantine",
    "flush.quarantined",
    "flush.before_publish",
    "flush.published",
    "flush.before_mark",
    "flush.marked",
}
IN_AN_INIT = COMMON | {
    "entities.share_started",
    "entities.share_written",
    "init.snapshot_taken",
    "init.before_export",
    "init.after_export",
    "init.before_quarantine",
    "init.quarantined",
    "init.before_publish",
    "init.published",
    "init.before_mark",
    "init.marked",
}
IN_A_COMPACTION = COMMON | {
    "compaction.before_rewrite",
    "compaction.share_started",
    "compaction.share_written",
    "compaction.rewritten",
    "compaction.before_publish",
    "compaction.published",
}
IN_A_REPAIR = {
    "entities.locked",
    "manifest.before_save",
    "manifest.saved",
    "reconcile.before_dirty",
    "reconcile.made_dirty",
    "reconcile.before_drop",
    "reconcile.dropped",
    "gc.before_notice",
    "gc.noticed",
}
IN_A_COLLECTION = {
    "entities.locked",
    "manifest.before_save",
    "manifest.saved",
    "gc.before_notice",
    "gc.noticed",
    "gc.before_delete",
    "gc.deleted",
    "gc.forgotten",
}
IN_A_READ = {"read.manifest_read", "read.rows_read"}
IN_AN_INSTALL = {"install.before", "install.after"}
VISITED = IN_A_FLUSH | IN_AN_INIT | IN_A_COMPACTION | IN_A_REPAIR | IN_A_COLLECTION | IN_A_READ | IN_AN_INSTALL


@dataclass
class Life:
    """A store with all it can have, and what must be read from it."""

    world: World
    rows: dict[int, str] = field(default_factory=dict)
    turn: int = 0

    def change(self) -> None:
        """Every turn updates, adds, deletes and brings back other rows, and one whose value does not fit."""
        self.turn += 1
        chance = random.Random(self.turn)
        for number in chance.sample(range(30), 6):
            if number in self.rows and chance.random() < 0.4:
                self.world.delete(number)
                del self.rows[number]
            else:
                self.rows[number] = f"turn {self.turn}"
                self.world.put(number, title=self.rows[number], tags=["t"] * chance.randrange(3))
        self.rows[100] = f"odd {self.turn}"
        self.world.put(100, title=self.rows[100], qty=70_000 + self.turn)

    def check(self) -> None:
        assert self.world.titles() == self.rows
        self.world.check_objects()

    def crash(self, act: Callable[[], object], fault: Fault) -> None:
        """Be struck, look, do it again, look again."""
        faults.arm(fault)
        with pytest.raises(InjectedFault):
            act()
        faults.arm(None)
        self.check()
        act()
        self.check()


@pytest.fixture
def life(world: World) -> Life:
    living = Life(world)
    living.change()
    flush(world.store)
    return living


@pytest.fixture(params=["sample", pytest.param("all", marks=pytest.mark.full)])
def chosen(request: pytest.FixtureRequest) -> Callable[[set[str]], list[str]]:
    """Which of some points are struck in this run."""
    chance = random.Random(int(request.config.getoption("randomly_seed", 0)))

    def choose(points: set[str]) -> list[str]:
        return sorted(points) if request.param == "all" else chance.sample(sorted(points), min(3, len(points)))

    return choose


Choose = Callable[[set[str]], list[str]]


def passed(act: Callable[[], object]) -> set[str]:
    """The points that an act comes by; those of the storage have tests of their own."""
    seen: set[str] = set()
    faults.watch(seen.add)
    act()
    faults.watch(None)
    return {point for point in seen if not point.startswith("objects.")}


def test_a_crash_in_a_flush_loses_and_doubles_nothing(life: Life, chosen: Choose) -> None:
    life.change()
    assert passed(lambda: flush(life.world.store)) == IN_A_FLUSH
    for point in chosen(IN_A_FLUSH):
        print(point)
        life.change()
        life.crash(lambda: flush(life.world.store), Fault(point))
        assert life.world.dirty() == 1


def test_a_crash_in_an_init_leaves_the_old_store_or_the_new_one(life: Life, chosen: Choose) -> None:
    def act() -> None:
        init(life.world.store, SCHEMA, replace_delta=True)

    assert passed(act) == IN_AN_INIT
    for point in chosen(IN_AN_INIT):
        print(point)
        life.change()
        life.crash(act, Fault(point))
        assert life.world.manifest.delta == ()


def test_a_crash_in_a_compaction_loses_and_doubles_nothing(life: Life, chosen: Choose) -> None:
    def act() -> None:
        compact(life.world.store)

    assert passed(act) == IN_A_COMPACTION
    for point in chosen(IN_A_COMPACTION):
        print(point)
        for _ in range(3):
            life.change()
            flush(life.world.store)
        life.crash(act, Fault(point))
        assert life.world.manifest.delta == ()


def harm(life: Life) -> None:
    """A stray file, a lost one and a temporary one."""
    world = life.world
    for _ in range(2):
        life.change()
        flush(world.store)
    listed = [entry.path for entry in world.manifest.delta]
    stray = f"entities/delta/{SCHEMA}/stray-{life.turn}.parquet"
    world.objects.put(stray, world.objects.get(listed[-1]).data)
    world.objects.put(f"entities/delta/{SCHEMA}/_tmp/left-{life.turn}.parquet", b"half")
    world.objects.delete([listed[-2]])


def test_a_crash_in_a_repair_or_collection_deletes_nothing_that_lives(life: Life, chosen: Choose) -> None:
    world = life.world

    def repair() -> None:
        reconcile(world.store, SCHEMA, repair=True)

    def collect() -> None:
        reconcile(world.store, SCHEMA, gc=True, grace_ms=0)

    harm(life)
    assert passed(repair) == IN_A_REPAIR
    life.check()
    world.objects.put(f"entities/delta/{SCHEMA}/_tmp/more.parquet", b"half")
    assert passed(collect) == IN_A_COLLECTION
    for point in chosen(IN_A_REPAIR):
        print(point)
        harm(life)
        faults.arm(Fault(point))
        with pytest.raises(InjectedFault):
            repair()
        faults.arm(None)
        repair()
        life.check()
        flush(world.store)
        life.check()
    for point in chosen(IN_A_COLLECTION):
        print(point)
        world.objects.put(f"entities/delta/{SCHEMA}/_tmp/{point}.parquet", b"half")
        life.crash(collect, Fault(point))
        assert set(world.paths()) == world.manifest.paths


def test_a_crash_in_a_read_or_an_install_costs_nothing(life: Life) -> None:
    world = life.world

    def again() -> None:
        with world.connect() as conn:
            install(conn, world.store.tables)

    assert passed(world.read) == IN_A_READ
    assert passed(again) == IN_AN_INSTALL
    for act, points in ((world.read, IN_A_READ), (again, IN_AN_INSTALL)):
        for point in sorted(points):
            life.crash(act, Fault(point))


@pytest.mark.spark
@pytest.mark.parametrize("struck", ["entities.share_started", "entities.uploaded", "compaction.share_written"])
def test_a_crash_in_a_spark_task_loses_nothing(spark: object, life: Life, struck: str) -> None:
    from modak.entities.store import Crew

    life.change()
    if struck.startswith("compaction"):
        flush(life.world.store)
    life.world.crew = Crew(lambda: spark, driver_rows=0)  # type: ignore[arg-type,return-value]
    act = compact if struck.startswith("compaction") else flush
    life.crash(lambda: act(life.world.store), Fault(struck))
    assert not [path for path in life.world.paths() if "_tmp" in path]
