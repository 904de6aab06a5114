"""Partitions are made ahead, and nobody ever waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs

from modak.core.names import TableName
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from tests.tables.conftest import settings_for
from tests.tables.events import Events

BOUNDS = """
    SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = %s::regclass AND c.relname NOT LIKE '%%_modak_spill' ORDER BY c.oid
"""


@pytest.fixture
def ahead(fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object) -> Iterator[Site]:
    """A site that keeps two partitions ahead and never finds anything old enough to tier."""
    more = {"MODAK_PREMAKE_PARTITIONS": "2", "MODAK_TIERING_LAG": "1000000000000000"}
    with open_site(settings_for(fresh_database, warehouse, spark_home, **more)) as site:
        yield site


@pytest.fixture
def lead(ahead: Site) -> Iterator[Leader]:
    with Leader.campaign(ahead, 5) as held:
        yield held


def bounds(table: Events) -> dict[str, str]:
    with table.site.connect() as conn:
        return dict(conn.execute(BOUNDS, (str(table.name),)).fetchall())


def test_two_widths_are_kept_ahead_and_a_rerun_makes_none(ahead: Site, lead: Leader) -> None:
    events = Events.create(ahead, partitions=2, last=150)
    events.register()
    assert events.tier(lead).premade == ("events_p200", "events_p300")
    assert events.tier(lead).premade == ()
    assert bounds(events)["events_p300"] == "FOR VALUES FROM ('300') TO ('400')"
    events.sql("INSERT INTO public.events VALUES (1, 399, 'fits')")
    assert events.tier(lead).premade == ("events_p400", "events_p500")
    # A partition made by us is like any other: keys, defaults and checks hold.
    with pytest.raises(psycopg.errors.UniqueViolation):
        events.sql("INSERT INTO public.events VALUES (1, 399, 'twice')")


@pytest.mark.parametrize("default", [False, True], ids=["", "with a DEFAULT partition"])
@pytest.mark.parametrize(
    "held",
    [
        "LOCK TABLE public.events IN SHARE UPDATE EXCLUSIVE MODE",
        "LOCK TABLE public.events IN ACCESS EXCLUSIVE MODE",
        "SELECT * FROM public.events",
        "INSERT INTO public.events VALUES (1077, 77, 'open')",
    ],
)
def test_a_busy_table_is_left_alone_within_milliseconds(ahead: Site, lead: Leader, held: str, default: bool) -> None:
    events = Events.create(ahead, partitions=2, last=150)
    if default:
        events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    events.register()
    with connect(ahead.dsn) as user, connect(ahead.dsn, autocommit=True) as other:
        user.execute(held)  # type: ignore[arg-type]
        other.execute("SET lock_timeout = '3s'")
        began = time.monotonic()
        if "ACCESS EXCLUSIVE" in held:
            # Not even a look at the table is possible; that waits for a short while only and is tried again.
            with pytest.raises(Exception, match=r"(?i)busy|lock"):
                events.tier(lead)
            assert time.monotonic() - began < 30
        else:
            made = events.tier(lead).premade
            blocked = "LOCK TABLE" in held or (default and "SELECT" in held)
            assert made == (() if blocked else ("events_p200", "events_p300"))
            # Nobody queues behind us: we have given up already.
            began = time.monotonic()
            other.execute("SELECT count(*) FROM public.events")
            other.execute("INSERT INTO public.events VALUES (1088, 88, 'meanwhile')")
            assert time.monotonic() - began < 1.0
        user.rollback()
    events.tier(lead)
    assert {"events_p200", "events_p300"} <= set(bounds(events))


def test_a_premake_that_meets_a_busy_table_is_said_and_tried_again(ahead: Site, lead: Leader) -> None:
    events = Events.create(ahead, partitions=2, last=150)
    events.register()
    with connect(ahead.dsn) as user:
        user.execute("LOCK TABLE public.events IN SHARE UPDATE EXCLUSIVE MODE")
        with capture_logs() as logged:
            report = events.tier(lead)
        user.rollback()
    (told,) = [entry for entry in logged if entry["event"].startswith("premake.")]
    assert (told["event"], told["log_level"]) == ("premake.deferred", "info")
    assert (told["table"], told["partition"]) == ("public.events", "events_p200")
    assert told["reason"] == "the table is busy"
    assert (report.premade, report.deferred) == ((), True)
    with capture_logs() as logged:
        report = events.tier(lead)
    assert [entry["event"] for entry in logged if entry["event"].startswith("premake.")] == ["premake.made"] * 2
    assert (report.premade, report.deferred) == (("events_p200", "events_p300"), False)


def test_months_are_made_as_calendar_months(ahead: Site, lead: Leader) -> None:
    table = Events(ahead, TableName("public", "monthly"))
    table.sql("CREATE TABLE public.monthly (id bigint, at timestamptz, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)")
    table.sql(
        "CREATE TABLE public.m1 PARTITION OF public.monthly"
        " FOR VALUES FROM ('2023-12-01 00:00+00') TO ('2024-01-01 00:00+00')"
    )
    table.sql("INSERT INTO public.monthly VALUES (1, '2023-12-24 18:00+00')")
    register(ahead, RegisterRequest(table.name, ("id",), "at"))
    assert table.tier(lead).premade == ("monthly_p20240101", "monthly_p20240201")
    assert bounds(table)["monthly_p20240201"] == (
        "FOR VALUES FROM ('2024-02-01 00:00:00+00') TO ('2024-03-01 00:00:00+00')"
    )


def test_a_name_that_is_taken_already_gets_a_number(ahead: Site, lead: Leader) -> None:
    events = Events.create(ahead, partitions=2, last=150)
    events.sql("CREATE TABLE public.events_p200 AS SELECT 'precious' AS what")
    events.register()
    assert events.tier(lead).premade == ("events_p200_1", "events_p300")
    assert events.sql("SELECT * FROM public.events_p200") == [("precious",)]


def test_rows_in_the_default_partition_are_in_the_way_and_everything_else_goes_on(
    fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: object
) -> None:
    more = {"MODAK_PREMAKE_PARTITIONS": "2"}
    with open_site(settings_for(fresh_database, warehouse, spark_home, **more)) as site:
        events = Events.create(site)
        events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
        events.register()
        events.sql("INSERT INTO public.events VALUES (1, 333, 'too early')")
        with Leader.campaign(site, 5) as leader:
            report = events.tier(leader)
        assert report.premade == ()
        assert report.moved_partitions == ("events_0", "events_100")
        codes = {finding.code: finding.message for finding in report.findings}
        assert "premake.failed" in codes
        assert "events_p300" in codes["premake.failed"]
        assert events.sql("SELECT body FROM public.events WHERE ts = 333") == [("too early",)]
