"""Coming and going: what registration refuses and takes over, what unregistering leaves behind."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from modak import config
from modak.core.errors import ModakError, Refused
from modak.core.names import TableName
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.storage.uri import local_path
from modak.tables.registration.register import preflight, register
from modak.tables.registration.request import RegisterRequest
from modak.tables.registration.unregister import unregister
from modak.tables.site import Site
from tests.tables import readers
from tests.tables.conftest import settings_for
from tests.tables.events import Events

ROWS = {(i, i, f"row {i}") for i in range(251)}
TRIGGERS = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '!modak%%' OR tgname LIKE '~modak%%'"


def problems(site: Site, request: RegisterRequest) -> dict[str, str]:
    return {problem.code: problem.message for problem in preflight(site, request).problems}


def lake_files(site: Site, name: str = "events") -> int:
    folder = local_path(site.settings.lake.warehouse)
    assert folder is not None
    return sum(path.is_file() for path in Path(folder, "modak", "public", name).rglob("*"))


def test_everything_wrong_is_told_in_one_list_and_nothing_is_changed(site: Site) -> None:
    table = Events(site, TableName("public", "bad"))
    table.sql(
        'CREATE TABLE public.bad (id float8, ts bigint, other bigint, "Body" text, body text, _pos int,'
        " PRIMARY KEY (id, other, ts)) PARTITION BY RANGE (ts);"
        " CREATE TABLE public.bad_0 PARTITION OF public.bad FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (ts);"
        " CREATE TABLE public.bad_rest PARTITION OF public.bad DEFAULT;"
        " INSERT INTO public.bad VALUES (1, 500, 1, '', '', 1);"
        " CREATE TABLE public.pointing (id float8, other bigint, ts bigint,"
        " FOREIGN KEY (id, other, ts) REFERENCES public.bad)"
    )
    with pytest.raises(Refused) as refused:
        register(site, RegisterRequest(table.name, ("id", "nothing"), "ts"))
    told = refused.value.message
    for part in (
        'no column "nothing"' if 'no column "nothing"' in told else "no column nothing",
        "bad_0 is partitioned again",
        "DEFAULT partition",
        "do not cover the primary key",
        "is a float",
        "differ only in case",
        "Iceberg adds to every table",
        "Other tables refer to it",
    ):
        assert part in told.replace('"bad_0"', "bad_0"), part
    assert told.count("\n  - ") >= 8
    assert table.sql("SELECT count(*) FROM modak.tables") == [(0,)]
    assert lake_files(site, "bad") == 0


def test_a_partition_from_minvalue_is_refused_only_while_it_holds_rows(events: Events) -> None:
    """Its rows lie below the first cut-line, where no read looks at the heap."""
    events.sql("CREATE TABLE public.before PARTITION OF public.events FOR VALUES FROM (MINVALUE) TO (0)")
    events.sql("INSERT INTO public.events VALUES (-5, -5, 'old')")
    request = RegisterRequest(events.name, ("id",), "ts")
    assert problems(events.site, request).keys() == {"register.minvalue_rows"}
    with pytest.raises(Refused, match=r"before starts at MINVALUE and holds rows.*Move them"):
        register(events.site, request)
    events.sql("DELETE FROM public.events WHERE ts < 0")
    assert register(events.site, request).created
    events.sql("INSERT INTO public.events VALUES (-5, -5, 'old')")
    assert not register(events.site, request).created


@pytest.mark.parametrize(
    ("definition", "code"),
    [
        ("(id bigint PRIMARY KEY, ts bigint)", "register.not_partitioned"),
        ("(id bigint, ts bigint, PRIMARY KEY (id, ts)) PARTITION BY HASH (ts)", "register.not_partitioned"),
        ("(id bigint, ts bigint, PRIMARY KEY (id, ts)) PARTITION BY RANGE (id)", "register.partition_key"),
        ("(id bigint, ts bigint, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts)", "register.no_partitions"),
        ("(id bigint NOT NULL, ts bigint) PARTITION BY RANGE (ts)", "register.no_primary_key"),
        ("(id bigint, ts text, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts)", "register.tier_key_type"),
    ],
)
def test_a_table_that_cannot_age_says_why(site: Site, definition: str, code: str) -> None:
    table = Events(site, TableName("public", "bad"))
    table.sql(f"CREATE TABLE public.bad {definition}")
    assert code in problems(site, RegisterRequest(table.name, ("id",), "ts"))


def test_a_preflight_tells_how_much_will_move(events: Events) -> None:
    events.sql("ANALYZE public.events")
    found = preflight(events.site, RegisterRequest(events.name, ("id",), "ts"))
    assert (found.problems, found.partitions, found.rows) == ((), 3, 251)
    assert found.bytes > 0
    assert events.sql("SELECT count(*) FROM modak.tables") == [(0,)]


def test_rows_that_were_never_counted_are_guessed_from_their_pages(site: Site) -> None:
    events = Events.create(site, last=-1)
    assert preflight(site, RegisterRequest(events.name, ("id",), "ts")).rows == 0
    events.sql("ALTER TABLE public.events_0 SET (autovacuum_enabled = off)")
    events.sql("INSERT INTO public.events SELECT i, 5, 'row ' || i FROM generate_series(1, 20000) AS i")
    assert 10_000 < preflight(site, RegisterRequest(events.name, ("id",), "ts")).rows < 40_000
    events.sql("ANALYZE public.events_0")
    assert preflight(site, RegisterRequest(events.name, ("id",), "ts")).rows == 20_000
    events.sql("INSERT INTO public.events SELECT i, 5, 'row ' || i FROM generate_series(20001, 40000) AS i")
    assert 39_000 < preflight(site, RegisterRequest(events.name, ("id",), "ts")).rows < 41_000, "it has grown since"


@pytest.fixture
def limited(site: Site) -> Iterator[Dsn]:
    """A role that may use the catalog, but does not own the user's tables."""
    role, password = f"limited_{secrets.token_hex(4)}", secrets.token_hex(8)
    with site.connect(autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password}'")
        conn.execute(f"GRANT USAGE ON SCHEMA modak, modak_iceberg TO {role}")
        conn.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA modak, modak_iceberg TO {role}")
    yield Dsn(site.dsn.host, site.dsn.port, site.dsn.dbname, role, password)
    with site.connect(autocommit=True) as conn:
        conn.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.superuser
