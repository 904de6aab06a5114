"""Hazards of moving rows out of the heap: rewrites, capture triggers, session settings, foreign keys."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from modak.core import faults
from modak.core.errors import Refused
from modak.core.names import TableName
from modak.postgres.connect import connect
from modak.runtime.leader import Leader
from modak.storage.uri import local_path
from modak.tables.observe import observe
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.plan import plan_reclaim
from modak.tables.tiering.reclaim import Reclaimed, reclaim
from tests.support.sample import sample
from tests.tables.events import Events

CITEXT = (
    """
CREATE TYPE public.citext;
CREATE FUNCTION public.citextin(cstring) RETURNS public.citext LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION public.citextout(public.citext) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE FUNCTION public.citextsend(public.citext) RETURNS bytea LANGUAGE internal STABLE STRICT AS 'textsend';
CREATE TYPE public.citext (
    INPUT = public.citextin, OUTPUT = public.citextout, SEND = public.citextsend,
    LIKE = text, CATEGORY = 'S', COLLATABLE = true
);
CREATE CAST (public.citext AS text) WITHOUT FUNCTION AS IMPLICIT;
CREATE FUNCTION public.citext_cmp(a public.citext, b public.citext) RETURNS int LANGUAGE sql IMMUTABLE STRICT
    AS $$ SELECT CASE WHEN lower(a::text) < lower(b::text) THEN -1 ELSE (lower(a::text) > lower(b::text))::int END $$;
"""
    + "".join(
        f"""
CREATE FUNCTION public.citext_{name}(a public.citext, b public.citext) RETURNS boolean LANGUAGE sql IMMUTABLE STRICT
    AS $$ SELECT public.citext_cmp(a, b) {sign} 0 $$;
CREATE OPERATOR public.{sign} (LEFTARG = public.citext, RIGHTARG = public.citext, FUNCTION = public.citext_{name});
"""
        for name, sign in (("lt", "<"), ("le", "<="), ("eq", "="), ("ge", ">="), ("gt", ">"))
    )
    + """
CREATE OPERATOR CLASS public.citext_ops DEFAULT FOR TYPE public.citext USING btree AS
    OPERATOR 1 public.<, OPERATOR 2 public.<=, OPERATOR 3 public.=, OPERATOR 4 public.>=, OPERATOR 5 public.>,
    FUNCTION 1 public.citext_cmp(public.citext, public.citext);
"""
)
ROWS = {(i, i, f"row {i}") for i in range(251)}
BREAKS = {
    "disabled": 'ALTER TABLE public.events_0 DISABLE TRIGGER "!modak_capture"',
    "switched off by a bulk loader": "ALTER TABLE public.events_0 DISABLE TRIGGER ALL",
    "dropped": 'DROP TRIGGER "!modak_capture" ON public.events_0',
    "replaced": """
        CREATE OR REPLACE FUNCTION public.nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE OR REPLACE TRIGGER "!modak_capture" AFTER INSERT OR UPDATE OR DELETE ON public.events_0
            FOR EACH ROW EXECUTE FUNCTION public.nothing();
        ALTER TABLE public.events_0 ENABLE ALWAYS TRIGGER "!modak_capture"
    """,
    "narrowed": """
        DROP TRIGGER "!modak_capture" ON public.events_0;
        CREATE TRIGGER "!modak_capture" AFTER DELETE ON public.events_0
            FOR EACH ROW EXECUTE FUNCTION modak.capture('1', '{1}', '2');
        ALTER TABLE public.events_0 ENABLE ALWAYS TRIGGER "!modak_capture"
    """,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every way in which a trigger can break; the everyday run takes a sample."""
    sample(metafunc, "how", BREAKS, 2)


def data_files(events: Events) -> int:
    folder = local_path(events.site.reader.state(events.name).table.location)
    assert folder is not None
    return len(list(Path(folder).rglob("*.parquet")))


def once(point: str, action: object) -> list[str]:
    """Do something the first time that the flow is at a point."""
    done: list[str] = []

    def watcher(reached: str) -> None:
        if reached == point and not done:
            done.append(reached)
            action()  # type: ignore[operator]

    faults.watch(watcher)
    return done


@pytest.mark.parametrize("statement", ["VACUUM FULL public.events_0", "TRUNCATE public.events_0"])
def test_a_rewrite_during_the_export_has_to_wait(events: Events, leader: Leader, statement: str) -> None:
    events.register()
    held_off = []

    def rewrite(point: str) -> None:
        if point in ("export.snapshot_taken", "export.after_tasks", "landing.prepared", "catalog.before_commit"):
            with connect(events.site.dsn, autocommit=True) as conn:
                conn.execute("SET lock_timeout = '30ms'")
                try:
                    conn.execute(statement)
                except (psycopg.errors.LockNotAvailable, psycopg.errors.ObjectNotInPrerequisiteState):
                    held_off.append(point)

    faults.watch(rewrite)
    assert events.tier(leader).rows == 200
    assert set(held_off) == {"export.snapshot_taken", "export.after_tasks", "landing.prepared", "catalog.before_commit"}
    assert events.everything() == ROWS


