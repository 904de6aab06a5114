"""Work beside the crew is seen like the crew's own: while it runs, and while it waits after a failure."""

from __future__ import annotations

import threading

import pytest

from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.runtime import metrics, working
from modak.runtime.pulse import Pulse
from modak.runtime.schedule import Item, Kind, Schedule
from modak.runtime.stores import Repeating


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