def test_a_role_without_rights_is_told_which_grants_are_missing(events: Events, limited: Dsn) -> None:
    settings = settings_for(limited, events.site.settings.lake.warehouse, events.site.settings.home.path)
    site = Site(settings, limited)
    found = preflight(site, RegisterRequest(events.name, ("id",), "ts")).problems
    assert [problem.code for problem in found] == ["register.privileges", "register.privileges"]
    assert "GRANT" in found[0].hint
    assert "CREATE ON SCHEMA" in found[1].hint


def test_a_table_that_is_here_already_is_recognised_without_a_look_at_the_lake(events: Events) -> None:
    request = RegisterRequest(events.name, ("id",), "ts")
    assert not preflight(events.site, request).registered
    assert events.register().created
    lake = vars(events.site).pop("lake")
    again = preflight(events.site, request)
    assert again.registered
    assert again.notes == ()
    assert not events.register().created
    assert "lake" not in vars(events.site), "a registration that changes nothing needs no JVM"
    vars(events.site)["lake"] = lake


def test_a_dry_run_names_what_differs_too_in_the_units_of_the_tier_key(site: Site) -> None:
    days = Events(site, TableName("public", "days"))
    days.sql("CREATE TABLE public.days (id int, at timestamptz, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)")
    days.sql("CREATE TABLE public.days_1 PARTITION OF public.days FOR VALUES FROM ('2024-01-01+0') TO ('2024-01-02+0')")
    request = RegisterRequest(days.name, ("id",), "at", lake_retention="30d")
    assert register(site, request).width == "1d"
    for change, told in (
        ({"lake_retention": "40d"}, "--lake-retention is 30d, not 40d"),
        ({"lake_retention": None}, "--lake-retention is 30d, not none"),
        ({"partition_width": "36h"}, "--partition-width is 1d, not 36h"),
        (
            {"partition_width": "0", "lake_retention": None},
            "--lake-retention is 30d, not none; --partition-width is 1d, not 0",
        ),
        ({"lake_retention": None, "keep_heap": True}, "--keep-heap is off, not on; --lake-retention is 30d, not none"),
        ({"pk": ("at",)}, "--pk is id, not at"),
        ({"profile": "elsewhere"}, "--profile is default, not elsewhere"),
        ({"numeric_as": "string"}, "--numeric-as is decimal:18, not string"),
    ):
        for ask in (preflight, register):
            with pytest.raises(Refused, match="registered already, but differently") as refused:
                ask(site, replace(request, **change))
            assert f"differently: {told}." in refused.value.message
    assert preflight(site, replace(request, lake_retention="720h", partition_width="1440m")).registered


