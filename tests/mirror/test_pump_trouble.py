"""Things that go wrong around a pump: lost slots, zombies, foreign commits, broken tables beside healthy ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from modak.catalog.mirrors import MirrorHealth, note_health, read_health
from modak.core import faults
from modak.core.errors import ModakError, NotLeader
from modak.postgres.changes.slot import SlotState, replication_connection, slot_state
from modak.runtime import mirrors
from modak.runtime.leader import Leader
from modak.tables.mirror.names import publication_name, slot_name
from modak.tables.mirror.pump.health import Teller
from modak.tables.mirror.pump.run import Pump, lag_seconds
from modak.tables.mirror.reanchor import reanchor
from modak.tables.mirror.replication import HISTORY
from modak.tables.site import Site
from modak.tables.status import collect
from tests.mirror.pumping import Mirrored
from tests.mirror.world import Make

HUNDRED = "SELECT i, i, 'row ' || i FROM generate_series(1, 100) AS i"
PATIENCE = 120.0


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_dropped_slot_is_made_good_by_a_comparison(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("UPDATE @ SET body = 'seen' WHERE id < 10")
    table.pump()
    table.sql("UPDATE @ SET body = 'unseen' WHERE id < 20", "DELETE FROM @ WHERE id = 50")
    table.sql(f"SELECT pg_drop_replication_slot('{table.pumps[0].slot}')")
    table.sql("INSERT INTO @ VALUES (500, 1, 'while it was gone')")
    table.close()
    assert table.pump().reanchored
    assert table.is_same()
    table.sql("UPDATE @ SET body = 'after'")
    table.pump()
    assert table.is_same()


@pytest.mark.parametrize("other", ["another server", "another timeline"])
def test_a_position_of_another_history_is_made_good_by_a_comparison(make: Make, other: str) -> None:
    table = make(rows=HUNDRED)
    table.pump()
    table.close()
    history = table.site.reader.state(table.name).cutline.lake_props[HISTORY]
    server, _, timeline = history.partition("/")
    was = f"1{server}/{timeline}" if other == "another server" else f"{server}/0000ABCD"
    table.sql(
        f"""UPDATE modak.cutline SET lake_props = lake_props || '{{"{HISTORY}": "{was}"}}'"""
        f" WHERE table_id = {table.known_id}"
    )
    table.sql("UPDATE @ SET body = 'unseen' WHERE id = 20")
    assert table.pump().reanchored
    assert table.is_same()
    assert table.site.reader.state(table.name).cutline.lake_props[HISTORY] == history
    table.sql("UPDATE @ SET body = 'after'")
    assert not table.pump(fresh=True).reanchored
    assert table.is_same()


def test_somebody_who_holds_the_slot_is_evicted(make: Make) -> None:
    table = make(rows=HUNDRED)
    slot, publication = slot_name(table.known_id, table.site.dsn.dbname), publication_name(table.known_id)
    with replication_connection(table.site.dsn) as zombie:
        zombie.pgconn.exec_(
            f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names '{publication}')".encode()
        )
        table.sql("UPDATE @ SET body = 'changed' WHERE id < 10")
        with capture_logs() as logged:
            assert table.pump().waits_for is not None
        assert "mirror.holder_evicted" in [entry["event"] for entry in logged]
        table.pump()
    assert table.is_same()


def test_a_foreign_commit_in_between_is_prepared_again(make: Make) -> None:
    table, times = make(rows=HUNDRED), [0]
    table.sql("UPDATE @ SET body = 'ours' WHERE id < 10", "DELETE FROM @ WHERE id = 60")

    def somebody_commits(point: str) -> None:
        if point == "landing.prepared" and not times[0]:
            times[0] = 1
            faults.watch(None)
            lake = table.site.lake
            name = table.site.reader.state(table.name).table.lake
            lake._existing(name).updateProperties().set("somebody", "was here").commit()

    faults.watch(somebody_commits)
    try:
        table.pump()
    finally:
        faults.watch(None)
    assert times == [1]
    assert table.is_same()


def test_another_pump_of_the_same_table_changes_nothing_after_a_takeover(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql("UPDATE @ SET body = 'once' WHERE id < 10")
    old = table.epoch
    table.epoch = replace(old, number=old.number - 1)
    stale = Pump(table.site, table.epoch, table.known_id)
    with pytest.raises(NotLeader):
        stale.turn()
    stale.close()
    table.epoch = old
    table.pump()
    assert table.is_same()


def test_one_broken_table_stops_nobody_else_and_says_so(
    make: Make,
    ground: tuple[Site, Leader],
) -> None:
    site, leader = ground
    broken, healthy = make(rows=HUNDRED), make(rows=HUNDRED)
    broken.sql("ALTER TABLE @ ALTER id TYPE text USING 'n' || id", "UPDATE @ SET body = 'x' WHERE id = 'n2'")
    with mirrors.serving(site, leader):
        healthy.sql("UPDATE @ SET body = 'first'")
        until(healthy.is_same)
        until(lambda: _health(broken).error)
        healthy.sql("UPDATE @ SET body = 'second'", "DELETE FROM @ WHERE id < 20")
        until(healthy.is_same)
    health = _health(broken)
    assert health.error is not None
    assert "id" in health.error
    assert health.lag_bytes > 0
    assert health.lag_seconds > 0
    assert health.retained_bytes > 0
    (row,) = (row for row in collect(site) if row.name == broken.name)
    assert any("stands still" in problem and "id" in problem for problem in row.problems)
    (fine,) = (row for row in collect(site) if row.name == healthy.name)
    assert fine.problems == ()
    assert fine.mirror_lag_bytes is not None


def test_a_slow_table_keeps_no_other_waiting(make: Make, ground: tuple[Site, Leader]) -> None:
    site, leader = ground
    slow, other = make(rows=HUNDRED), make(rows=HUNDRED)
    held, free = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "pump.before_write" and threading.current_thread().name == f"modak-mirror-{slow.known_id}":
            held.set()
            free.wait(PATIENCE)

    faults.watch(hold)
    try:
        with mirrors.serving(site, leader):
            try:
                slow.sql("UPDATE @ SET body = 'slow'")
                until(held.is_set)
                for step in range(3):
                    other.sql(f"UPDATE @ SET body = 'step {step}'", f"DELETE FROM @ WHERE id = {step}")
                    until(other.is_same)
                assert not free.is_set()
                assert not any(row["body"] == "slow" for row in slow.lake())
            finally:
                free.set()
            until(slow.is_same)
    finally:
        faults.watch(None)


def _health(table: Mirrored) -> MirrorHealth:
    with table.site.connect(autocommit=True) as conn:
        return read_health(conn).get(table.known_id) or MirrorHealth(table_id=table.known_id)


def _teller(table: Mirrored) -> tuple[Teller, SlotState]:
    frontier = table.site.reader.state(table.name).cutline.frontier
    assert frontier is not None
    teller = Teller(table.site, table.known_id, slot_name(table.known_id, table.site.dsn.dbname))
    slot = teller.tell(frontier, 1.0, None)
    assert slot is not None
    return teller, slot


def test_a_slot_that_keeps_too_much_wal_is_told_and_kept_by_default(make: Make) -> None:
    table = make(rows=HUNDRED)
    teller, slot = _teller(table)
    with capture_logs() as logged:
        assert not teller.guard(table.name, slot, -1, "warn")
        assert not teller.guard(table.name, slot, -1, "warn")
    assert [entry["event"] for entry in logged] == ["mirror.slot_retains"]
    with table.site.connect(autocommit=True) as conn:
        assert slot_state(conn, slot.name) is not None


def test_a_slot_given_up_by_policy_frees_its_wal_and_the_table_goes_on_when_told(make: Make) -> None:
    table = make(rows=HUNDRED)
    teller, slot = _teller(table)
    assert teller.guard(table.name, slot, -1, "pause")
    assert teller.paused is not None
    with table.site.connect(autocommit=True) as conn:
        assert slot_state(conn, slot.name) is None
    table.sql("UPDATE @ SET body = 'while paused'")
    assert table.pump().reanchored
    assert table.is_same()


def test_two_phase_transactions_arrive_when_they_commit(make: Make) -> None:
    table = make(rows=HUNDRED)
    with table.site.connect(autocommit=True) as conn:
        for statement in ("BEGIN", f"UPDATE {table.name} SET body = 'prepared' WHERE id < 10"):
            conn.execute(statement)
        conn.execute(f"PREPARE TRANSACTION 'p_{table.name.name}'")
    table.sql("UPDATE @ SET body = 'other' WHERE id = 20")
    table.pump()
    assert table.is_same()
    table.sql(f"COMMIT PREPARED 'p_{table.name.name}'")
    table.pump()
    assert table.is_same()
    table.together("UPDATE @ SET body = 'gone'", f"PREPARE TRANSACTION 'q_{table.name.name}'")
    table.sql(f"ROLLBACK PREPARED 'q_{table.name.name}'")
    table.pump()
    assert table.is_same()


def test_a_paused_thread_keeps_the_table_still(
    make: Make,
    ground: tuple[Site, Leader],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, leader = ground
    table = make(rows=HUNDRED)
    teller, slot = _teller(table)
    assert teller.guard(table.name, slot, -1, "pause")
    teller.tell(site.reader.state(table.name).cutline.frontier or "", 0.0, None)
    table.sql("UPDATE @ SET body = 'while paused'")
    thread = mirrors.TableThread(site, leader, table.known_id, lambda: False, lambda _: None)
    monkeypatch.setattr(thread, "_site", _with_policy(site, "pause"))
    again = Teller(site, table.known_id, slot.name)
    assert thread._is_paused(again)
    monkeypatch.setattr(thread, "_site", _with_policy(site, "reanchor"))
    assert not thread._is_paused(again)
    assert threading.current_thread().is_alive()


@pytest.mark.parametrize("why", ["paused", "failing"])
def test_a_worker_that_takes_over_goes_on_counting_the_lag(
    make: Make, ground: tuple[Site, Leader], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    site, leader = ground
    table = make(rows=HUNDRED)
    with site.connect(autocommit=True) as conn:
        note_health(conn, MirrorHealth(table_id=table.known_id, lag_seconds=3600.0))
    thread = mirrors.TableThread(site, leader, table.known_id, lambda: False, lambda _: None)
    with Pump(site, leader.epoch, table.known_id) as pump:
        if why == "paused":
            monkeypatch.setattr(thread, "_is_held_back", lambda: True)
        else:
            monkeypatch.setattr(pump, "_turn", _fails)
        thread._step(pump, Teller(site, table.known_id, pump.slot))
        assert _health(table).lag_seconds >= 3600
        assert (_health(table).error is None) is (why == "paused")
        monkeypatch.undo()
        thread._step(pump, Teller(site, table.known_id, pump.slot))
    assert _health(table).lag_seconds < 60


def _fails(*_: object) -> None:
    raise ModakError("storage.gone", "The bucket is away.", retryable=True)


def test_a_lag_that_nobody_has_told_counts_from_the_registration_or_the_last_comparison(make: Make) -> None:
    table = make(rows=HUNDRED)
    table.sql(f"UPDATE modak.tables SET created_at = created_at - interval '2 hours' WHERE table_id = {table.known_id}")
    with Pump(table.site, table.epoch, table.known_id) as pump:
        assert lag_seconds(table.site, pump) >= 7200
    reanchor(table.site, table.epoch, table.site.reader.state(table.name).table)
    with Pump(table.site, table.epoch, table.known_id) as pump:
        assert lag_seconds(table.site, pump) < 60


def _with_policy(site: Site, policy: str) -> Site:
    mirror = site.settings.mirror.model_copy(update={"slot_policy": policy})
    return replace(site, settings=replace(site.settings, mirror=mirror))


def test_a_lost_jvm_ends_the_lead_and_is_told(make: Make, ground: tuple[Site, Leader]) -> None:
    site, leader = ground
    table = make(rows=HUNDRED)
    told: list[ModakError] = []
    thread = mirrors.TableThread(site, leader, table.known_id, lambda: bool(told), told.append)
    pump = Pump(site, leader.epoch, table.known_id)

    def lost(*_: object) -> None:
        raise ModakError("spark.gateway_lost", "Java is gone.")

    pump.turn = lost  # type: ignore[method-assign, assignment]
    thread._step(pump, Teller(site, table.known_id, pump.slot))
    pump.close()
    assert [error.code for error in told] == ["spark.gateway_lost"]
