"""Tables held back, requests filed, heartbeats: what operators do survives a crash at any point."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from modak.catalog import operators
from modak.catalog.fleet import glance
from modak.cli.main import app
from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime import daemon
from modak.runtime.leader import Leader
from modak.runtime.pulse import Pulse
from modak.runtime.schedule import Schedule
from modak.tables.site import Site
from tests.tables.events import Events

ACTS: dict[str, Callable[[Any, int], object]] = {
    "pause": lambda conn, table: operators.pause(conn, table, "me", "because"),
    "resume": operators.resume,
    "request": lambda conn, table: operators.request_maintenance(conn, table, "me"),
}


@pytest.mark.parametrize("point", [f"operators.{when}_{act}" for act in ACTS for when in ("before", "after")])
def test_a_crash_leaves_all_of_it_or_nothing(events: Events, point: str) -> None:
    events.register()
    table_id = events.site.reader.state(events.name).table.table_id
    when, _, act = point.removeprefix("operators.").partition("_")
    with events.site.connect() as conn:
        if act == "resume":
            operators.pause(conn, table_id, "me")
    faults.arm(Fault(point))
    with events.site.connect() as conn, pytest.raises(InjectedFault):
        ACTS[act](conn, table_id)
    faults.arm(None)
    with events.site.connect() as conn:
        held = table_id in operators.pauses(conn)
        filed = conn.execute("SELECT count(*) FROM modak.maintenance_requests").fetchone() == (1,)
    done = {"pause": held, "resume": not held, "request": filed}[act]
    assert done == (when == "after")


def test_a_table_that_is_held_back_is_left_alone_until_it_is_resumed(events: Events, leader: Leader) -> None:
    events.register()
    schedule, stop = Schedule(), threading.Event()
    table_id = events.site.reader.state(events.name).table.table_id
    with events.site.connect() as conn:
        operators.pause(conn, table_id, "me")
    daemon.cycle(events.site, leader, schedule, stop)
    assert events.site.reader.state(events.name).cutline.t == 0
    with events.site.connect() as conn:
        operators.resume(conn, table_id)
    daemon.cycle(events.site, leader, schedule, stop)
    assert events.site.reader.state(events.name).cutline.t == 200


def test_a_still_table_is_not_looked_at_again_until_something_happens_to_it(events: Events, leader: Leader) -> None:
    events.register()
    schedule, stop = Schedule(), threading.Event()
    site = events.site

    def until_still() -> None:
        for _ in range(12):
            daemon.cycle(site, leader, schedule, stop)
            with site.connect(autocommit=True) as conn:
                seen = glance(conn, None)
            schedule.offer(seen, site.clock.monotonic())
            if schedule.take(site.clock.monotonic()) is None:
                return
            schedule.running.clear()
        raise AssertionError("it never comes to rest")

    def wakes() -> bool:
        with site.connect(autocommit=True) as conn:
            # Another session's statistics take a moment to be seen.
            conn.execute("SELECT pg_stat_force_next_flush()")
            schedule.offer(glance(conn, None), site.clock.monotonic())
        return schedule.waiting > 0

    for change in (
        "INSERT INTO public.events VALUES (260, 260, 'new')",
        "CREATE TABLE public.events_300 PARTITION OF public.events FOR VALUES FROM (300) TO (400)",
        "ALTER TABLE public.events_300 RENAME TO events_renamed",
        "SELECT modak_read_begin('public.events')",
        "DROP TABLE public.events_renamed",
        "ALTER TABLE public.events ADD COLUMN more text",
    ):
        until_still()
        assert not wakes()
        events.sql(f"{change}; SELECT pg_stat_force_next_flush()" if change.startswith("INSERT") else change)
        deadline = site.clock.monotonic() + 60
        while not wakes() and site.clock.monotonic() < deadline:
            site.clock.sleep(0.2)
        assert wakes(), change


def test_workers_are_heard_of_and_take_leave(site: Site) -> None:
    pulse = Pulse(site.clock, interval_seconds=0.05)
    pulse.became("leading", 7)
    pulse.doing = lambda: {"running": [{"table": "public.events", "kind": "tier", "seconds": 1.0}], "waiting": 2}

    def known() -> list[operators.Worker]:
        with site.connect(autocommit=True) as conn:
            return operators.workers(conn)

    with pulse.beating(site.dsn):
        deadline = site.clock.monotonic() + 30
        while not known():
            assert site.clock.monotonic() < deadline
            site.clock.sleep(0.02)
        [worker] = known()
        assert (worker.holder, worker.role, worker.epoch) == (pulse.holder, "leading", 7)
        assert worker.doing["waiting"] == 2
        shown = CliRunner(env=environment(site)).invoke(app, ["top", "--once"])
        assert shown.exit_code == 0, shown.output
        assert pulse.holder in shown.output
        assert "tier public.events" in shown.output
        assert (worker.late, "late" in shown.output) == (False, False)
    assert known() == []


def test_a_leader_whose_heartbeat_is_late_is_shown_so_before_its_lease_ends(site: Site, leader: Leader) -> None:
    with site.connect(autocommit=True) as conn:
        holder = operators.lead(conn).holder
        for name, role, age in ((holder, "leading", 8), ("other", "standby", 0), ("gone", "leading", 3600)):
            conn.execute(
                "INSERT INTO modak.workers (holder, host, pid, version, role, started_at, doing, seen_at) VALUES"
                " (%s, 'h', 1, '0', %s, clock_timestamp(), '{}', clock_timestamp() - make_interval(secs => %s))",
                (name, role, age),
            )
        assert {each.holder: each.late for each in operators.workers(conn)} == {
            holder: True,
            "other": False,
            "gone": True,
        }
    lines = CliRunner(env=environment(site)).invoke(app, ["top", "--once"]).output.splitlines()
    assert any(line.startswith("late the leader has not been heard of for 8") for line in lines), lines
    roles = {line.split()[0]: " ".join(line.split()[1:3]) for line in lines if " ago " in line}
    assert (roles[str(holder)], roles["gone"]) == ("leading, late", "leading, late")
    assert roles["other"].startswith("standby –")


def environment(site: Site) -> dict[str, str]:
    return {
        "MODAK_PG_URL": site.dsn.safe(),
        "MODAK_PG_PASSWORD": site.dsn.password,
        "MODAK_HOME": str(site.settings.home.path),
    }


def test_the_command_line_holds_a_table_back_and_lets_it_go(events: Events) -> None:
    events.register()
    runner = CliRunner(env=environment(events.site))
    for words, said in (
        (("pause", "--reason", "a migration"), "public.events is held back."),
        (("pause",), "public.events was held back already."),
        (("top", "--once"), "a migration"),
        (("resume",), "public.events goes on with the next round."),
        (("resume",), "public.events was not held back."),
    ):
        more = () if words[0] == "top" else ("--table", "public.events")
        result = runner.invoke(app, [words[0], *more, *words[1:]])
        assert result.exit_code == 0, result.output
        assert said in result.output
    assert runner.invoke(app, ["pause", "--table", "public.nothing"]).exit_code == 1