def test_unregistering_keeps_the_lake_and_takes_every_trigger(events: Events, leader: Leader) -> None:
    events.register()
    events.sql("SELECT modak_read_begin('public.events')")
    events.tier(leader)
    assert events.sql(TRIGGERS) == [(6,)]
    files = lake_files(events.site)
    gone = unregister(events.site, events.name)
    assert gone.kept_location is not None
    assert lake_files(events.site) == files
    assert events.sql(TRIGGERS) == [(0,)]
    assert events.sql("SELECT to_regclass('public.events_modak_spill')") == [(None,)]
    assert events.sql("SELECT count(*) FROM pg_class WHERE relname LIKE 'shadow_%%'") == [(0,)]
    assert events.sql("SELECT count(*) FROM public.events") == [(251,)]
    for table in ("tables", "cutline", "partitions", "delta", "read_pins", "spills"):
        assert events.sql(f"SELECT count(*) FROM modak.{table}") == [(0,)], table
    events.sql("UPDATE public.events SET body = 'free' WHERE id = 5; TRUNCATE public.events_0")


def test_a_kept_lake_is_taken_over_and_rows_tiered_again_replace_their_older_selves(
    events: Events, leader: Leader
) -> None:
    events.register()
    events.sql("SELECT modak_read_begin('public.events')")
    events.tier(leader)
    unregister(events.site, events.name)
    events.sql("UPDATE public.events SET body = 'since' WHERE id < 10")
    events.sql("DELETE FROM public.events WHERE id = 150")
    again = events.register()
    assert again.created
    assert any("taken over" in note for note in again.preflight.notes)
    assert again.cut_line == "0"
    report = events.tier(leader)
    assert report.rows == 199
    assert report.dropped == ("events_0", "events_100")
    changed = {(i, i, "since") for i in range(10)}
    assert events.everything() == {row for row in ROWS if row[0] >= 10 and row[0] != 150} | changed
    assert len(events.lake()) == 199


