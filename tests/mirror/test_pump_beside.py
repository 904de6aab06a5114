"""A pump that is behind: batches land in a thread beside the reading, and the server decodes ahead of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from modak.core import faults, underway
from modak.core.faults import Fault, InjectedFault
from modak.postgres.changes import ahead
from modak.postgres.changes.source import ChangeSource
from modak.tables.mirror.pump.plan import Pace
from modak.tables.mirror.pump.run import Pump
from modak.tables.repair import repair
from tests.mirror.pumping import Mirrored
from tests.mirror.world import Make

BATCH = 100
ROWS = "SELECT i, i, 'row ' || i FROM generate_series(1, 300) AS i"
POINTS = (
    "journal.after_begin",
    "pump.before_write",
    "pump.found",
    "files.durable",
    "landing.prepared",
    "catalog.before_commit",
    "catalog.after_commit",
    "pump.committed",
    "pump.before_confirm",
    "pump.confirmed",
)
EVERYDAY = {("landing.prepared", 1), ("catalog.after_commit", 0), ("pump.before_confirm", 0)}


@pytest.fixture
def behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> Mirrored:
    """A table with many batches of changes in the WAL."""
    monkeypatch.setattr("modak.tables.mirror.pump.run.BATCH_BYTES", 1 << 12)
    monkeypatch.setattr(ahead, "SLICE_MESSAGES", 150)
    table = make(rows=ROWS, partition_width="100")
    _change(table)
    return table


def _change(table: Mirrored) -> None:
    for at in range(1000, 2000, 50):
        table.sql(
            f"INSERT INTO @ SELECT i, i, 'new ' || i FROM generate_series({at}, {at + 49}) AS i",
            f"UPDATE @ SET body = body || '!', ts = ts + 100 WHERE id % 100 = {at // 50 % 100}",
            f"UPDATE @ SET id = id + 10000 WHERE id = {at + 3}",
            f"DELETE FROM @ WHERE id = {at + 7}",
        )


def _pump(table: Mirrored) -> Pump:
    pump = Pump(table.site, table.epoch, table.known_id)
    pump.pace = Pace(BATCH, 1.0)
    pump._source._limits = replace(pump._source._limits, ahead_bytes=0)
    table.pumps.append(pump)
    return pump


def _landers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("modak-landing")]


def test_batches_land_one_after_the_other_in_one_lasting_thread(behind: Mirrored) -> None:
    before = _landers()
    pump = _pump(behind)
    assert pump.turn().flushes > 2
    assert behind.is_same()
    (thread,) = set(_landers()) - set(before)
    _change_again(behind)
    assert pump.turn().flushes > 2
    assert behind.is_same()
    assert set(_landers()) - set(before) == {thread}
    state = behind.site.reader.state(behind.name)
    assert [op for op in state.unfinished if underway.is_under_way(op.op_id)] == []
    behind.close()
    assert set(_landers()) == set(before)


def test_a_peek_is_confirmed_once_and_only_when_all_of_it_has_landed(
    behind: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed: list[tuple[int, bool]] = []
    confirm = ChangeSource.confirm

    def noted(self: ChangeSource, lsn: int) -> None:
        confirmed.append((lsn, behind.is_same()))
        confirm(self, lsn)

    monkeypatch.setattr(ChangeSource, "confirm", noted)
    assert _pump(behind).turn().flushes > 2
    assert [same for _, same in confirmed] == [True]


@pytest.mark.parametrize(
    ("point", "time"),
    [
        pytest.param(point, time, marks=() if (point, time) in EVERYDAY else pytest.mark.full)
        for point in POINTS
        for time in (0, 1)
    ],
)
def test_a_crash_in_the_landing_thread_loses_and_doubles_nothing(behind: Mirrored, point: str, time: int) -> None:
    pump = _pump(behind)
    faults.arm(Fault(point, after=time))
    try:
        pump.turn()
    except InjectedFault:
        pass
    else:
        # One confirmation in a turn.
        assert (time, point) in {(1, "pump.before_confirm"), (1, "pump.confirmed")}
    finally:
        faults.arm(None)
    behind.close()
    repair(behind.site, behind.epoch)
    _change_again(behind)
    behind.pump(fresh=True)
    assert behind.is_same()
    state = behind.site.reader.state(behind.name)
    assert [op for op in state.unfinished if not op.landed] == []


def test_an_error_in_the_landing_thread_ends_the_turn_and_the_next_one_goes_on(
    behind: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump = _pump(behind)
    faults.arm(Fault("pump.before_commit", after=1))
    try:
        with pytest.raises(InjectedFault):
            pump.turn()
    finally:
        faults.arm(None)
    assert not pump._lander.busy
    _change_again(behind)
    done: Any = pump.turn()
    assert done.changes
    assert behind.is_same()


def test_columns_that_change_amid_the_batches_take_effect_where_they_were_changed(behind: Mirrored) -> None:
    behind.sql("ALTER TABLE @ ADD COLUMN more int DEFAULT 7")
    _change_again(behind)
    behind.sql("ALTER TABLE @ RENAME COLUMN body TO words", "UPDATE @ SET more = id, words = 'w' WHERE id % 2 = 0")
    assert _pump(behind).turn().flushes > 2
    assert behind.is_same()


def _change_again(table: Mirrored) -> None:
    for at in range(20):
        table.sql(f"UPDATE @ SET ts = ts + 1 WHERE id % 20 = {at}")
