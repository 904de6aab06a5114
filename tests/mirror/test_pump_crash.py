"""A crash at every fault point of a flush: the next worker reads again from F, and every row is there exactly once.

The everyday run takes a sample of the points, drawn by `--randomly-seed`; the full run takes all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from modak.catalog.mirrors import read_health
from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.tables.mirror.pump.health import Teller, remembered
from modak.tables.repair import repair
from tests.mirror.pumping import Mirrored
from tests.mirror.world import Make

HUNDRED = "SELECT i, i, 'row ' || i FROM generate_series(1, 100) AS i"

FLUSH_POINTS = (
    "pump.before_write",
    "pump.before_find",
    "pump.found",
    "pump.written",
    "pump.before_commit",
    "pump.committed",
    "pump.before_confirm",
    "pump.confirmed",
    "keycache.writing",
    "keycache.written",
)
PASSED_POINTS = (
    "journal.before_begin",
    "journal.after_begin",
    "journal.before_phase",
    "journal.after_phase",
    "files.before_create",
    "files.created",
    "files.durable",
    "vectors.before_write",
    "vectors.durable",
    "lake.prepare_started",
    "lake.manifests_written",
    "lake.metadata_written",
    "landing.before_prepare",
    "landing.prepared",
    "landing.committed",
    "catalog.before_commit",
    "catalog.after_commit",
    "slot.advancing",
    "slot.advanced",
)
"""Points of other rooms that a flush comes by."""
SPILL_POINTS = ("pump.spilling", "pump.spilled", "pump.clearing", "pump.cleared")
IDLE_POINTS = ("pump.before_frontier", "pump.frontier_moved")
RENAME_POINTS = ("pump.before_rename", "pump.renamed")
GUARD_POINTS = ("pump.before_giving_up", "pump.gave_up")
TASK_POINTS = ("pump.before_rows", "pump.rows_kept", "pump.task_read", "pump.task_written")
VISITED = {*FLUSH_POINTS, *SPILL_POINTS, *IDLE_POINTS, *RENAME_POINTS, *GUARD_POINTS, *TASK_POINTS}
SAMPLE = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "anywhere" not in metafunc.fixturenames:
        return
    everywhere = [*FLUSH_POINTS, *PASSED_POINTS]
    drawn = set(random.Random(int(metafunc.config.getoption("randomly_seed", 0))).sample(everywhere, SAMPLE))
    marks = {point: () if point in drawn else (pytest.mark.full,) for point in everywhere}
    metafunc.parametrize("anywhere", [pytest.param(point, marks=marks[point]) for point in everywhere])


def crash(table: Mirrored, point: str, act: Callable[[], object]) -> None:
    """Let the worker die at a point; the next one repairs and goes on."""
    faults.arm(Fault(point))
    try:
        with pytest.raises(InjectedFault):
            act()
    finally:
        faults.arm(None)
    table.close()
    repair(table.site, table.epoch)
    table.pump(fresh=True)


def change(table: Mirrored) -> None:
    table.sql(
        "INSERT INTO @ SELECT i, i, 'new ' || i FROM generate_series(1001, 1050) AS i",
        "UPDATE @ SET body = body || '!', ts = ts + 7 WHERE id % 3 = 0",
        "UPDATE @ SET id = id + 5000 WHERE id % 10 = 1",
        "DELETE FROM @ WHERE id % 10 = 5",
    )


def test_a_crash_anywhere_in_a_flush_loses_and_doubles_nothing(make: Make, anywhere: str) -> None:
    table = make(rows=HUNDRED, partition_width="20")
    change(table)
    crash(table, anywhere, table.pump)
    assert table.is_same()
    table.sql("UPDATE @ SET body = 'later' WHERE id < 60")
    table.pump()
    assert table.is_same()
    state = table.site.reader.state(table.name)
    assert [op for op in state.unfinished if not op.landed] == []


@pytest.mark.full
def test_a_crash_at_each_passage_of_a_flush(make: Make) -> None:
    for point in (*FLUSH_POINTS, *PASSED_POINTS):
        for time in (1, 2, 3):
            table = make(rows=HUNDRED, partition_width="20")
            change(table)
            faults.arm(Fault(point, after=time))
            try:
                table.pump()
            except InjectedFault:
                faults.arm(None)
                table.close()
                repair(table.site, table.epoch)
                table.pump(fresh=True)
            finally:
                faults.arm(None)
            assert table.is_same(), (point, time)
            table.remove()


@pytest.mark.parametrize("point", SPILL_POINTS)
def test_a_crash_while_a_large_transaction_is_on_disk(make: Make, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modak.tables.mirror.pump.run.Pump._room", lambda *_, **__: 300)
    monkeypatch.setattr("modak.tables.mirror.pump.run.BATCH_BYTES", 1 << 14)
    table = make(rows=HUNDRED)
    table.together("INSERT INTO @ SELECT i, i, 'x' FROM generate_series(1000, 4000) AS i", "UPDATE @ SET body = 'y'")
    crash(table, point, table.pump)
    assert table.is_same()


@pytest.mark.parametrize("point", IDLE_POINTS)
def test_a_crash_while_an_idle_frontier_moves(make: Make, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modak.tables.mirror.pump.run.IDLE_SECONDS", 0.0)
    table, other = make(rows=HUNDRED), make(rows=HUNDRED)
    change(other)
    crash(table, point, table.pump)
    table.sql("UPDATE @ SET body = 'later'")
    table.pump()
    assert table.is_same()


@pytest.mark.parametrize("point", RENAME_POINTS)
def test_a_crash_while_a_name_is_followed(make: Make, point: str) -> None:
    from modak.core.names import TableName

    table = make(rows=HUNDRED)
    change(table)
    new = TableName("public", f"{table.name.name}_moved")
    table.sql(f"ALTER TABLE @ RENAME TO {new.name}")
    table.name = new
    crash(table, point, table.pump)
    assert table.is_same()


@pytest.mark.parametrize("point", GUARD_POINTS)
def test_a_crash_while_a_slot_is_given_up(make: Make, point: str) -> None:
    table = make(rows=HUNDRED)
    change(table)
    table.pump()
    teller = Teller(table.site, table.known_id, table.pumps[0].slot)
    frontier = table.site.reader.state(table.name).cutline.frontier
    assert frontier is not None
    slot = teller.tell(frontier, 0.0, None)
    assert slot is not None
    change_again = "UPDATE @ SET body = 'while it was gone'"
    table.sql(change_again)
    crash(table, point, lambda: teller.guard(table.name, slot, -1, "reanchor", table.close))
    table.pump()
    assert table.is_same()


@pytest.mark.parametrize("point", ["slot.evicting", "slot.dropped", "pump.gave_up"])
def test_a_table_stays_paused_after_a_crash_while_its_slot_is_given_up(make: Make, point: str) -> None:
    table = make(rows=HUNDRED)
    table.pump()
    teller = Teller(table.site, table.known_id, table.pumps[0].slot)
    slot = teller.tell(table.site.reader.state(table.name).cutline.frontier or "", 0.0, None)
    assert slot is not None
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        teller.guard(table.name, slot, -1, "pause", table.close)
    faults.arm(None)
    with table.site.connect(autocommit=True) as conn:
        assert remembered(read_health(conn)[table.known_id], "pause") is not None


@pytest.mark.spark
@pytest.mark.parametrize("point", TASK_POINTS)
def test_a_crash_while_tasks_write_a_large_batch(
    make: Make, point: str, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(rows=HUNDRED)
    table.site.use(spark)
    monkeypatch.setattr("modak.tables.mirror.pump.plan.DRIVER_ROWS", 10)
    change(table)
    crash(table, point, table.pump)
    assert table.is_same()