def test_a_taken_over_lake_keeps_what_left_the_heap_long_ago(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    unregister(events.site, events.name)
    again = events.register()
    assert again.cut_line == "200"
    assert events.everything() == ROWS
    events.sql("INSERT INTO public.events VALUES (7, 7, 'corrected')")
    assert events.everything() == (ROWS - {(7, 7, "row 7")}) | {(7, 7, "corrected")}


def test_dropping_the_lake_purges_every_file(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    other = Events.create(events.site, name="other")
    other.register()
    other.tier(leader)
    assert lake_files(events.site) > 0
    gone = unregister(events.site, events.name, drop_lake=True)
    assert (gone.kept_location, lake_files(events.site)) == (None, 0)
    assert gone.files_removed > 0
    assert events.sql("SELECT table_name FROM modak_iceberg.iceberg_tables") == [("other",)]
    assert lake_files(events.site, "other") > 0
    assert other.everything() == ROWS


def test_corrections_that_only_the_delta_has_are_not_dropped_silently(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    events.sql("INSERT INTO public.events VALUES (7, 7, 'corrected')")
    with pytest.raises(Refused, match="1 correction") as refused:
        unregister(events.site, events.name)
    assert "--discard-corrections" in refused.value.hint
    assert events.delta() == {("7", 7): {"id": "7", "ts": "7", "body": "corrected"}}
    assert events.sql("SELECT to_regclass('public.events_modak_spill') IS NOT NULL") == [(True,)]
    assert unregister(events.site, events.name, discard_corrections=True).corrections_discarded == 1


def test_a_busy_table_gets_its_spill_in_a_later_pass(events: Events, leader: Leader) -> None:
    with connect(events.site.dsn) as user:
        user.execute("LOCK TABLE public.events IN SHARE UPDATE EXCLUSIVE MODE")
        assert not events.register().transparent_writes
    events.tier(leader)
    assert events.register().transparent_writes
    events.sql("INSERT INTO public.events VALUES (1000, 50, 'history')")
    assert events.everything() == ROWS | {(1000, 50, "history")}


def test_a_table_made_anew_over_a_kept_lake_is_matched_by_the_names_of_its_columns(
    events: Events, leader: Leader
) -> None:
    events.register()
    events.tier(leader)
    unregister(events.site, events.name)
    events.sql("DROP TABLE public.events")
    events.sql(
        "CREATE TABLE public.events (body text, extra int, ts bigint, id bigint, PRIMARY KEY (id, ts))"
        " PARTITION BY RANGE (ts)"
    )
    events.add_partition(200)
    events.add_partition(300)
    events.sql("INSERT INTO public.events (id, ts, body, extra) VALUES (1001, 250, 'new', 5), (1002, 350, 'newest', 6)")
    events.register()
    assert events.tier(leader).rows == 1
    lake = {row["id"]: row for row in readers.by_duckdb(events.site, events.name)}
    assert lake[7] == {"id": 7, "ts": 7, "body": "row 7", "extra": None}
    assert lake[1001] == {"id": 1001, "ts": 250, "body": "new", "extra": 5}
    assert len(lake) == 201


def test_a_kept_lake_of_another_tier_key_is_not_taken_over(events: Events) -> None:
    events.register()
    unregister(events.site, events.name)
    events.sql("DROP TABLE public.events")
    events.sql("CREATE TABLE public.events (id bigint, at bigint, PRIMARY KEY (id, at)) PARTITION BY RANGE (at)")
    events.add_partition(0)
    with pytest.raises(Refused, match="laid out by another column"):
        register(events.site, RegisterRequest(events.name, ("id",), "at"))


def test_a_table_that_was_dropped_can_be_unregistered(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    events.sql("DROP TABLE public.events")
    gone = unregister(events.site, events.name)
    assert gone.kept_location is not None
    assert events.sql("SELECT count(*) FROM pg_class WHERE relname LIKE 'shadow_%%'") == [(0,)]


def test_a_table_dropped_and_made_again_is_not_the_registered_one(events: Events, leader: Leader) -> None:
    events.register()
    events.sql("DROP TABLE public.events")
    Events.create(events.site)
    with pytest.raises(Refused, match="dropped and created again"):
        events.register()
    with pytest.raises(ModakError):
        events.tier(leader)
    assert events.sql("SELECT count(*) FROM public.events") == [(251,)]


def test_a_newer_catalog_is_refused(events: Events) -> None:
    events.sql("INSERT INTO modak.schema_meta VALUES (999, '999_future', 'x', '99.0')")
    with pytest.raises(Refused, match="newer than this worker"), open_site(events.site.settings):
        pass


def test_a_missing_credential_names_the_variable(site: Site, warehouse: str, spark_home: Path) -> None:
    dsn = site.dsn
    environ = {
        "MODAK_PG_URL": f"postgresql://{dsn.user}@{dsn.host}:{dsn.port}/{dsn.dbname}",
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(spark_home),
    }
    with pytest.raises(ModakError) as refused, open_site(config.load(environ)):
        pass
    assert refused.value.code == "postgres.auth"
    assert "MODAK_PG_PASSWORD" in refused.value.hint


def test_an_unknown_table_is_told_apart_from_an_unregistered_one(events: Events, leader: Leader) -> None:
    with pytest.raises(Refused, match=r"There is no table public\.nothing"):
        register(events.site, RegisterRequest(TableName("public", "nothing"), ("id",), "ts"))
    with pytest.raises(Refused, match="not registered") as refused:
        events.tier(leader)
    assert "modak-worker register" in refused.value.hint
    with pytest.raises(psycopg.errors.UndefinedObject, match="not registered"):
        events.sql("SELECT modak_read_begin('public.events')")
