"""Somebody compacts the lake table at whatever point of a pass, also one at which the pass crashes: nothing is lost.

The compaction is Spark's own, through its own catalog. Where our commit holds the table's pointer it waits for us and
then finds that it lost, which it may.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.tables.events import Events
from tests.tables.invariants import Invariants
from tests.tables.test_crash_points import LIFE_POINTS, TASK_POINTS
from tests.tables.test_foreign_commits import ROWS, grown, rewrite, strays
from tests.tables.test_kill import NOT_IN_A_PASS

__all__ = ["grown"]

pytestmark = [pytest.mark.spark, pytest.mark.full]

ELSEWHERE = {"premake.after_attach", "premake.before_attach"}
"""No partition is made ahead here."""
POINTS = sorted({*LIFE_POINTS, *TASK_POINTS} - NOT_IN_A_PASS - ELSEWHERE)
WAIT = 5.0
"""Seconds after which a compaction that stands behind our own commit is left to itself."""


@pytest.fixture
def truth(site: Site, warehouse: str) -> Invariants:
    return Invariants(site.dsn, warehouse)


class Compaction:
    """Spark's compaction, once, in a thread of its own; the pass goes on when it has ended or waits for us."""

    def __init__(self, events: Events, point: str) -> None:
        self._events, self._point = events, point
        self.thread: threading.Thread | None = None

    def __call__(self, reached: str) -> None:
        if reached == self._point and self.thread is None:
            self.thread = threading.Thread(target=self._compact)
            self.thread.start()
            self.thread.join(WAIT)

    def _compact(self) -> None:
        # Ours may have been first; then the foreign commit says so.
        with contextlib.suppress(Py4JError, PySparkException):
            rewrite(self._events.site)


@pytest.mark.parametrize("point", POINTS)
def test_a_foreign_compaction_at_any_point_loses_nothing(
    grown: Events, leader: Leader, truth: Invariants, point: str
) -> None:
    compaction = Compaction(grown, point)
    faults.watch(compaction)
    _tier(grown, leader)
    faults.watch(None)
    assert compaction.thread is not None, "the pass does not come by this point"
    compaction.thread.join(120)
    _check(grown, leader, truth)


@pytest.mark.parametrize("point", POINTS)
def test_a_foreign_compaction_between_a_crash_at_any_point_and_the_restart_loses_nothing(
    grown: Events, leader: Leader, truth: Invariants, point: str
) -> None:
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        _tier(grown, leader)
    faults.arm(None)
    rewrite(grown.site)
    repair(grown.site, leader.epoch)
    _check(grown, leader, truth)


def _tier(events: Events, leader: Leader) -> None:
    while events.tier(leader).changed:
        pass


def _check(events: Events, leader: Leader, truth: Invariants) -> None:
    _tier(events, leader)
    assert truth.state.cutline.t == 300
    assert truth.everything() == ROWS
    assert events.everything() == ROWS
    assert len(truth.lake_rows()) == 251
    truth.check_journal()
    truth.check_partitions()
    # What a foreign commit that lost leaves behind is not ours to take before its time.
    ours = [op for (op,) in truth.sql("SELECT op_id FROM modak.op_log")]
    assert [file for file in strays(truth) if any(op in file for op in ours)] == []
