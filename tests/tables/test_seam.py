"""Seam reads on real parts: heap, lake and delta are one table, at one point in time."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import functions

import modak
from modak.catalog import pins
from modak.core import faults
from modak.core.errors import ModakError, UsageError
from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.runtime.reading import Snapshot
from modak.spark.pushdown import asked
from modak.storage.uri import local_path
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.seam import delta as seam_delta
from modak.tables.seam import sieve as seam_sieve
from modak.tables.seam.columns import struct_of
from modak.tables.seam.heap import heap_queries
from modak.tables.seam.pinned import Point
from modak.tables.seam.plan import Span
from modak.tables.site import Site
from tests.tables.events import Events, Row
from tests.tables.test_foreign_commits import once_at
from tests.tables.test_readers import MIXED, VALUES

pytestmark = pytest.mark.spark


def rows(frame: Any) -> list[Row]:
    return sorted(tuple(row) for row in frame.collect())


@contextmanager
def at(site: Site, *tables: str) -> Iterator[Snapshot]:
    with modak.snapshot(site.spark, tables or None, settings=site.settings) as point:
        yield point


@pytest.fixture
def tiered(events: Events, leader: Leader) -> Events:
    """T is 200: rows 0…199 are in the lake, 200…250 in the heap."""
    events.register()
    assert events.tier(leader).rows == 200
    return events


def correct(events: Events, key: int, body: str | None) -> None:
    """A correction of a cold row, as the capture trigger or the spill leaves it."""
    image = None if body is None else json.dumps({"id": str(key), "ts": str(key), "body": body})
    table = events.site.reader.state(events.name).table.table_id
    with events.site.connect(autocommit=True) as conn:
        conn.execute("SELECT modak.record_change(%s, %s::text, %s, NULL, %s::jsonb)", (table, key, key, image))


def scans(frame: Any) -> str:
    """The physical plan, which names what is opened."""
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_one_table_across_heap_lake_and_delta(tiered: Events) -> None:
    correct(tiered, 5, "corrected")
    correct(tiered, 6, None)
    frame = modak.read(tiered.site.spark, "public.events", settings=tiered.site.settings)
    found = {row[0]: row for row in rows(frame)}
    assert len(found) == 250
    assert found[5] == (5, 5, "corrected")
    assert 6 not in found
    assert found[250] == (250, 250, "row 250")
    password = tiered.site.dsn.password
    assert password not in scans(frame)
    assert password not in frame._jdf.queryExecution().toString()


def test_filters_and_columns_reach_every_part_and_change_no_answer(tiered: Events) -> None:
    """Hazard 15: a correction makes a matching row non-matching, and the reverse."""
    correct(tiered, 5, "odd one")
    correct(tiered, 150, "row 250")
    correct(tiered, 7, None)
    with at(tiered.site) as now:
        assert rows(now.read("events", where="body = 'row 5'")) == []
        assert rows(now.read("events", ["id"], "body = 'odd one'")) == [(5,)]
        assert rows(now.read("events", ["body", "id"], functions.col("body") == "row 250")) == [
            ("row 250", 150),
            ("row 250", 250),
        ]
        assert rows(now.read("events", ["ID"], "id in (4, 5, 7, 249) and ts < 1000")) == [(4,), (5,), (249,)]
        assert now.read("events", where="ts between 198 and 201").count() == 4
        assert now.read("events", []).count() == 250
        assert now.read("events", where="1 = 0").count() == 0
        assert rows(now.read("events", ["id"], "body like 'row 20_'")) == [(n,) for n in range(200, 210)]
        with pytest.raises(UsageError, match="no column 'nothing'"):
            now.read("events", ["nothing"])
        with pytest.raises(UsageError, match="not part of this snapshot"):
            now.read("public.others")


def test_a_large_delta_is_read_by_tasks_with_the_same_answer(tiered: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in range(20):
        correct(tiered, key, f"new {key}" if key % 2 else None)
    with at(tiered.site) as now:
        small = rows(now.read("events"))
        monkeypatch.setattr(seam_delta, "LOCAL_ROWS", 0)
        assert rows(now.read("events")) == small
        assert len(small) == 241
    assert {row[2] for row in small if row[0] < 20} == {f"new {key}" for key in range(1, 20, 2)}


def test_keys_that_do_not_fit_into_the_plan_are_joined_with_the_same_answer(
    tiered: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in range(0, 40, 2):
        correct(tiered, key, f"new {key}" if key % 4 else None)
    with at(tiered.site) as now:
        sifted = now.read("events")
        assert "Join" not in scans(sifted)
        expected = rows(sifted)
        assert len(expected) == 241
        monkeypatch.setattr(seam_sieve, "MOST_IN_BUCKET", 0)
        joined = now.read("events")
        assert "LeftAnti" in scans(joined)
        assert rows(joined) == expected


def test_a_hot_query_never_opens_the_lake_and_a_cold_one_never_the_heap(tiered: Events) -> None:
    site = tiered.site
    state = site.reader.state(tiered.name)
    folder = Path(local_path(state.table.location) or "")
    with at(site) as now:
        cold = now.read("events", where="ts < 200")
        assert "MapInArrow" not in scans(cold)
        assert "BatchScan" in scans(cold)
        assert "Join" not in scans(cold), "there are no corrections to lay over it"
        assert "array_contains" not in scans(cold)
        assert cold.count() == 200
        hot = now.read("events", where="ts >= 200")
        assert "BatchScan" not in scans(hot)
    shutil.move(folder, folder.with_name("elsewhere"))
    with at(site) as now:
        assert now.read("events", where="ts >= 200 and id <> 3").count() == 51
        with pytest.raises(Exception, match="metadata"):
            now.read("events").count()


def test_a_narrow_query_opens_only_the_files_and_leaves_that_may_hold_its_rows(tiered: Events) -> None:
    site = tiered.site
    tiered.add_partition(300)
    correct(tiered, 150, "corrected")
    folder = Path(local_path(site.reader.state(tiered.name).table.location) or "")
    for file in folder.rglob("*_truncate=0/*.parquet"):
        file.unlink()
    with at(site) as now:
        assert rows(now.read("events", where="ts between 149 and 150")) == [
            (149, 149, "row 149"),
            (150, 150, "corrected"),
        ]
        assert rows(now.read("events", ["body"], "id = 151")) == [("row 151",)]
        with pytest.raises(Exception, match="truncate=0"):
            now.read("events", where="id = 5").count()
    point = Point(site, [tiered.name])
    try:
        table = point.table(tiered.name)
        narrow = asked(site.spark, struct_of(table.shape.columns), "ts = 230").predicate
        (query,) = heap_queries(table, Span(230, 231), table.shape.columns, narrow, cores=2)
        assert '"events_200"' in query
        assert '"ts" = (230)' in query
    finally:
        point.close()


def test_all_reads_of_a_snapshot_see_one_moment(tiered: Events) -> None:
    other = Events.create(tiered.site, partitions=1, last=5, name="other")
    other.register()
    with at(tiered.site) as now:
        assert now.tables == ("public.events", "public.other")
        tiered.sql("DELETE FROM public.events WHERE ts >= 200")
        other.sql("INSERT INTO public.other VALUES (6, 6, 'late')")
        correct(tiered, 5, "late")
        assert now.read("events").count() == 251
        assert now.read("other").count() == 6
        assert rows(now.read("events", ["body"], "id = 5")) == [("row 5",)]
    with at(tiered.site) as then:
        assert then.read("events").count() == 200
        assert then.read("other").count() == 7
        assert rows(then.read("events", ["body"], "id = 5")) == [("late",)]


def test_a_snapshot_stays_readable_while_the_table_is_tiered_on(tiered: Events, leader: Leader) -> None:
    tiered.add_partition(300)
    tiered.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    with at(tiered.site) as now:
        tiered.sql("UPDATE public.events SET body = 'changed' WHERE id = 210")
        assert tiered.tier(leader).cut_to == "300"
        assert now.read("events").count() == 252
        assert rows(now.read("events", ["body"], "id = 210")) == [("row 210",)]
    with at(tiered.site) as then:
        assert then.read("events").count() == 252
        assert rows(then.read("events", ["body"], "id = 210")) == [("changed",)]


def test_a_reader_is_not_in_the_way_of_new_partitions(tiered: Events) -> None:
    """The lock on the table itself would queue the application behind whoever adds a partition."""
    with at(tiered.site) as now:
        assert now.read("events").count() == 251
        tiered.sql(
            "SET lock_timeout = '1s'; CREATE TABLE public.events_300 PARTITION OF public.events"
            " FOR VALUES FROM (300) TO (400)"
        )
        tiered.sql("CREATE TABLE public.events_400 (LIKE public.events INCLUDING ALL)")
        tiered.sql(
            "SET lock_timeout = '1s'; ALTER TABLE public.events ATTACH PARTITION public.events_400"
            " FOR VALUES FROM (400) TO (500)"
        )
        tiered.sql("INSERT INTO public.events VALUES (350, 350, 'late'), (450, 450, 'late')")
        assert now.read("events").count() == 251
        with pytest.raises(psycopg.errors.LockNotAvailable):
            tiered.sql("SET lock_timeout = '1s'; TRUNCATE public.events_200")
    with at(tiered.site) as now:
        assert now.read("events").count() == 253


def test_a_reader_is_not_in_the_way_of_partitions_that_it_reads_from_the_lake(events: Events, leader: Leader) -> None:
    """Else readers that overlap each other would keep a partition in the heap for ever."""
    events.register()
    earlier = pins.begin(events.site.dsn, events.name)
    assert events.tier(leader).dropped == ()
    with events.site.connect() as conn:
        pins.end(conn, earlier.pin_id)
    with at(events.site) as now:
        assert now.read("events").count() == 251
        assert events.tier(leader).dropped == ("events_0", "events_100")
        events.sql("SELECT modak_delete('public.events', '7', 7)")
        assert now.read("events").count() == 251
    with at(events.site) as now:
        assert now.read("events").count() == 250


def test_a_partition_that_the_catalog_has_elsewhere_is_held_all_the_same(tiered: Events) -> None:
    tiered.sql("UPDATE modak.partitions SET lower_bound = 0, upper_bound = 100 WHERE partition_name = 'events_200'")
    with at(tiered.site) as now:
        assert now.read("events").count() == 251
        with pytest.raises(psycopg.errors.LockNotAvailable):
            tiered.sql("SET lock_timeout = '1s'; TRUNCATE public.events_200")


def test_every_type_is_the_same_in_heap_lake_and_delta(site: Site, leader: Leader) -> None:
    table = Events(site, TableName("public", "mixed"))
    table.sql(MIXED)
    for lower in (0, 100, 200):
        table.add_partition(lower)
    table.sql(f"INSERT INTO public.mixed VALUES {VALUES}")
    table.sql(
        "CREATE TEMP TABLE copy AS SELECT * FROM public.mixed WHERE id <= 3;"
        "UPDATE copy SET ts = ts + 200; INSERT INTO public.mixed SELECT * FROM copy"
    )
    register(site, RegisterRequest(table.name, ("id",), "ts"))
    # While it is pinned the cold partition stays, so a plain update is captured.
    table.sql("SELECT modak_read_begin('public.mixed')")
    assert table.tier(leader).rows == 4
    with at(site) as now:
        frame = now.read("mixed").drop("ts").orderBy("id")
        lake = site.spark.table("modak.modak.public.mixed")
        assert frame.schema.simpleString() == lake.drop("ts").schema.simpleString()
        cold = str(now.read("mixed", where="ts < 100").drop("ts").orderBy("id").collect())
        hot = str(now.read("mixed", where="ts >= 200").drop("ts").orderBy("id").collect())
    table.sql("UPDATE public.mixed SET word = word WHERE ts < 100")
    assert table.sql("SELECT count(*) FROM modak.delta WHERE op = 1") == [(3,)]
    with at(site) as now:
        corrected = now.read("mixed", where="ts < 100")
        assert "array_contains" in scans(corrected), "the overlay is laid over the lake"
        overlaid = str(corrected.drop("ts").orderBy("id").collect())
    assert cold == str(lake.where("ts < 100").drop("ts").orderBy("id").collect())
    assert hot == cold
    assert overlaid == cold


def test_time_keys_and_keys_without_the_tier_key(site: Site, leader: Leader) -> None:
    """Composite text keys with separators in them, and a tier key that only the delta's own column tells."""
    table = Events(site, TableName("public", "readings"))
    table.sql(
        "CREATE TABLE public.readings (device text, at timestamptz NOT NULL, day date NOT NULL, value int,"
        " PRIMARY KEY (device, day, at)) PARTITION BY RANGE (at);"
        "CREATE TABLE public.readings_1 PARTITION OF public.readings"
        " FOR VALUES FROM ('2024-01-01 00:00+00') TO ('2024-01-02 00:00+00');"
        "CREATE TABLE public.readings_2 PARTITION OF public.readings"
        " FOR VALUES FROM ('2024-01-02 00:00+00') TO ('2024-01-03 00:00+00');"
        "INSERT INTO public.readings SELECT 'd' || chr(31) || chr(92) || n % 2, t, '2024-02-29', n"
        " FROM generate_series(0, 47) n,"
        " LATERAL (SELECT timestamptz '2024-01-01 00:00+00' + n * interval '1 hour') x(t)"
    )
    register(site, RegisterRequest(table.name, ("device", "day"), "at"))
    table.sql("SELECT modak_read_begin('public.readings')")
    assert table.tier(leader).rows == 24
    table.sql("UPDATE public.readings SET value = -1 WHERE value = 3; DELETE FROM public.readings WHERE value = 4")
    with at(site) as now:
        assert rows(now.read("readings", ["value"])) == [(-1,), *((n,) for n in range(48) if n not in (3, 4))]
        cold = now.read("readings", ["value"], "at < timestamp'2024-01-01 05:00:00Z'")
        assert "MapInArrow" not in scans(cold)
        assert rows(cold) == [(-1,), (0,), (1,), (2,)]
        assert (
            now.read("readings", where="at >= timestamp'2024-01-02 00:00:00Z' and day = date'2024-02-29'").count() == 24
        )


