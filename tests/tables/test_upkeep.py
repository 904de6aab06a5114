"""Snapshots are counted, tags come and go with their pins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modak.lake.model import Snapshot
from modak.runtime.leader import Leader
from modak.tables import upkeep
from modak.tables.maintenance.engine import Embedded
from modak.tables.tidy import finish_expiries
from modak.tables.upkeep import surplus
from tests.tables.events import Events


def listed(*ids: int) -> list[Snapshot]:
    return [Snapshot(i, None, i, i, "append", {}) for i in ids]


def test_the_oldest_snapshots_go_first_and_kept_ones_never():
    assert surplus(listed(3, 1, 2, 4), limit=2, kept=set()) == (1, 2)
    assert surplus(listed(3, 1, 2, 4), limit=2, kept={1, 4}) == (2, 3)
    assert surplus(listed(1, 2), limit=1, kept={1, 2}) == ()
    assert surplus(listed(1, 2), limit=5, kept=set()) == ()


def test_nothing_goes_from_the_first_snapshot_on_that_a_reader_or_an_operation_holds():
    assert surplus(listed(5, 3, 1, 2, 4), limit=1, kept={5, 3}, held={3}) == (1, 2)
    assert surplus(listed(1, 2, 3, 4), limit=1, kept={1}, held={1}) == ()


def policy(events: Events, **values: Any) -> None:
    events.sql(f"UPDATE modak.tables SET maintenance_policy = '{json.dumps(values)}'")


def free(events: Events, leader: Leader) -> int:
    return finish_expiries(events.site, events.site.writer(leader.epoch), events.name, Embedded(events.site))


def tier_one_more(events: Events, leader: Leader, lower: int) -> None:
    events.add_partition(lower)
    events.sql(f"INSERT INTO public.events VALUES ({lower}, {lower}, 'next')")
    assert events.tier(leader).moved_partitions


def test_a_table_lists_no_more_snapshots_than_its_policy_allows(events: Events, leader: Leader) -> None:
    events.register()
    policy(events, snapshot_max_count=2, snapshot_min_retained=1)
    events.tier(leader)
    for lower in (300, 400, 500):
        tier_one_more(events, leader, lower)
    assert events.snapshots() == 2
    assert len(events.lake()) == 253
    assert {op.kind for op in events.site.reader.state(events.name).unfinished} == {"expire"}
    assert free(events, leader) == 0
    assert not events.site.reader.state(events.name).unfinished


@pytest.mark.parametrize(
    "more",
    [
        {"snapshot_expiry_enabled": False},
        {"maintenance_enabled": False},
        {"snapshot_min_retained": 4},
        {"snapshot_retention_hours": "by hand"},
    ],
)
def test_no_snapshot_goes_where_expiry_is_off_or_so_many_are_retained(
    events: Events, leader: Leader, more: dict[str, Any]
) -> None:
    events.register()
    policy(events, **{"snapshot_max_count": 2, "snapshot_min_retained": 1, **more})
    events.tier(leader)
    for lower in (300, 400, 500):
        tier_one_more(events, leader, lower)
    assert events.snapshots() == 4


def test_no_snapshot_goes_that_came_after_a_pinned_one(events: Events, leader: Leader) -> None:
    events.register()
    policy(events, snapshot_max_count=1, snapshot_min_retained=1)
    events.tier(leader)
    ((pin,),) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    for lower in (300, 400, 500):
        tier_one_more(events, leader, lower)
    assert events.snapshots() == 4
    events.sql(f"SELECT modak_read_end({pin})")
    tier_one_more(events, leader, 600)
    assert events.snapshots() == 1


def test_whoever_comes_second_to_expire_snapshots_has_nothing_left_to_do(
    events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.register()
    policy(events, snapshot_max_count=9, snapshot_min_retained=1)
    events.tier(leader)
    tier_one_more(events, leader, 300)
    policy(events, snapshot_max_count=1, snapshot_min_retained=1)
    writer, alone = events.site.writer(leader.epoch), upkeep.commit_aside

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(upkeep, "commit_aside", alone)
        assert upkeep.trim_snapshots(events.site, writer, events.name) == 1
        alone(*arguments)

    monkeypatch.setattr(upkeep, "commit_aside", overtaken)
    assert upkeep.trim_snapshots(events.site, writer, events.name) == 0
    assert events.snapshots() == 1
    assert free(events, leader) == 0
    assert not events.site.reader.state(events.name).unfinished


def test_a_pinned_snapshot_is_tagged_when_it_is_superseded_and_untagged_when_the_pin_ends(
    events: Events, leader: Leader
) -> None:
    events.register()
    events.tier(leader)
    pinned = events.site.reader.state(events.name).cutline.snapshot_id
    ((pin,),) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    tier_one_more(events, leader, 300)
    assert set(tags(events).values()) == {pinned}
    events.tier(leader)
    assert set(tags(events).values()) == {pinned}
    events.sql(f"SELECT modak_read_end({pin})")
    events.tier(leader)
    assert tags(events) == {}
    assert not events.site.reader.state(events.name).unfinished


def test_whoever_comes_second_to_release_a_tag_has_nothing_left_to_do(
    events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.register()
    events.tier(leader)
    ((pin,),) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    tier_one_more(events, leader, 300)
    events.sql(f"SELECT modak_read_end({pin})")
    writer, alone = events.site.writer(leader.epoch), upkeep.commit_aside

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(upkeep, "commit_aside", alone)
        assert upkeep.release_tags(events.site, writer, events.name)
        alone(*arguments)

    monkeypatch.setattr(upkeep, "commit_aside", overtaken)
    assert upkeep.release_tags(events.site, writer, events.name)
    assert tags(events) == {}
    assert not events.site.reader.state(events.name).unfinished


def test_the_tag_of_a_pin_that_is_committed_while_others_are_released_goes_with_that_pin(
    events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.register()
    events.tier(leader)
    first = events.site.reader.state(events.name).cutline.snapshot_id
    begin = "SELECT pin_id FROM modak.modak_read_begin('public.events')"
    writer, alone = events.site.writer(leader.epoch), upkeep.commit_aside
    with events.site.connect() as reader:
        late = reader.execute(begin).fetchone()
        early = events.sql(begin)
        tier_one_more(events, leader, 300)
        early += events.sql(begin)
        tier_one_more(events, leader, 400)
        assert len(tags(events)) == 2
        for (pin,) in early:
            events.sql(f"SELECT modak_read_end({pin})")

        def meanwhile(*arguments: Any) -> None:
            reader.commit()
            alone(*arguments)

        monkeypatch.setattr(upkeep, "commit_aside", meanwhile)
        assert upkeep.release_tags(events.site, writer, events.name)
    assert late is not None
    assert set(tags(events).values()) == {first}
    events.sql(f"SELECT modak_read_end({late[0]})")
    assert upkeep.release_tags(events.site, writer, events.name)
    assert tags(events) == {}
    assert not events.site.reader.state(events.name).unfinished


def tags(events: Events) -> dict[str, int]:
    lake = events.site.lake.load(events.site.reader.state(events.name).table.lake)
    assert lake is not None
    return dict(lake.tags)
