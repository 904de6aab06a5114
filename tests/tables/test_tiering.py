"""Tiering on real parts: the everyday scenarios."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modak.core.errors import Refused
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.storage.uri import local_path
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.status import collect
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.readers import by_duckdb

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


def test_the_status_tells_what_a_pass_did_on_both_sides(events: Events, leader: Leader) -> None:
    def heap_bytes() -> int:
        ((found,),) = events.sql(
            "SELECT sum(pg_table_size(inhrelid)) FROM pg_inherits"
            " WHERE inhparent = 'public.events'::regclass AND inhrelid::regclass::text NOT LIKE '%_modak_spill'"
        )
        return int(found)

    events.register()
    (pin,) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    (before,) = collect(events.site)
    assert (before.cut_line, before.high_water, before.lag) == ("0", "250", "250")
    assert (before.lake_bytes, before.lake_files, before.lake_rows) == (0, 0, 0)
    assert before.heap_bytes == heap_bytes() > 0

    report = events.tier(leader)
    (moved,) = collect(events.site)
    files = list(Path(local_path(events.site.reader.state(events.name).table.location)).rglob("*.parquet"))
    assert moved.lake_bytes == report.bytes == sum(file.stat().st_size for file in files) > 0
    assert (moved.lake_files, moved.lake_rows) == (report.files, 200)
    assert (moved.cut_line, moved.high_water, moved.lag) == ("200", "250", "50")
    assert (moved.partitions, moved.pins) == ({"tiered": 2, "hot": 1}, 1)
    assert re.fullmatch(r"tier done, 200 rows, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", moved.last_operation)
    assert moved.heap_bytes == heap_bytes() >= before.heap_bytes, "the heap copy is still there"

    events.sql(f"SELECT modak_read_end({pin[0]})")
    assert events.tier(leader).dropped == ("events_0", "events_100")
    (dropped,) = collect(events.site)
    assert 0 < dropped.heap_bytes == heap_bytes() < moved.heap_bytes
    assert (dropped.lake_bytes, dropped.lag) == (moved.lake_bytes, "50")
    assert dropped.problems == ()


def test_a_time_key_is_tiered_by_the_tiering_lag_and_dropped_by_the_longer_reclaim_lag(
    fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object
) -> None:
    lags = {"MODAK_TIERING_LAG": "7d", "MODAK_RECLAIM_LAG": "14d"}
    with (
        open_site(settings_for(fresh_database, warehouse, spark_home, **lags)) as site,
        Leader.campaign(site, 5) as leader,
    ):
        weekly = Events(site, TableName("public", "weekly"))
        weekly.sql(
            "CREATE TABLE public.weekly (id bigint, at timestamptz, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)"
        )
        for number, (lower, upper) in enumerate([(1, 8), (8, 15), (15, 22), (22, 29)]):
            weekly.sql(
                f"CREATE TABLE public.week_{number} PARTITION OF public.weekly"
                f" FOR VALUES FROM ('2026-01-{lower:02} 00:00+00') TO ('2026-01-{upper:02} 00:00+00')"
            )
        weekly.sql(
            "INSERT INTO public.weekly SELECT d, '2026-01-01 12:00+00'::timestamptz + (d - 1) * interval '24 hours'"
            " FROM generate_series(1, 14) AS d"
        )
        register(site, RegisterRequest(weekly.name, ("id",), "at"))
        # Time goes on with the rows: the lags are measured from the newest one.
        assert not weekly.tier(leader).changed
        weekly.sql("INSERT INTO public.weekly VALUES (15, '2026-01-15 00:00+00')")
        report = weekly.tier(leader)
        assert (report.moved_partitions, report.dropped) == (("week_0",), ())
        assert {row["id"] for row in by_duckdb(site, weekly.name)} == set(range(1, 8))
        weekly.sql("INSERT INTO public.weekly VALUES (16, '2026-01-21 23:59:59.999999+00')")
        assert not weekly.tier(leader).changed
        assert weekly.sql("SELECT count(*) FROM public.week_0") == [(7,)]
        weekly.sql("INSERT INTO public.weekly VALUES (17, '2026-01-22 00:00+00')")
        report = weekly.tier(leader)
        assert (report.moved_partitions, report.dropped) == (("week_1",), ("week_0",))
        assert states(weekly) == {"week_0": "dropped", "week_1": "tiered", "week_2": "hot", "week_3": "hot"}
        assert {row["id"] for row in by_duckdb(site, weekly.name)} == set(range(1, 15))
        assert weekly.sql("SELECT min(id), count(*) FROM public.weekly") == [(8, 10)]