def test_columns_that_were_added_renamed_and_dropped_show_what_postgres_shows(tiered: Events) -> None:
    correct(tiered, 5, "corrected")
    tiered.sql("ALTER TABLE public.events RENAME COLUMN body TO text")
    tiered.sql(
        "ALTER TABLE public.events ADD COLUMN level int DEFAULT 7,"
        " ADD COLUMN since timestamp DEFAULT '2024-01-01 12:00'"
    )
    tiered.sql("INSERT INTO public.events VALUES (251, 251, 'new', 9, NULL)")
    with at(tiered.site) as now:
        found = {row[0]: row[2:] for row in rows(now.read("events"))}
        (spread,) = now.read("events").selectExpr("count(since)", "max(cast(since as string))", "sum(level)").collect()
    assert found[5][:2] == ("corrected", 7)
    assert found[6][:2] == ("row 6", 7)
    assert found[210][:2] == ("row 210", 7)
    assert found[251][:2] == ("new", 9)
    assert tuple(spread) == (251, "2024-01-01 12:00:00", 251 * 7 + 9)


TRADES = (
    "RENAME COLUMN a TO c",
    "RENAME COLUMN b TO a",
    "RENAME COLUMN c TO b",
    "RENAME COLUMN body TO text",
    "ADD COLUMN body text DEFAULT 'none'",
    "DROP COLUMN gone",
    "ADD COLUMN gone text",
)
"""Names that are used again before the lake follows: two swap theirs, two are given to new columns."""


