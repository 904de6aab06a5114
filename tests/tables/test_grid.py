"""Partitions that are not as the cut-line wants them: told by name in `status` and in the log.

They are never in the way of the others. A leaf that cannot be dropped yet is dropped by a later pass.
"""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from modak.core.errors import ModakError
from modak.runtime.leader import Leader
from modak.tables.site import Site
from modak.tables.status import collect
from tests.tables.events import Events


def test_gaps_and_open_ended_and_default_partitions_are_told_by_name_and_hold_nothing_else_up(
    site: Site, leader: Leader
) -> None:
    events = Events.create(site, partitions=2, last=150)
    events.sql("CREATE TABLE public.before PARTITION OF public.events FOR VALUES FROM (MINVALUE) TO (-100)")
    events.sql("CREATE TABLE public.after PARTITION OF public.events FOR VALUES FROM (700) TO (MAXVALUE)")
    events.sql("CREATE TABLE public.rest PARTITION OF public.events DEFAULT")
    events.add_partition(400)
    events.add_partition(500)
    events.register()
    events.sql(
        "INSERT INTO public.events VALUES (450, 450, 'row 450'), (550, 550, 'row 550'), (-500, -500, 'row -500')"
    )
    wanted = set(events.sql("SELECT * FROM public.events WHERE ts >= 0"))

    with capture_logs() as logged:
        first, second = events.tier(leader), events.tier(leader)

    assert (first.moved_partitions, second.moved_partitions) == (("events_0", "events_100"), ())
    assert events.everything() == wanted, "what lies above the gap stays in the heap"
    (status,) = collect(site)
    assert status.cut_line == "200"
    said = [entry["finding"] for entry in logged if entry["event"] == "grid.finding"]
    for part in (
        "no partition for 200 to 400",
        "before starts at MINVALUE",
        "after ends at MAXVALUE",
        "DEFAULT partition rest",
    ):
        assert sum(part in problem for problem in status.problems) == 1, part
        assert sum(part in finding for finding in said) == 1, f"{part}: told once, not in every pass"

    events.add_partition(200, 200)
    assert events.tier(leader).moved_partitions == ("events_200", "events_400")
    assert not any("no partition for" in problem for problem in collect(site)[0].problems)
    assert events.everything() == wanted


def test_a_partition_that_cannot_be_dropped_is_dropped_when_it_can(events: Events, leader: Leader) -> None:
    events.register()
    wanted = set(events.sql("SELECT * FROM public.events"))
    events.sql("CREATE VIEW public.report AS SELECT count(*) FROM public.events_0")
    with pytest.raises(ModakError, match="view report depends on table events_0") as failure:
        events.tier(leader)
    assert "Drop what depends on it" in failure.value.hint
    assert events.snapshots() == 1
    assert events.everything() == wanted

    events.sql("DROP VIEW public.report")
    again = events.tier(leader)
    assert "events_0" in again.dropped
    assert (events.snapshots(), events.everything()) == (1, wanted)
    assert events.sql("SELECT relname FROM pg_class WHERE relname IN ('events_0', 'events_100')") == []
