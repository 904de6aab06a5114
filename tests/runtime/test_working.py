"""Work beside the crew is seen like the crew's own: while it runs, and while it waits after a failure."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.runtime import metrics, working
from modak.runtime.pulse import Pulse
from modak.runtime.schedule import Item, Kind, Schedule
from modak.runtime.stores import Repeating

NOWHERE = Dsn("127.0.0.1", 1, "nowhere", "nobody", "")


def counted(kind: str) -> float:
    return metrics.REGISTRY.get_sample_value("modak_work_duration_seconds_count", {"kind": kind}) or 0.0


def test_work_is_shown_while_it_runs_and_timed_when_it_ends() -> None:
    before = counted("test")
    with working.doing("test", "public.events"):
        [shown] = [each for each in working.shown()["running"] if each["kind"] == "test"]
        assert shown["table"] == "public.events"
        assert counted("test") == before
    assert [each for each in working.shown()["running"] if each["kind"] == "test"] == []
    with pytest.raises(ValueError, match="no"), working.doing("test"):
        raise ValueError("no")
    assert counted("test") == before + 2


def test_a_failure_is_shown_with_what_to_do_until_the_work_succeeds() -> None:
    ended, tries = threading.Event(), []

    def act() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ModakError("a.code", "It failed.", hint="Try harder.")
        ended.wait(30)

    pulse = Pulse()
    with Repeating("stubborn", 0.01, act):
        while len(tries) < 3:
            ended.wait(0.005)
        [told] = [each for each in pulse.shown()["failing"] if each["kind"] == "stubborn"]
        assert (told["code"], told["message"], told["hint"], told["times"]) == (
            "a.code",
            "It failed.",
            "Try harder.",
            2,
        )
        ended.set()
        for _ in range(1000):
            if not [each for each in pulse.shown()["failing"] if each["kind"] == "stubborn"]:
                break
            threading.Event().wait(0.01)
    assert [each for each in pulse.shown()["failing"] if each["kind"] == "stubborn"] == []


def test_the_crew_and_the_others_are_shown_together() -> None:
    schedule = Schedule()
    item = Item(7, TableName("public", "events"), Kind.TIER)
    schedule.failed(item, 0.0, "a.code", ModakError("a.code", "It failed.", hint="Look."))
    pulse = Pulse()
    pulse.doing = lambda: schedule.shown(0.0)
    with working.doing("mirror", "public.orders"):
        shown = pulse.shown()
        assert ("mirror", "public.orders") in {(each["kind"], each["table"]) for each in shown["running"]}
        [told] = [each for each in shown["failing"] if each["table"] == "public.events"]
        assert (told["kind"], told["message"], told["hint"]) == ("tier", "It failed.", "Look.")
        assert shown["waiting"] == 0


def test_all_that_runs_and_fails_is_counted_however_much_of_it_is_shown() -> None:
    tables = [f"public.t{n}" for n in range(60)]
    pulse = Pulse()
    pulse.doing = lambda: {"running": [{}] * 50, "failing": [{}] * 50, "counts": {"running": 70, "failing": 80}}
    before = working.shown()["counts"]
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(working.doing("many", table))
            working.failed("many", table, ModakError("a.code", "It failed."), 60.0)
        shown = pulse.shown()
        told = {metric.name: metric.samples[0].value for metric in metrics.Fleet(NOWHERE, pulse, pulse.clock)._own()}
        for table in tables:
            working.well("many", table)
    assert len([each for each in shown["failing"] if each]) <= 50
    wanted = {"running": 130 + before["running"], "failing": 140 + before["failing"]}
    assert shown["counts"] == wanted
    assert {key: told[f"modak_schedule_{key}"] for key in wanted} == wanted
