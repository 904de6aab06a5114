"""A crash at every point on the way into the lake and out of it: the same command again ends what was begun."""

from __future__ import annotations

import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.storage.store import normal
from modak.tables.mirror import chunks as cutting
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.mirror.drawing import give
from tests.mirror.things import Things

IN_A_REGISTRATION = (
    "mirror.before_note",
    "mirror.after_note",
    "identity.setting",
    "identity.set",
    "mirror.before_guard",
    "mirror.after_guard",
    "publication.creating",
    "publication.created",
    "mirror.before_mark",
    "mirror.after_mark",
    "slot.creating",
    "slot.created",
    "copy.before_plan",
    "copy.after_plan",
    "copy.before_tasks",
    "export.task_started",
    "files.created",
    "files.durable",
    "export.task_written",
    "copy.after_tasks",
    "landing.prepared",
    "catalog.before_commit",
    "catalog.after_commit",
    "copy.committed",
    "copy.before_frontier",
    "copy.after_frontier",
)
IN_A_RESUMPTION = ("copy.before_heal", "copy.after_heal")
AT_THE_END = (
    "unregister.committed",
    "slot.dropping",
    "slot.dropped",
    "publication.dropping",
    "publication.dropped",
    "mirror.before_unguard",
    "mirror.after_unguard",
    "mirror.before_restore",
    "mirror.after_restore",
)
VISITED = {*IN_A_REGISTRATION, *IN_A_RESUMPTION, *AT_THE_END}
SAMPLE = 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A few points for the gate."""
    give(metafunc, "struck", IN_A_REGISTRATION, SAMPLE)
    give(metafunc, "struck_at_the_end", AT_THE_END, 2)


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "TASK_BYTES", 1)
    monkeypatch.setattr(cutting, "TASKS_PER_COMMIT", 1)


def _crash(things: Things, point: str, after: int = 0) -> None:
    faults.arm(Fault(point, after=after))
    with pytest.raises(InjectedFault):
        things.register(chunk_rows=100)
    faults.arm(None)


def _ends_well(things: Things, leader: Leader) -> None:
    things.sql("UPDATE public.things SET body = 'between' WHERE id IN (3, 120, 230)")
    things.sql("DELETE FROM public.things WHERE id IN (4, 240)")
    things.fill(280, 285)
    repair(things.site, leader.epoch)
    things.register(chunk_rows=100)
    state = things.state
    assert state.cutline.frontier is not None
    assert state.unfinished == ()
    assert things.site.reader.unfinished_ops() == ()
    files = {normal(file.file.path) for file in things.site.lake.files(state.table.lake, state.cutline.snapshot_id)}
    listed = {normal(entry.uri) for entry in things.site.store.list(f"{state.table.location}/data/")}
    assert listed == files
    assert things.sql("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(1,)]
    assert things.sql("SELECT count(*) FROM pg_publication") == [(1,)]
    things.pump(leader)
    assert things.lake() == things.heap()


def test_after_a_crash_in_a_registration_the_same_command_goes_on(site: Site, leader: Leader, struck: str) -> None:
    things = Things.ranged(site, 250)
    _crash(things, struck)
    _ends_well(things, leader)


@pytest.mark.parametrize("point", IN_A_RESUMPTION)
def test_after_a_crash_in_a_resumption_the_same_command_goes_on(site: Site, leader: Leader, point: str) -> None:
    things = Things.ranged(site, 250)
    _crash(things, "copy.before_tasks", after=1)
    things.sql("UPDATE public.things SET body = 'first' WHERE id IN (5, 205)")
    _crash(things, point)
    _ends_well(things, leader)


def test_after_a_crash_in_the_farewell_nothing_is_left(site: Site, leader: Leader, struck_at_the_end: str) -> None:
    things = Things.ranged(site, 250)
    things.register()
    faults.arm(Fault(struck_at_the_end))
    with pytest.raises(InjectedFault):
        things.unregister(drop_lake=True)
    faults.arm(None)
    repair(site, leader.epoch)
    assert site.reader.table(things.name) is None
    assert site.reader.unfinished_ops() == ()
    assert things.sql("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [(0,)]
    assert things.sql("SELECT count(*) FROM pg_publication") == [(0,)]
    assert set(things.identities().values()) == {"d"}
    triggers = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '%modak_trunc%'"
    assert things.sql(triggers) == [(0,)]
