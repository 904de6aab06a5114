"""A crash at every point of anchoring anew, of a diff, and of a change of mode: it is simply done again."""

from __future__ import annotations

import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables.mirror.convert import convert
from modak.tables.mirror.reanchor import reanchor, slot_trouble
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.mirror.drawing import give
from tests.mirror.things import Things

IN_AN_ANCHOR = (
    "reanchor.slot_made",
    "mend.before_write",
    "mend.after_write",
    "reanchor.before_commit",
    "mend.before_locate",
    "mend.after_locate",
    "landing.prepared",
    "catalog.before_commit",
    "catalog.after_commit",
    "reanchor.committed",
)
IN_A_DIFF = ("mirror.before_leaves", "mirror.after_leaves", "diff.before_commit", "diff.committed")
IN_A_CONVERSION = ("convert.before_switch", "convert.after_switch", "convert.before_empty", "convert.after_empty")
VISITED = {*IN_AN_ANCHOR, *IN_A_DIFF, *IN_A_CONVERSION}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A few points for the gate."""
    give(metafunc, "struck", IN_AN_ANCHOR, 2)
    give(metafunc, "struck_in_a_diff", IN_A_DIFF, 1)
    give(metafunc, "struck_in_a_conversion", IN_A_CONVERSION, 1)


def _live(things: Things, leader: Leader) -> None:
    for _ in range(3):
        things.cycle(leader)
        things.pump(leader)


def test_after_a_crash_in_an_anchor_the_slot_is_still_in_trouble_or_all_is_well(
    site: Site, leader: Leader, struck: str
) -> None:
    things = Things.plain(site, 300)
    things.register()
    things.lose_slot()
    things.sql("UPDATE public.things SET body = 'unseen' WHERE id % 50 = 0")
    things.sql("DELETE FROM public.things WHERE id = 7")
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        reanchor(site, leader.epoch, things.state.table)
    faults.arm(None)
    repair(site, leader.epoch)
    things.fill(300, 305)
    state = things.state
    if slot_trouble(site, state.table, state.cutline.frontier) is not None:
        reanchor(site, leader.epoch, state.table)
    things.pump(leader)
    assert things.lake() == things.heap()
    assert site.reader.unfinished_ops() == ()


REMADE = ("publication.creating", "publication.created", "mirror.before_mark", "mirror.after_mark")


@pytest.mark.parametrize("point", REMADE)
def test_after_a_crash_while_a_lost_publication_is_made_again_nothing_is_missed(
    site: Site, leader: Leader, point: str
) -> None:
    things = Things.plain(site, 300)
    things.register()
    things.sql(f"DROP PUBLICATION {things.publication}")
    things.sql("UPDATE public.things SET body = 'unseen' WHERE id % 50 = 0")
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        things.pump(leader)
    faults.arm(None)
    repair(site, leader.epoch)
    things.fill(300, 305)
    things.pump(leader)
    things.pump(leader)
    assert things.lake() == things.heap()
    assert site.reader.unfinished_ops() == ()


def test_after_a_crash_in_a_diff_it_is_done_again(site: Site, leader: Leader, struck_in_a_diff: str) -> None:
    things = Things.ranged(site)
    things.register()
    things.sql("ALTER TABLE public.things DETACH PARTITION public.things_100")
    faults.arm(Fault(struck_in_a_diff))
    with pytest.raises(InjectedFault):
        _live(things, leader)
    faults.arm(None)
    repair(site, leader.epoch)
    for _ in range(3):
        things.pump(leader)
        things.cycle(leader)
    assert things.lake() == things.heap()
    assert len(things.lake()) == 150
    assert things.sql("SELECT count(*) FROM modak.mirror_diffs") == [(0,)]


def test_after_a_crash_in_a_conversion_the_same_command_ends_it(
    site: Site, leader: Leader, struck_in_a_conversion: str
) -> None:
    things = Things.ranged(site)
    way = "mirrored" if struck_in_a_conversion.endswith("switch") else "tiered"
    if way == "mirrored":
        register(site, RegisterRequest(things.name, ("id",), "ts", keep_heap=True))
        tier(site, leader.epoch, things.name)
    else:
        things.register()
    faults.arm(Fault(struck_in_a_conversion))
    with pytest.raises(InjectedFault):
        convert(site, things.name, way)
    faults.arm(None)
    repair(site, leader.epoch)
    if struck_in_a_conversion != "convert.after_empty":
        convert(site, things.name, way)
    if way == "mirrored":
        things.pump(leader)
        assert things.lake() == things.heap()
        return
    tier(site, leader.epoch, things.name)
    state = things.state
    assert (state.table.mode, state.table.keep_heap, state.cutline.t) == ("tiered", True, 200)
    assert things.lake() == [row for row in things.heap() if row[1] < 200]
    assert things.sql("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
