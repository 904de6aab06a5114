"""Tiering on real parts: the everyday scenarios."""

from __future__ import annotations

import pytest

from modak.core.errors import Refused
from modak.runtime.leader import Leader
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from tests.tables.events import Events

ROWS = {(i, i, f"row {i}") for i in range(251)}


def states(events: Events) -> dict[str, str]:
    return {p.name: str(p.state) for p in events.site.reader.state(events.name).partitions}


def test_two_eligible_partitions_become_one_snapshot_and_leave_the_heap(events: Events, leader: Leader) -> None:
    events.register()
    report = events.tier(leader)
    assert report.moved_partitions == ("events_0", "events_100")
    assert report.rows == 200
    assert report.dropped == ("events_0", "events_100")
    assert events.site.reader.state(events.name).cutline.t == 200
    assert events.snapshots() == 1
    assert states(events) == {"events_0": "dropped", "events_100": "dropped", "events_200": "hot"}
    assert events.everything() == ROWS
    assert len(events.lake()) == 200


def test_a_second_pass_changes_nothing(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    before = events.site.reader.state(events.name).cutline
    report = events.tier(leader)
    assert not report.changed
    assert events.site.reader.state(events.name).cutline == before


def test_a_pin_lets_rows_tier_but_keeps_the_heap_copy(events: Events, leader: Leader) -> None:
    events.register()
    (pin,) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    report = events.tier(leader)
    assert report.rows == 200
    assert report.dropped == ()
    assert events.sql("SELECT count(*) FROM public.events WHERE ts < 200") == [(200,)]
    events.sql(f"SELECT modak_read_end({pin[0]})")
    assert events.tier(leader).dropped == ("events_0", "events_100")


def test_a_new_partition_is_picked_up(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    assert events.tier(leader).moved_partitions == ("events_200",)
    assert events.everything() == ROWS | {(350, 350, "new")}


def test_a_table_without_rows_waits(site: Site, leader: Leader) -> None:
    events = Events.create(site, last=-1)
    events.register()
    report = events.tier(leader)
    assert report.rows == 0
    assert report.blocked is not None
    assert "no rows" in report.blocked


def test_empty_old_partitions_move_the_cut_line_without_a_snapshot(site: Site, leader: Leader) -> None:
    events = Events.create(site, last=-1)
    events.sql("INSERT INTO public.events VALUES (1, 250, 'only')")
    events.register()
    report = events.tier(leader)
    assert report.moved_partitions == ("events_0", "events_100")
    assert events.site.reader.state(events.name).cutline.t == 200
    assert events.everything() == {(1, 250, "only")}


def test_registering_twice_is_a_no_op_and_a_difference_is_refused_by_name(events: Events) -> None:

    assert events.register().created
    assert not events.register().created
    with pytest.raises(Refused, match="--partition-width"):
        register(events.site, RegisterRequest(events.name, ("id",), "ts", partition_width="50"))
    with pytest.raises(Refused, match="--pk"):
        register(events.site, RegisterRequest(events.name, ("ts",), "ts"))
