"""The role of docs/production.md is enough for a whole life of a table, and lacks what it does not need."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from modak.entities.compaction import compact
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from modak.runtime import daemon
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.schedule import Schedule
from modak.storage.objects import Objects
from modak.tables.registration.register import preflight
from modak.tables.registration.unregister import unregister
from modak.tables.status import collect
from tests.entities.world import SCHEMA, World, key
from tests.mirror.things import Things
from tests.runtime.conftest import led
from tests.support.role import granted_further, least_privileged, may_replicate, owner_of, watcher
from tests.tables.conftest import settings_for
from tests.tables.events import Events

pytestmark = pytest.mark.bare

ROOT = Path(__file__).parents[2]
SUITE = [
    "tests/catalog",
    "tests/tables/test_tiering.py",
    "tests/tables/test_fold.py",
    "tests/tables/test_retention.py",
    "tests/tables/test_keep_heap.py",
    "tests/tables/test_premake.py",
    "tests/tables/test_registration.py",
    "tests/tables/test_amend.py",
    "tests/tables/test_foreign_commits.py",
    "tests/tables/test_late_writes.py",
    "tests/load/test_load.py",
    "tests/ingest/test_crash.py",
    "tests/ingest/test_ingest.py",
    "tests/ingest/test_meanwhile.py",
    "tests/maintenance/test_erase.py",
    "tests/maintenance/test_health.py",
    "tests/maintenance/test_pin_safety.py",
    "tests/maintenance/test_policy.py",
    "tests/maintenance/test_race.py",
    "tests/maintenance/test_requests.py",
    "tests/mirror/test_copy.py",
    "tests/mirror/test_heap_retention.py",
    "tests/mirror/test_publication.py",
    "tests/mirror/test_pump.py",
    "tests/mirror/test_pump_columns.py",
    "tests/mirror/test_pump_trouble.py",
    "tests/mirror/test_reanchor.py",
    "tests/mirror/test_reanchor_convert.py",
    "tests/mirror/test_register.py",
    "tests/entities/test_compact.py",
    "tests/entities/test_flush.py",
    "tests/entities/test_flush_troubles.py",
    "tests/entities/test_init.py",
    "tests/entities/test_reconcile.py",
    "tests/entities/test_tables.py",
    "tests/runtime/test_operators.py",
    "tests/runtime/test_publishing.py",
    "tests/runtime/test_withdrawing.py",
    "tests/runtime/test_web.py",
    "tests/runtime/test_metrics.py",
]


def test_the_role_carries_a_table_through_its_life(
    server: EmbeddedServer, fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: Any
) -> None:
    dsn = least_privileged(server, fresh_database.dbname)
    with connect(dsn, autocommit=True) as conn:
        row = conn.execute("SELECT rolsuper, rolcreatedb, rolcreaterole FROM pg_roles WHERE rolname = %s", (dsn.user,))
        assert row.fetchone() == (False, False, False)
    with open_site(settings_for(dsn, warehouse, spark_home)) as site, Leader.campaign(site, 5) as leader:
        events = Events.create(site)
        for table in ("events", "events_0", "events_100", "events_200"):
            events.sql(f"ALTER TABLE public.{table} OWNER TO {owner_of(dsn)}")
        events.register()
        schedule, stop = Schedule(), threading.Event()
        daemon.cycle(site, leader, schedule, stop)
        assert schedule.failures == {}
        events.sql("INSERT INTO public.events VALUES (7, 7, 'late')")
        events.sql("SELECT modak_delete('public.events', '8', 8)")
        daemon.cycle(site, leader, schedule, stop)
        assert schedule.failures == {}
        truth = {(i, i, f"row {i}") for i in range(251) if i not in (7, 8)} | {(7, 7, "late")}
        assert events.everything() == truth
        [row] = collect(site)
        assert row.cut_line == "200"
        assert led(site).fleet.text()
        unregister(site, events.name, drop_lake=True)


def test_the_role_works_for_each_owner_and_in_each_schema_that_it_was_granted_and_a_monitor_sees_it(
    server: EmbeddedServer, fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: Any
) -> None:
    dsn = least_privileged(server, fresh_database.dbname)
    schema, other = granted_further(server, dsn)
    settings = settings_for(dsn, warehouse, spark_home, MODAK_PREMAKE_PARTITIONS="1")
    with open_site(settings) as site, Leader.campaign(site, 5) as leader:
        first, second = Events.create(site), Events.create(site, schema=schema)
        for events, owner in ((first, owner_of(dsn)), (second, other)):
            for table in ("events", "events_0", "events_100", "events_200"):
                events.sql(f"ALTER TABLE {events.name.schema}.{table} OWNER TO {owner}")
            events.register()
        schedule, stop = Schedule(), threading.Event()
        daemon.cycle(site, leader, schedule, stop)
        for events in (first, second):
            events.sql(f"INSERT INTO {events.name} VALUES (7, 7, 'late'), (310, 310, 'new')")
        daemon.cycle(site, leader, schedule, stop)
        assert schedule.failures == {}
        truth = {(i, i, f"row {i}") for i in range(251) if i != 7} | {(7, 7, "late"), (310, 310, "new")}
        for events, owner in ((first, owner_of(dsn)), (second, other)):
            assert events.everything() == truth
            assert events.delta() == {}, "it is folded"
            made = f"'{events.name.schema}.events_p300'::regclass"
            assert events.sql(f"SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = {made}") == [(owner,)]
        with connect(watcher(server, dsn.dbname), autocommit=True) as conn:
            seen = conn.execute("SELECT schema_name, table_name, cutline_t, delta_backlog FROM modak.status").fetchall()
            assert sorted(seen) == [("public", "events", 300, 0), (schema, "events", 300, 0)]
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute("SELECT * FROM modak.delta")
        for events in (first, second):
            unregister(site, events.name, drop_lake=True)


def test_the_owner_can_alter_the_table_as_before(
    server: EmbeddedServer, fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: Any
) -> None:
    dsn = least_privileged(server, fresh_database.dbname)
    owner = owner_of(dsn)
    settings = settings_for(dsn, warehouse, spark_home, MODAK_PREMAKE_PARTITIONS="2")
    with (
        open_site(settings) as site,
        Leader.campaign(site, 5) as leader,
        connect(server.dsn(fresh_database.dbname), autocommit=True) as conn,
    ):
        events = Events.create(site)
        for table in ("events", "events_0", "events_100", "events_200"):
            events.sql(f"ALTER TABLE public.{table} OWNER TO {owner}")
        events.register()
        assert events.tier(leader).premade == ("events_p300", "events_p400")
        conn.execute(f"SET ROLE {owner}")  # type: ignore[arg-type]
        conn.execute("ALTER TABLE public.events ADD COLUMN more int DEFAULT 3")
        conn.execute("INSERT INTO public.events VALUES (7, 7, 'late', 4), (480, 480, 'new', 5)")
        conn.execute("RESET ROLE")
        assert events.delta()[("7", 7)] == {"id": "7", "ts": "7", "body": "late", "more": "4"}
        # An owner who may not create in the schema keeps its inserts, though the partition cannot be its own.
        conn.execute(f"REVOKE CREATE ON SCHEMA public FROM {owner}")  # type: ignore[arg-type]
        assert "events_p500" in events.tier(leader).premade
        owners = dict(
            events.sql("SELECT relname, pg_get_userbyid(relowner) FROM pg_class WHERE relname LIKE 'events%'")
        )
        assert (owners["events_p400"], owners["events_p500"]) == (owner, dsn.user)


def test_the_role_mirrors_a_table_of_another_owner(
    server: EmbeddedServer, fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: Any
) -> None:
    dsn = may_replicate(server, least_privileged(server, fresh_database.dbname))
    with connect(dsn, autocommit=True) as conn:
        row = conn.execute("SELECT rolsuper, rolreplication FROM pg_roles WHERE rolname = %s", (dsn.user,)).fetchone()
        assert row == (False, True)
    with open_site(settings_for(dsn, warehouse, spark_home)) as site, Leader.campaign(site, 5) as leader:
        things = Things.ranged(site, 450, partitions=5)
        for table in ("things", *(f"things_{lower}" for lower in range(0, 500, 100))):
            things.sql(f"ALTER TABLE public.{table} OWNER TO {owner_of(dsn)}")
        things.register(heap_retention="100")
        things.sql("UPDATE public.things SET body = 'changed' WHERE id IN (7, 440)")
        things.sql("DELETE FROM public.things WHERE id = 8")
        things.cycle(leader)
        things.pump(leader)
        assert things.cycle(leader).retired.dropped == ("things_0", "things_100", "things_200")
        truth = {(i, i, "changed" if i in (7, 440) else f"row {i}") for i in range(450) if i != 8}
        assert set(things.lake()) == truth
        # A slot that is lost is made again, and the table compared.
        things.sql("INSERT INTO public.things VALUES (451, 451, 'new')")
        things.lose_slot()
        things.pump(leader)
        assert set(things.lake()) == truth | {(451, 451, "new")}
        things.unregister(drop_lake=True)


def test_the_role_flushes_and_compacts_entities_of_another_owner(
    server: EmbeddedServer, fresh_database: Dsn, tmp_path: Path
) -> None:
    dsn = least_privileged(server, fresh_database.dbname)
    world = World(dsn, Objects.of(str(tmp_path / "store")))
    for table in ("entity_main", "eav_data"):
        world.sql(f"ALTER TABLE {table} OWNER TO {owner_of(dsn)}")
    world.many(0, 5)
    init(world.store, SCHEMA)
    with world.connect() as conn:
        # The application knows of no change log.
        conn.execute(f"SET ROLE {owner_of(dsn)}")
        conn.execute("UPDATE entity_main SET text_01 = 'changed' WHERE ltbase_row_id = %s", (key(2),))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT * FROM change_log")
    assert world.dirty() == 1
    assert flush(world.store)[0].rows == 1
    compact(world.store)
    assert world.titles() == {number: "changed" if number == 2 else f"row {number}" for number in range(5)}


def test_without_the_right_to_replicate_a_mirror_is_refused_by_name(
    server: EmbeddedServer, fresh_database: Dsn, warehouse: str, spark_home: Path, gateway: Any
) -> None:
    dsn = least_privileged(server, fresh_database.dbname)
    with open_site(settings_for(dsn, warehouse, spark_home)) as site:
        things = Things.plain(site, 3)
        problems = preflight(site, things.request()).problems
        [problem] = problems
        assert "replication slots" in problem.message
        assert "REPLICATION" in problem.hint


def test_the_role_may_not_touch_what_is_not_its_own(server: EmbeddedServer, fresh_database: Dsn) -> None:
    dsn = least_privileged(server, fresh_database.dbname)
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE public.others (id bigint)")
    with connect(dsn, autocommit=True) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("SELECT * FROM public.others")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_suite_runs_as_that_role() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not full and not spark and not superuser", *SUITE]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "LEAST_PRIVILEGE": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]
