"""A crash at every point of a maintenance pass: the repair undoes or finishes it, and the next pass does the rest.

One table lives through all crashes, with new debt each time. The everyday run takes a sample of the points, drawn by
`--randomly-seed` (printed when a test fails); the full run takes all of them, each time that a pass comes by.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.storage.uri import local_path
from tests.maintenance import foreign
from tests.maintenance.lake import Lake
from tests.tables.invariants import Row

pytestmark = pytest.mark.timeout(1800)

FREEING = ("expiry.before_compare", "expiry.before_delete", "expiry.after_delete", "expiry.after_compare")
IN_A_PASS = (
    "maintenance.before_begin",
    "maintenance.after_begin",
    "journal.before_begin",
    "journal.after_begin",
    "journal.before_phase",
    "journal.after_phase",
    "catalog.before_step",
    "catalog.after_step",
    "rewrite.before_gather",
    "rewrite.after_gather",
    "rewrite.before_tasks",
    "rewrite.bin_started",
    "files.before_create",
    "files.created",
    "files.durable",
    "rewrite.bin_written",
    "rewrite.after_tasks",
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
    *FREEING,
    "journal.before_note",
    "journal.after_note",
    "orphans.before_listing",
    "orphans.after_listing",
    "orphans.before_commit",
    "orphans.after_commit",
    "maintenance.before_end",
    "maintenance.after_end",
)
LATE = ("rewrite.before_carry", "rewrite.after_carry")
VISITED = {*IN_A_PASS, *LATE}
SAMPLE = 4


@dataclass
class Life:
    """A table that gathers debt of every kind, and what must be seen in it."""

    lake: Lake
    rows: dict[int, Row] = field(default_factory=dict)
    turns: int = 0

    def wear(self) -> None:
        """Deletes, corrections, small files, a foreign equality delete, snapshots and an orphan."""
        self.turns += 1
        chance = random.Random(self.turns)
        keys = sorted(key for key in self.rows if key < 10_000)
        if len(keys) < 20:
            # Many turns take many rows.
            self.lake.correct(*range(200), body="back")
            self.rows |= {key: (key, key, "back") for key in range(200)}
            keys = list(range(200))
        gone, changed, foreign_gone = chance.sample(keys, 3)
        self.lake.delete(gone)
        del self.rows[gone]
        self.lake.correct(changed, body=f"turn {self.turns}")
        self.rows[changed] = (changed, changed, f"turn {self.turns}")
        self.lake.add(self.turns % 200, body=f"turn {self.turns}")
        added = 10_000 + self.turns % 200
        self.rows[added] = (added, self.turns % 200, f"turn {self.turns}")
        foreign.equality_delete(self.lake, [[foreign_gone]], band=foreign_gone // 100 * 100)
        del self.rows[foreign_gone]
        data = Path(local_path(self.lake.table.location) or "", "data", "stranded")
        data.mkdir(exist_ok=True)
        (data / f"{self.turns}.parquet").write_bytes(b"left by somebody")
        foreign.grow_old(str(data))

    def passes(self) -> list[str]:
        seen: list[str] = []
        self.wear()
        faults.watch(lambda point: None if point.startswith("lease.") else seen.append(point))
        self.lake.maintain()
        faults.watch(None)
        return seen

    def crash(self, fault: Fault) -> None:
        self.wear()
        faults.arm(fault)
        # A pass that has a file less to write comes by a frequent point once less: then there is nothing to crash at.
        with contextlib.suppress(InjectedFault) if fault.after else pytest.raises(InjectedFault):
            self.lake.maintain()
        faults.arm(None)
        self.check_rows()
        self.lake.recover()
        assert self.lake.site.reader.unfinished_ops() == ()
        self.check_rows()
        self.lake.maintain()
        self.check()

    def check_rows(self) -> None:
        assert self.lake.rows() == set(self.rows.values())

    def check(self) -> None:
        self.check_rows()
        assert self.lake.site.reader.unfinished_ops() == ()
        assert not [file for file in self.lake.files() if file.deletes]
        table = self.lake.table
        there = {entry.uri for entry in self.lake.site.store.list(f"{table.location}/data")}
        assert there == set(self.lake.site.lake.reachable(table.identifier))
        assert table.snapshot_id == self.lake.site.reader.state(self.lake.events.name).cutline.snapshot_id
        self.lake.check_files()


@pytest.fixture
def life(lake: Lake) -> Life:
    lake.policy(
        rewrite_min_input_files=2,
        manifest_rewrite_min_manifests=2,
        snapshot_retention_hours=0,
        snapshot_min_retained=1,
        orphan_sweep_enabled=True,
    )
    return Life(lake, {i: (i, i, f"row {i}") for i in range(200)})


def test_the_points_that_crash_here_are_those_that_a_pass_comes_by(life: Life) -> None:
    assert set(life.passes()) == set(IN_A_PASS)
    life.check()


def test_a_crash_in_a_pass_is_made_good_by_the_next_start(life: Life, request: pytest.FixtureRequest) -> None:
    seed = int(request.config.getoption("randomly_seed", 0))
    print(f"the sample was drawn with --randomly-seed={seed}")
    for point in random.Random(seed).sample(IN_A_PASS, SAMPLE):
        print(point)
        life.crash(Fault(point))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_crash_at_each_passage_of_a_pass_is_made_good(life: Life) -> None:
    come_by: Counter[str] = Counter()
    for point in life.passes():
        print(f"{point}, time {come_by[point] + 1}")
        if come_by[point] < 6:
            life.crash(Fault(point, after=come_by[point]))
        come_by[point] += 1


@pytest.mark.parametrize("point", LATE)
def test_a_crash_while_late_deletes_are_carried_over_is_made_good(life: Life, point: str) -> None:
    life.wear()

    def late(reached: str) -> None:
        if reached == "rewrite.after_tasks":
            faults.watch(None)
            key = min(key for key in life.rows if key < 100)
            life.lake.delete(key)
            del life.rows[key]
            faults.arm(Fault(point))

    faults.watch(late)
    with pytest.raises(InjectedFault):
        life.lake.maintain()
    faults.arm(None)
    faults.watch(None)
    life.lake.recover()
    life.check_rows()
    life.lake.maintain()
    life.check()


@pytest.mark.spark
@pytest.mark.parametrize("point", [*FREEING, "orphans.after_listing"])
def test_a_crash_while_spark_compares_files_is_made_good(life: Life, point: str) -> None:
    life.lake.engine = "spark"
    life.crash(Fault(point))


@pytest.mark.parametrize("point", ["journal.after_note", "tidy.before_delete", "storage.deleted", "tidy.after_delete"])
def test_a_crash_while_the_metadata_of_expired_snapshots_goes_is_made_good(life: Life, point: str) -> None:
    life.wear()

    def compared(reached: str) -> None:
        if reached == "expiry.after_compare":
            faults.watch(None)
            faults.arm(Fault(point))

    faults.watch(compared)
    with pytest.raises(InjectedFault):
        life.lake.maintain()
    faults.arm(None)
    faults.watch(None)
    (op,) = [op for op in life.lake.site.reader.unfinished_ops() if op.kind == "expire"]
    assert op.landed
    assert op.cleanup["expired_from"] is None
    assert all(not uri.endswith(".parquet") for uri in op.cleanup["freed"])
    life.lake.recover()
    life.lake.maintain()
    life.check()
    assert not any(life.lake.site.store.exists(uri) for uri in op.cleanup["freed"])


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.parametrize("struck", ["rewrite.bin_started", "files.durable", "rewrite.bin_written"])
def test_a_crash_in_a_spark_task_of_a_rewrite_is_made_good(life: Life, struck: str) -> None:
    life.lake.engine = "spark"
    life.crash(Fault(struck))
