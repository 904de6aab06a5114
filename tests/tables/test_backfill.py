"""Rows that were in the lake before a column came show what its default gives them."""

from __future__ import annotations

import uuid

import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.storage.store import normal
from tests.tables.events import Events

pytestmark = pytest.mark.spark


def add_and_tier(events: Events, leader: Leader, definition: str, *further: str) -> None:
    events.register()
    events.tier(leader)
    for statement in (f"ALTER TABLE public.events ADD COLUMN {definition}", *further):
        events.sql(statement)
    events.add_partition(300)
    events.sql("INSERT INTO public.events (id, ts, body) VALUES (301, 301, 'new')")
    assert events.tier(leader).moved_partitions == ("events_200",)


def test_a_default_that_differs_from_row_to_row_is_made_for_every_old_row(events: Events, leader: Leader) -> None:
    add_and_tier(events, leader, "mark uuid DEFAULT gen_random_uuid()")
    rows = events.lake()
    marks = {uuid.UUID(row[3]) for row in rows}
    assert len(rows) == 251
    assert len(marks) == 251
    kept = dict(events.sql("SELECT id, mark FROM public.events_200")) if "events_200" in tables(events) else {}
    assert all(uuid.UUID(row[3]) == kept[row[0]] for row in rows if row[0] in kept)
    assert not events.site.reader.state(events.name).unfinished
    assert "modak.backfill" not in properties(events)


def test_an_array_default_reaches_old_rows(events: Events, leader: Leader) -> None:
    add_and_tier(events, leader, "tags text[] DEFAULT '{a,b}'")
    assert {tuple(row[3]) for row in events.lake()} == {("a", "b")}


def test_an_array_default_reaches_old_rows_though_it_was_dropped_again(events: Events, leader: Leader) -> None:
    dropped = "ALTER TABLE public.events ALTER COLUMN tags DROP DEFAULT"
    add_and_tier(events, leader, "tags text[] DEFAULT '{a,b}'", dropped)
    assert {tuple(row[3]) for row in events.lake()} == {("a", "b")}


def test_a_default_runs_with_the_rights_of_the_tables_owner(events: Events, leader: Leader) -> None:
    events.sql("CREATE ROLE keeper")
    events.sql("GRANT keeper TO CURRENT_USER")
    events.sql("GRANT CREATE, USAGE ON SCHEMA public TO keeper")
    events.sql(
        "CREATE FUNCTION public.who() RETURNS text LANGUAGE sql VOLATILE AS $$ SELECT current_user || random() $$"
    )
    for table in ("events", "events_0", "events_100", "events_200"):
        events.sql(f"ALTER TABLE public.{table} OWNER TO keeper")
    add_and_tier(events, leader, "who text DEFAULT public.who()")
    old = [row[3] for row in events.lake() if row[0] < 200]
    assert len(old) == 200
    assert all(value.startswith("keeper") for value in old)
    events.sql("DROP OWNED BY keeper CASCADE")
    events.sql("DROP ROLE keeper")


@pytest.mark.parametrize("point", ["backfill.before_tasks", "backfill.after_tasks"])
def test_a_crash_in_a_back_fill_only_delays_it(events: Events, leader: Leader, point: str) -> None:
    events.register()
    events.tier(leader)
    events.sql("ALTER TABLE public.events ADD COLUMN mark uuid DEFAULT gen_random_uuid()")
    events.add_partition(300)
    events.sql("INSERT INTO public.events (id, ts, body) VALUES (301, 301, 'new')")
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        events.tier(leader)
    faults.arm(None)
    assert events.tier(leader).moved_partitions == ("events_200",)
    assert len({row[3] for row in events.lake()}) == 251
    state = events.site.reader.state(events.name)
    assert not state.unfinished
    assert state.cutline.snapshot_id is not None
    live = {normal(found.file.path) for found in events.site.lake.files(state.table.lake, state.cutline.snapshot_id)}
    older = {entry.uri for entry in events.site.store.list(f"{state.table.location}/data")} - live
    assert len(older) == 2, "only the files that the first snapshot still shows are left beside the live ones"


def tables(events: Events) -> set[str]:
    return {name for (name,) in events.sql("SELECT relname FROM pg_class WHERE relname LIKE 'events%'")}


def properties(events: Events) -> dict[str, str]:
    lake = events.site.lake.load(events.site.reader.state(events.name).table.lake)
    assert lake is not None
    return dict(lake.properties)