def test_columns_whose_names_are_used_again_are_told_apart_by_the_age_of_a_correction(
    events: Events, leader: Leader
) -> None:
    events.sql("ALTER TABLE public.events ADD COLUMN a text, ADD COLUMN b text, ADD COLUMN gone text")
    events.register()
    assert events.tier(leader).rows == 200
    image = '{"id": 1, "ts": 1, "body": "before", "a": "a", "b": "b", "gone": "old"}'
    events.sql(f"SELECT modak_upsert('public.events', '{image}')")
    for trade in TRADES:
        events.sql(f"ALTER TABLE public.events {trade}")
    image = '{"id": 2, "ts": 2, "text": "after", "a": "A", "b": "B", "body": "new", "gone": "new"}'
    events.sql(f"SELECT modak_upsert('public.events', '{image}')")
    expected = [
        ("before", "b", "a", "none", None),
        ("after", "A", "B", "new", "new"),
        ("row 3", None, None, "none", None),
    ]

    def shown(now: Snapshot) -> list[Row]:
        return [
            tuple(row) for row in now.read("events", ["text", "a", "b", "body", "gone"], "id in (1, 2, 3)").collect()
        ]

    with at(events.site) as now:
        assert sorted(shown(now)) == sorted(expected)
        # The lake follows while the point holds, with other names in its metadata than in what the point sees.
        assert fold(events.site, leader.epoch, events.name).rows == 2
        assert sorted(shown(now)) == sorted(expected)
    with at(events.site) as now:
        assert sorted(shown(now)) == sorted(expected)