def test_a_rewrite_between_seal_and_snapshot_is_exported_as_it_then_is(events: Events, leader: Leader) -> None:
    events.sql("DELETE FROM public.events WHERE ts < 100 AND ts % 2 = 0")
    events.register()
    assert once("seal.after_trigger", lambda: events.sql("VACUUM FULL public.events_0")) == []
    assert events.tier(leader).rows == 150
    assert events.everything() == {row for row in ROWS if row[1] >= 100 or row[1] % 2}


def test_an_exporter_that_is_lost_starts_the_export_again(events: Events, leader: Leader) -> None:
    events.register()
    kill = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'modak export' AND datname = current_database()"
    )
    done = once("export.after_tasks", lambda: events.sql(kill))
    assert events.tier(leader).rows == 200
    assert done
    assert events.snapshots() == 1
    assert data_files(events) == 2, "the files of the lost export are gone"
    assert events.everything() == ROWS


@pytest.mark.parametrize("where", ["attached", "detached"])
def test_a_rewrite_between_commit_and_drop_forces_another_export(events: Events, leader: Leader, where: str) -> None:
    events.register()
    (pin,) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    events.tier(leader)
    if where == "detached":
        events.sql("ALTER TABLE public.events DETACH PARTITION public.events_0")
    events.sql("UPDATE public.events_0 SET body = 'late' WHERE id = 7")
    events.sql("VACUUM FULL public.events_0")
    events.sql(f"SELECT modak_read_end({pin[0]})")
    assert events.tier(leader).dropped == ()
    assert events.sql("SELECT to_regclass('public.events_0') IS NOT NULL") == [(True,)]
    assert events.delta() == {}, "the new export has the late write in it"
    assert events.snapshots() == 2
    assert events.tier(leader).dropped == ("events_0", "events_100")
    assert events.everything() == (ROWS - {(7, 7, "row 7")}) | {(7, 7, "late")}


def test_only_the_very_table_that_was_exported_is_dropped(events: Events, leader: Leader) -> None:
    events.register()

    def swap() -> None:
        events.sql("ALTER TABLE public.events_0 RENAME TO kept_aside")
        events.sql("CREATE TABLE public.events_0 AS SELECT 'precious' AS what")

    done = once("reclaim.before_drop", swap)
    report = events.tier(leader)
    faults.watch(None)
    assert done
    assert report.dropped == ()
    events.tier(leader)
    assert events.sql("SELECT * FROM public.events_0") == [("precious",)]
    assert events.everything() == ROWS


def test_a_partition_that_was_attached_again_with_other_bounds_is_kept_and_named(
    events: Events, leader: Leader
) -> None:
    events.register()
    (pin,) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    events.tier(leader)
    events.sql(f"SELECT modak_read_end({pin[0]})")

    def attach(upper: int) -> None:
        events.sql("ALTER TABLE public.events DETACH PARTITION public.events_100")
        events.sql(f"ALTER TABLE public.events ATTACH PARTITION public.events_100 FOR VALUES FROM (100) TO ({upper})")

    events.sql("ALTER TABLE public.events DETACH PARTITION public.events_200")
    events.sql("INSERT INTO public.events_200 VALUES (299, 299, 'aside')")
    attach(250)
    events.sql("INSERT INTO public.events VALUES (1000, 240, 'beyond the cut-line')")
    for _ in range(2):
        report = events.tier(leader)
        assert "events_100" not in report.dropped
        assert "grid.rebound" in {finding.code for finding in report.findings}
    assert (1000, 240, "beyond the cut-line") in events.sql("SELECT * FROM public.events")

    events.sql("DELETE FROM public.events WHERE id = 1000")
    attach(200)
    events.sql("ALTER TABLE public.events ATTACH PARTITION public.events_200 FOR VALUES FROM (200) TO (300)")
    assert events.tier(leader).dropped == ("events_100",)


def test_bounds_that_change_after_the_plan_keep_a_partition_too(events: Events, leader: Leader) -> None:
    events.register()
    (pin,) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    events.tier(leader)
    events.sql(f"SELECT modak_read_end({pin[0]})")
    with connect(events.site.dsn, autocommit=True) as conn:
        observed = observe(events.site, conn, events.name)
        plan = plan_reclaim(observed.state, 0)
        assert [partition.name for partition in plan.drop] == ["events_0", "events_100"]
        events.sql("ALTER TABLE public.events DETACH PARTITION public.events_200")
        events.sql("ALTER TABLE public.events DETACH PARTITION public.events_100")
        events.sql("ALTER TABLE public.events ATTACH PARTITION public.events_100 FOR VALUES FROM (100) TO (250)")
        assert reclaim(events.site, conn, leader.epoch, observed, plan) == Reclaimed(("events_0",))
    assert events.sql("SELECT count(*) FROM public.events_100") == [(100,)]


