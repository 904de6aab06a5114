"""A crash at every point of a fold, by exception: the repair undoes or finishes it, and the next fold does the rest.

One table lives through all crashes, with new corrections each time. The everyday run takes a sample of the points,
drawn by `--randomly-seed` (printed when a test fails); the full run takes all of them, each time that a fold comes by.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from modak.catalog import pins
from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.tables.corrections import Corrections
from tests.tables.events import Events
from tests.tables.invariants import Invariants, Row
from tests.tables.readers import static_rows

pytestmark = pytest.mark.timeout(1800)

IN_TASKS = (
    "fold.share_started",
    "locate.before_keys",
    "fold.share_read",
    "locate.keys_written",
    "files.before_create",
    "files.created",
    "files.durable",
    "fold.share_written",
    "vectors.before_write",
    "vectors.durable",
)
"""Where a share is written or a file looked through: in the driver here, in Spark tasks when there is much to do."""
IN_A_FOLD = (
    "journal.before_begin",
    "journal.after_begin",
    "journal.before_phase",
    "journal.after_phase",
    "catalog.before_step",
    "catalog.after_step",
    "fold.snapshot_taken",
    "fold.before_write",
    "fold.after_write",
    "fold.before_locate",
    "fold.after_locate",
    "landing.before_prepare",
    "lake.prepare_started",
    "lake.manifests_written",
    "lake.metadata_written",
    "landing.prepared",
    "catalog.before_commit",
    "catalog.after_commit",
    "landing.committed",
    "tidy.before_delete",
    "storage.deleting",
    "storage.deleted",
    "tidy.after_delete",
    *IN_TASKS,
)
VISITED = set(IN_A_FOLD)
SAMPLE = 8


@dataclass
class Life:
    """A table with two partitions in the lake, and what a user must see in it."""

    site: Site
    leader: Leader
    events: Events
    truth: Invariants
    rows: dict[tuple[int, int], str]
    turns: int = 0

    def correct(self) -> None:
        """Every turn changes, moves, adds and deletes other rows."""
        cold = Corrections(self.events)
        self.turns += 1
        keys = sorted(key for key in self.rows if key[1] < 200)
        chosen = random.Random(self.turns).sample(keys, 4)
        for key in chosen[:2]:
            cold.upsert(*key, f"turn {self.turns}")
            self.rows[key] = f"turn {self.turns}"
        for key in chosen[2:]:
            cold.delete(*key)
            del self.rows[key]
        cold.delete(9_999, 9)
        moved = (chosen[2][0], 100 + self.turns % 100)
        cold.upsert(*moved, f"moved in turn {self.turns}")
        self.rows[moved] = f"moved in turn {self.turns}"

    def fold(self) -> int:
        return fold(self.site, self.leader.epoch, self.events.name).rows

    def passes(self) -> list[str]:
        """The points that a fold comes by, in order."""
        seen: list[str] = []
        self.correct()
        faults.watch(lambda point: None if point.startswith("lease.") else seen.append(point))
        self.fold()
        faults.watch(None)
        return seen

    def crash(self, fault: Fault) -> None:
        """Be struck in mid-fold, start again, fold what is left."""
        self.correct()
        faults.arm(fault)
        with pytest.raises(InjectedFault):
            self.fold()
        faults.arm(None)
        # Between crash and repair the delta still says what the lake does not.
        self.check_rows()
        repair(self.site, self.leader.epoch)
        self.check()
        self.fold()
        self.check()
        assert self.events.delta() == {}

    def check_rows(self) -> None:
        assert self.truth.everything() == {(*key, body) for key, body in self.rows.items()}

    def check(self) -> None:
        self.check_rows()
        self.truth.check_journal()
        self.truth.check_files()


@pytest.fixture
def life(site: Site, leader: Leader, events: Events, warehouse: str) -> Life:
    events.register()
    events.tier(leader)
    rows: dict[tuple[int, int], str] = {(i, i): f"row {i}" for i in range(251)}
    return Life(site, leader, events, Invariants(site.dsn, warehouse), rows)


def test_the_points_that_crash_here_are_those_that_a_fold_comes_by(life: Life) -> None:
    seen = set(life.passes())
    assert seen == VISITED
    life.check()


def test_a_crash_in_a_fold_is_made_good_by_the_next_start(life: Life, request: pytest.FixtureRequest) -> None:
    seed = int(request.config.getoption("randomly_seed", 0))
    print(f"the sample was drawn with --randomly-seed={seed}")
    for point in random.Random(seed).sample(IN_A_FOLD, SAMPLE):
        print(point)
        life.crash(Fault(point))


@pytest.mark.full
def test_a_crash_at_each_passage_of_a_fold_is_made_good(life: Life) -> None:
    come_by: Counter[str] = Counter()
    for point in life.passes():
        print(f"{point}, time {come_by[point] + 1}")
        life.crash(Fault(point, after=come_by[point]))
        come_by[point] += 1


@pytest.mark.spark
@pytest.mark.parametrize(
    "struck",
    [
        pytest.param("fold.before_locate", marks=pytest.mark.full),
        pytest.param("lake.manifests_written", marks=pytest.mark.full),
        "landing.prepared",
        pytest.param("catalog.before_commit", marks=pytest.mark.full),
    ],
)
def test_a_crash_while_delta_rows_are_being_removed_is_made_good(
    life: Life, struck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.fold.plan.DRIVER_ROWS", 0)
    life.crash(Fault(struck))


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.parametrize("struck", IN_TASKS)
def test_a_crash_in_a_spark_task_of_a_fold_is_made_good(
    life: Life, struck: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.fold.plan.DRIVER_ROWS", 0)
    life.crash(Fault(struck))


def test_a_crash_while_a_reader_is_pinned_costs_it_nothing(life: Life) -> None:
    life.correct()
    before = life.truth.everything()
    state = life.site.reader.state(life.events.name)
    pin = pins.begin(life.site.dsn, life.events.name)
    for point in ("catalog.before_commit", "landing.committed"):
        faults.arm(Fault(point))
        with pytest.raises(InjectedFault):
            life.fold()
        faults.arm(None)
        repair(life.site, life.leader.epoch)
        assert _seen_by(life, pin.pin_id, pin.snapshot_id) == {row for row in before if row[1] < 200}
        life.check_rows()
    assert pin.snapshot_id == state.cutline.snapshot_id
    with life.site.connect(autocommit=True) as conn:
        assert pins.end(conn, pin.pin_id)
    life.fold()
    life.events.tier(life.leader)
    life.check()
    assert life.events.delta() == {}


def _seen_by(life: Life, pin: int, snapshot: int | None) -> set[Row]:
    """The cold half at a pin: its own snapshot with its own delta over it."""
    delta = life.events.sql(f"SELECT pk, tier_key, payload FROM modak.modak_read_delta({pin})")
    hidden = {(int(pk), key) for pk, key, _ in delta}
    images = {(int(pk), key, image["body"]) for pk, key, image in delta if image is not None}
    location = life.site.reader.state(life.events.name).cutline.metadata_location
    rows = {tuple(row.values()) for row in static_rows(location, snapshot)}
    return {row for row in rows if (row[0], row[1]) not in hidden} | images