def test_a_fold_between_pin_and_snapshot_takes_no_name_from_a_correction(tiered: Events, leader: Leader) -> None:
    correct(tiered, 5, "corrected")
    tiered.sql("ALTER TABLE public.events RENAME COLUMN body TO text")
    tiered.sql("ALTER TABLE public.events ADD COLUMN body text DEFAULT 'none'")

    def follow() -> None:
        fold(tiered.site, leader.epoch, tiered.name)
        correct(tiered, 7, None)
        fold(tiered.site, leader.epoch, tiered.name)

    once_at("pins.after_begin", follow)
    with at(tiered.site) as now:
        faults.watch(None)
        found = rows(now.read("events", ["text", "body"], "id in (5, 6, 7)"))
        assert found == [("corrected", "none"), ("row 6", "none")]


def test_a_snapshot_that_has_ended_or_was_lost_fails_and_never_returns_less(tiered: Events) -> None:
    site = tiered.site
    with at(site) as now:
        frame = now.read("events")
    with pytest.raises(ModakError, match="has ended"):
        frame.count()
    with pytest.raises(ModakError, match="has ended"):
        now.read("events")
    with pytest.raises(ModakError, match="a pin lapsed") as lapsed, at(site) as now:
        tiered.sql("UPDATE modak.read_pins SET expires_at = now() - interval '1 s'")
    assert lapsed.value.code == "seam.snapshot_lost"
    with pytest.raises(ModakError, match="connection ended") as lost, at(site) as now:
        tiered.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'modak read'")
    assert lost.value.retryable
    assert tiered.sql("SELECT count(*) FROM modak.read_pins") == [(0,)]