def test_a_partition_that_was_renamed_is_dropped_under_its_new_name(events: Events, leader: Leader) -> None:
    events.register()
    (pin,) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    events.tier(leader)
    events.sql("ALTER TABLE public.events_0 RENAME TO first_century")
    events.sql("CREATE TABLE public.events_0 AS SELECT 'precious' AS what")
    events.sql(f"SELECT modak_read_end({pin[0]})")
    assert events.tier(leader).dropped == ("first_century", "events_100")
    assert events.sql("SELECT * FROM public.events_0") == [("precious",)]
    assert events.everything() == ROWS


def test_a_broken_trigger_before_the_commit_forces_another_export(events: Events, leader: Leader, how: str) -> None:
    events.register()

    def unseen_write() -> None:
        events.sql(BREAKS[how])
        events.sql("INSERT INTO public.events VALUES (1000, 50, 'unseen')")

    # DROP TRIGGER has to wait for the export's lock, so it can only come before it.
    done = once("seal.after_trigger" if "DROP" in BREAKS[how] else "export.after_tasks", unseen_write)
    report = events.tier(leader)
    assert done
    assert report.rows == 201
    assert events.snapshots() == 1
    assert events.everything() == ROWS | {(1000, 50, "unseen")}


def test_a_broken_trigger_before_the_drop_forces_another_export(events: Events, leader: Leader, how: str) -> None:
    events.register()
    (pin,) = events.sql("SELECT pin_id FROM modak_read_begin('public.events')")
    events.tier(leader)
    events.sql(BREAKS[how])
    events.sql("UPDATE public.events SET body = 'unseen' WHERE id = 7")
    events.sql("DELETE FROM public.events WHERE id = 8")
    events.sql(f"SELECT modak_read_end({pin[0]})")
    assert events.tier(leader).dropped == ()
    expected = (ROWS - {(7, 7, "row 7"), (8, 8, "row 8")}) | {(7, 7, "unseen")}
    assert events.everything() == expected
    assert events.tier(leader).dropped == ("events_0", "events_100")
    assert events.everything() == expected


def test_a_trigger_broken_while_the_leaf_hangs_between_detach_and_drop_loses_nothing(
    events: Events, leader: Leader
) -> None:
    events.register()

    def unseen_write() -> None:
        events.sql(BREAKS["disabled"])
        events.sql("INSERT INTO public.events_0 VALUES (1000, 50, 'unseen')")

    done = once("reclaim.before_drop", unseen_write)
    assert events.tier(leader).dropped == ()
    faults.watch(None)
    assert done
    assert events.tier(leader).dropped == (), "exported again first"
    assert events.tier(leader).dropped == ("events_0", "events_100")
    assert events.sql("SELECT to_regclass('public.events_0')") == [(None,)]
    assert events.everything() == ROWS | {(1000, 50, "unseen")}


def test_truncate_of_a_sealed_partition_is_refused_with_a_way_out(events: Events, leader: Leader) -> None:
    events.register()
    events.sql("SELECT modak_read_begin('public.events')")
    events.tier(leader)
    for statement in ("TRUNCATE public.events_0", "TRUNCATE public.events"):
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="on its way to the lake") as refused:
            events.sql(statement)
        assert "DELETE" in (refused.value.diag.message_hint or "")
    events.sql("TRUNCATE public.events_200")
    assert events.cold() == {row for row in ROWS if row[1] < 200}


def test_a_replica_session_is_captured_too(events: Events, leader: Leader) -> None:
    events.register()
    events.sql("SELECT modak_read_begin('public.events')")
    events.tier(leader)
    events.sql("SET session_replication_role = replica; DELETE FROM public.events WHERE id = 5")
    assert events.delta() == {("5", 5): None}


