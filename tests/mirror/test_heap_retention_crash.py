"""A crash at every point at which a partition leaves the heap of a mirrored table: no row is lost, none comes back."""

from __future__ import annotations

import psycopg
import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.mirror.drawing import give
from tests.mirror.test_heap_retention import seam
from tests.mirror.things import Things

POINTS = (
    "retire.before_seal",
    "capture.before_install",
    "capture.after_install",
    "retire.after_seal",
    "retire.before_advance",
    "retire.after_advance",
    "reclaim.before_detach",
    "reclaim.after_detach",
    "reclaim.before_drop",
    "reclaim.after_drop",
)
VISITED = set(POINTS)
TRIES = 20


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A few points for the gate."""
    give(metafunc, "struck", POINTS, 2)


def _live(things: Things, leader: Leader) -> None:
    for _ in range(3):
        things.cycle(leader)
        things.sql("UPDATE public.things SET body = body || '!' WHERE id IN (5, 105, 305)")
        things.pump(leader)


def _correct(things: Things, leader: Leader) -> None:
    """A correction of an application; between a detach and its drop it is refused, and tried again a cycle later."""
    for _ in range(TRIES):
        try:
            things.sql('SELECT modak_upsert(\'public.things\', \'{"id": 6, "ts": 6, "body": "six"}\')')
            return
        except psycopg.errors.ObjectInUse:
            things.cycle(leader)
    raise AssertionError("the partition hangs between its detach and its drop for good")


def _settle(things: Things, leader: Leader) -> None:
    """Cycles until all that is old has left the heap, however often the drop finds the leaf busy, and is folded."""
    for _ in range(TRIES):
        things.cycle(leader)
        things.pump(leader)
        if len(things.heap()) == 150 and not things.sql("SELECT pk FROM modak.delta"):
            return


@pytest.mark.full
def test_after_a_crash_the_next_cycles_take_the_partition_out(site: Site, leader: Leader, struck: str) -> None:
    things = Things.ranged(site, 450, partitions=5)
    things.register(heap_retention="100")
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        _live(things, leader)
    faults.arm(None)
    repair(site, leader.epoch)
    _correct(things, leader)
    expected = seam(things)
    assert len(expected) == 450
    assert (6, 6, "six") in expected
    _settle(things, leader)
    assert things.state.cutline.t == 300
    assert len(things.heap()) == 150
    assert set(things.lake()) == seam(things) == expected
    assert site.reader.unfinished_ops() == ()