def test_a_read_that_cannot_be_is_refused_by_name_and_leaves_no_pin(tiered: Events) -> None:
    site = tiered.site
    with pytest.raises(UsageError) as refused:
        Point(site, [tiered.name], lifetime_seconds=0)
    assert refused.value.code == "seam.lifetime"
    with pytest.raises(UsageError) as refused:
        modak.read_lake(site.spark, "public.events", settings=site.settings)
    assert refused.value.code == "seam.mode"

    def replace() -> None:
        tiered.sql("ALTER TABLE public.events RENAME TO former")
        tiered.sql("CREATE TABLE public.events (LIKE public.former INCLUDING ALL)")

    once_at("pins.after_begin", replace)
    with pytest.raises(ModakError) as replaced:
        modak.read(site.spark, "public.events", settings=site.settings)
    faults.watch(None)
    assert replaced.value.code == "seam.table_replaced"
    assert tiered.sql("SELECT count(*) FROM modak.read_pins") == [(0,)]


def test_pins_are_renewed_while_a_snapshot_is_open(tiered: Events) -> None:
    site = tiered.site
    with modak.snapshot(site.spark, ["events"], settings=site.settings, lifetime_seconds=1.5) as now:
        time.sleep(3)
        assert now.read("events").count() == 251


def test_a_read_lets_go_once_no_job_has_run_for_a_while(events: Events) -> None:
    events.register()
    busy, over = threading.Event(), threading.Event()
    busy.set()
    point = Point(events.site, [events.name])
    point.end_when_idle(0.5, busy.is_set, over.set)
    assert not over.wait(2.5)
    point.check()
    busy.clear()
    assert over.wait(30)
    with pytest.raises(ModakError, match="has ended"):
        point.table(events.name)
    assert events.sql("SELECT count(*) FROM modak.read_pins") == [(0,)]


def test_errors_of_the_data_keep_their_name(site: Site) -> None:
    table = Events.create(site, partitions=1, last=-1)
    table.sql("ALTER TABLE public.events ADD COLUMN n numeric")
    table.register()
    table.sql("INSERT INTO public.events VALUES (1, 1, 'x', 'NaN')")
    with at(site) as now, pytest.raises(ModakError) as raised:
        now.read("events").collect()
    assert raised.value.code == "types.not_a_number"