def test_a_writers_session_settings_do_not_change_keys_or_values(site: Site, leader: Leader) -> None:
    table = Events(site, TableName("public", "moments"))
    table.sql(
        "CREATE TABLE public.moments (day date, at timestamptz, ts bigint, score float8, length interval, raw bytea,"
        " PRIMARY KEY (day, at, ts)) PARTITION BY RANGE (ts)"
    )
    table.add_partition(0)
    table.add_partition(100)
    row = "'2024-02-01', '2024-02-01 03:04:05.000006+00', {ts}, 0.1::float8 + 0.2::float8, '1 day 02:03', '\\x00ff'"
    table.sql(f"INSERT INTO public.moments VALUES ({row.format(ts=1)}), ({row.format(ts=2)}), ({row.format(ts=150)})")
    register(site, RegisterRequest(table.name, ("day", "at"), "ts"))
    table.sql("SELECT modak_read_begin('public.moments')")
    assert table.tier(leader).rows == 2
    odd = (
        "SET TimeZone = 'Asia/Tokyo'; SET DateStyle = 'German, DMY'; SET extra_float_digits = -5;"
        " SET bytea_output = 'escape'; SET IntervalStyle = 'sql_standard'; SET standard_conforming_strings = off; "
    )
    table.sql("UPDATE public.moments SET score = score WHERE ts = 1")
    plain = table.delta()
    table.sql(odd + "UPDATE public.moments SET score = score WHERE ts = 1")
    assert table.delta() == plain
    table.sql(odd + "DELETE FROM public.moments WHERE ts = 1")
    table.sql(odd + "UPDATE public.moments SET ts = 3 WHERE ts = 2")
    (image,) = plain.values()
    key = "2024-02-01\x1f2024-02-01 03:04:05.000006+00"
    assert table.delta() == {(key, 1): None, (key, 2): None, (key, 3): {**(image or {}), "ts": "3"}}
    assert image == {
        "day": "2024-02-01",
        "at": "2024-02-01 03:04:05.000006+00",
        "ts": "1",
        "score": "0.30000000000000004",
        "length": "P1DT2H3M",
        "raw": "\\x00ff",
    }


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("float8", "is a float"),
        ("real", "is a float"),
        ("numeric", "numeric without precision"),
    ],
)
def test_a_key_whose_equal_values_have_different_texts_is_refused(site: Site, kind: str, complaint: str) -> None:
    table = Events(site, TableName("public", "odd"))
    table.sql(f"CREATE TABLE public.odd (id {kind}, ts bigint, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts)")
    table.add_partition(0)
    with pytest.raises(Refused, match=complaint):
        table.register()


def test_a_key_under_which_different_texts_are_equal_is_refused_and_such_a_value_keeps_its_text(
    site: Site, leader: Leader
) -> None:
    """The server comes without extensions and without ICU: citext is made from SQL, the collation is declared blind."""
    table = Events(site, TableName("public", "odd"))
    table.sql(CITEXT)
    table.sql("CREATE COLLATION public.blind (provider = libc, locale = 'C')")
    table.sql("UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'blind'")
    columns = "id {}, ts bigint, body public.citext, said text COLLATE public.blind, PRIMARY KEY (id, ts)"
    for kind, complaint in (("public.citext", "citext"), ("text COLLATE public.blind", "non-deterministic collation")):
        table.sql(f"CREATE TABLE public.odd ({columns.format(kind)}) PARTITION BY RANGE (ts)")
        table.add_partition(0)
        with pytest.raises(Refused, match=complaint):
            table.register()
        table.sql("DROP TABLE public.odd")
    table.sql(f"CREATE TABLE public.odd ({columns.format('bigint')}) PARTITION BY RANGE (ts)")
    table.add_partition(0)
    table.add_partition(100)
    table.sql("INSERT INTO public.odd VALUES (1, 1, 'MiXed', 'MiXed'), (2, 2, 'mixed', 'mixed'), (3, 150, '', '')")
    assert table.sql("SELECT count(*) FROM public.odd WHERE body = 'MIXED'") == [(2,)]
    table.register()
    assert table.tier(leader).rows == 2
    assert sorted(table.lake()) == [(1, 1, "MiXed", "MiXed"), (2, 2, "mixed", "mixed")]


def test_an_inbound_foreign_key_is_refused_by_name(events: Events) -> None:
    events.sql(
        "CREATE TABLE public.notes (id bigint, ts bigint, CONSTRAINT notes_of_events"
        " FOREIGN KEY (id, ts) REFERENCES public.events)"
    )
    with pytest.raises(Refused, match="notes_of_events") as refused:
        events.register()
    assert "partitions cannot be dropped" in refused.value.message
    assert events.sql("SELECT count(*) FROM modak.tables") == [(0,)]
    events.sql("ALTER TABLE public.notes DROP CONSTRAINT notes_of_events")
    assert events.register().created


def test_a_foreign_key_made_after_registration_defers_the_drop_and_loses_nothing(
    events: Events, leader: Leader
) -> None:
    events.register()
    events.sql("CREATE TABLE public.notes (id bigint, ts bigint, FOREIGN KEY (id, ts) REFERENCES public.events)")
    events.sql("INSERT INTO public.notes VALUES (7, 7)")
    with pytest.raises(Exception, match=r"(?i)foreign key|notes"):
        events.tier(leader)
    assert events.everything() == ROWS
    events.sql("DROP TABLE public.notes")
    assert events.tier(leader).dropped == ("events_0", "events_100")
    assert events.everything() == ROWS
