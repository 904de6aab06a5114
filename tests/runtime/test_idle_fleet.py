"""Five hundred registered tables that nobody touches: what a round over them costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import psutil
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from modak.catalog.journal import Journal
from modak.catalog.records import Cutline, TableConfig
from modak.core.axis import Axis, Width
from modak.core.ids import new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.model import LakeName
from modak.postgres.dsn import Dsn
from modak.runtime import daemon
from modak.runtime.crew import Crew
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.pulse import Pulse
from modak.runtime.schedule import Schedule
from modak.tables.maintenance.policy import of
from modak.tables.observe import new_partition
from modak.tables.site import Site
from tests.tables.conftest import settings_for

LEAVES = 4


_TABLES: LiteralString = """
    DO $$ BEGIN
        FOR n IN 0..{last} LOOP
            EXECUTE format('CREATE TABLE t%s (id bigint, ts bigint, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts)', n);
            FOR leaf IN 0..{leaves} LOOP
                EXECUTE format('CREATE TABLE t%s_%s PARTITION OF t%s FOR VALUES FROM (%s) TO (%s)',
                    n, leaf, n, leaf * 100, leaf * 100 + 100);
            END LOOP;
            EXECUTE format('INSERT INTO t%s VALUES (1, 50)', n);
        END LOOP;
    END $$
"""
_CLONE: LiteralString = """
    INSERT INTO {table} ({columns}) SELECT {values} FROM {table} o, modak.tables t
    WHERE o.table_id = (SELECT min(table_id) FROM modak.tables) AND t.table_id <> o.table_id
"""


def register_without_a_lake(site: Site, leader: Leader, count: int) -> None:
    """Tables as the catalog knows them: the first is registered, the others are made in its image."""
    with site.connect(autocommit=True) as conn:
        conn.execute(sql.SQL(_TABLES).format(last=count - 1, leaves=LEAVES - 1))
        register_one(site, leader, TableName("public", "t0"))
        own = {"table_name": "'t' || n", "relid": "('t' || n)::regclass", "lake_name": "'t' || n",
               "location": "'file:///nowhere/' || n"}  # fmt: skip
        columns = columns_of(conn, "tables") - {"table_id"}
        values = ", ".join(own.get(name, name) for name in sorted(columns))
        conn.execute(
            f"INSERT INTO modak.tables ({', '.join(sorted(columns))}) SELECT {values}"  # type: ignore[arg-type]
            f" FROM modak.tables, generate_series(1, {count - 1}) n WHERE table_name = 't0'"
        )
        clone(conn, "cutline", {"metadata_location": "t.location || '/m.json'"})
        clone(conn, "lake_columns", {})
        leaf = "replace(o.partition_name, 't0_', t.table_name || '_')"
        of_leaf = f"(SELECT {{}} FROM pg_class k WHERE k.oid = ({leaf})::regclass)"
        clone(
            conn,
            "partitions",
            {"partition_name": leaf, "leaf_oid": of_leaf.format("oid"), "relfilenode": of_leaf.format("relfilenode")},
        )


def columns_of(conn: Any, table: str) -> set[str]:
    query = "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND attidentity = ''"
    return {name for (name,) in conn.execute(query, (f"modak.{table}",))} | (
        {"table_id"} if table != "tables" else set()
    )


def clone(conn: Any, table: str, own: dict[str, str]) -> None:
    """What belongs to the first table once more for each other, but for these values."""
    columns = sorted(columns_of(conn, table))
    given = {"table_id": "t.table_id", **own}
    parts = {"columns": ", ".join(columns), "values": ", ".join(given.get(name, f"o.{name}") for name in columns)}
    conn.execute(_CLONE.format(table=f"modak.{table}", **parts))


def register_one(site: Site, leader: Leader, name: TableName) -> None:
    """A still table's pass never looks into its lake."""
    from modak.postgres.describe import describe

    writer = site.writer(leader.epoch)
    with site.connect(autocommit=True) as conn:
        heap = describe(conn, name, "ts")
    config = TableConfig(
        name=name, relid=heap.oid, mode="tiered", pk_columns=("id",), pk_attnums=(1,), tier_key="ts",
        tier_attnum=2, axis=Axis.INTEGER, width=Width(100), profile_id=1,
        lake=LakeName(("modak", "public"), name.name), location="file:///nowhere/0",
    )  # fmt: skip
    op = new_op_id(site.clock)
    journal = Journal(writer)
    journal.begin(op, None, "test", {})
    journal.phase(op, OpPhase.PLANNED, OpPhase.PREPARED)
    with writer.transaction(op) as tx:
        line = Cutline(table_id=0, t=0, snapshot_id=None, metadata_location="file:///nowhere/0/m.json")
        tx.register(config, line, [new_partition(leaf) for leaf in heap.leaves])
    journal.finish(op)
    with site.connect(autocommit=True) as conn:
        conn.execute(
            "INSERT INTO modak.lake_columns SELECT table_id, '{}', '{}' FROM modak.tables WHERE table_name = %s",
            (name.name,),
        )


@pytest.fixture
def fleet(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> Iterator[tuple[Site, Leader]]:
    with open_site(settings_for(fresh_database, warehouse, tmp_path)) as site, Leader.campaign(site, 5) as leader:
        yield site, leader


def spent(site: Site) -> float:
    """CPU seconds of this process and of its server, of backends that have ended too."""
    with site.connect(autocommit=True) as conn:
        row = conn.execute("SELECT pg_read_file('postmaster.pid')").fetchone()
    assert row is not None
    server = psutil.Process(int(row[0].split()[0]))
    total = sum(psutil.Process().cpu_times()[:2])
    for each in (server, *server.children()):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # The server has the time of the backends that it has seen end.
        total += times.user + times.system + times.children_user + times.children_system
    return float(total)


def rounds(site: Site, leader: Leader, schedule: Schedule) -> tuple[float, float]:
    """Seconds and CPU seconds (ours and the server's) of one round."""
    began, cpu = time.monotonic(), spent(site)
    with Crew(schedule, lambda item: daemon.perform(site, leader, item), site.clock, 2) as crew:
        daemon.look(site, crew)
        while not crew.drained(5.0):
            continue
        crew.check()
    return time.monotonic() - began, spent(site) - cpu


def looked_at(site: Site) -> None:
    """As if the health of every lake had been collected, and none had changed since."""
    with site.connect(autocommit=True) as conn:
        conn.execute(
            "INSERT INTO modak_iceberg.iceberg_tables (catalog_name, table_namespace, table_name, metadata_location)"
            " SELECT 'modak', t.lake_namespace, t.lake_name, c.metadata_location"
            " FROM modak.tables t JOIN modak.cutline c USING (table_id) ON CONFLICT DO NOTHING"
        )
        conn.cursor().executemany(
            "INSERT INTO modak.lake_stats (table_id, counters, policy)"
            " SELECT c.table_id, jsonb_build_object('seen', c.metadata_location || %s, 'frozen', false), %s"
            " FROM modak.cutline c WHERE c.table_id = %s",
            [
                (f" {policy['rewrite_target_bytes']}", Jsonb(policy.plain()), record.table_id)
                for record in site.reader.tables()
                if (policy := of(site, record))
            ],
        )


def settle(site: Site, leader: Leader, schedule: Schedule) -> None:
    stop = threading.Event()
    for _ in range(5):
        daemon.cycle(site, leader, schedule, stop)
        with site.connect(autocommit=True) as conn:
            conn.execute("SELECT pg_stat_force_next_flush()")


def test_still_tables_rest(fleet: tuple[Site, Leader]) -> None:
    site, leader = fleet
    register_without_a_lake(site, leader, 5)
    schedule = Schedule()
    settle(site, leader, schedule)
    assert schedule.failures == {}
    done: list[Any] = []
    with Crew(schedule, lambda item: bool(done.append(item)), site.clock, 1) as crew:
        daemon.look(site, crew)
        while not crew.drained(5.0):
            continue
    assert done == []


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_round_over_five_hundred_still_tables_is_cheap(fleet: tuple[Site, Leader]) -> None:
    site, leader = fleet
    register_without_a_lake(site, leader, 500)
    schedule = Schedule()
    settle(site, leader, schedule)
    assert schedule.failures == {}
    measured = [rounds(site, leader, schedule) for _ in range(5)]
    seconds, cpu = min(each[0] for each in measured), min(each[1] for each in measured)
    print(f"a round takes {seconds * 1000:.0f} ms and {cpu * 1000:.0f} ms of CPU")
    assert seconds < 2.0
    assert cpu / 10.0 < 0.05, "at the default of a round every ten seconds"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_whole_daemon_over_five_hundred_still_tables_is_cheap(
    fleet: tuple[Site, Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds, maintenance, health, loads, mirrors and the heartbeat together, as they run by default."""
    site, leader = fleet
    register_without_a_lake(site, leader, 500)
    settle(site, leader, Schedule())
    looked_at(site)
    monkeypatch.setattr(daemon, "_warm", lambda _site, _pulse: None)
    home, warehouse = site.settings.home.path, site.settings.lake.warehouse
    own = Site(settings_for(site.dsn, warehouse, home, MODAK_CYCLE_INTERVAL_SECONDS="10"), site.dsn, site.clock)
    pulse, stop = Pulse(site.clock), threading.Event()
    leader.resign()
    with site.connect(autocommit=True) as conn:
        conn.execute("UPDATE modak.leader SET expires_at = '-infinity'")
    worker = threading.Thread(target=daemon.run, args=(own,), kwargs={"stop": stop, "pulse": pulse}, daemon=True)
    with pulse.beating(site.dsn):
        worker.start()
        try:
            # The first round of a new leader looks at each table once.
            deadline = time.monotonic() + 600
            while pulse.cycle_seconds == 0.0:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(10)
            began, cpu = time.monotonic(), spent(site)
            time.sleep(60)
            share = (spent(site) - cpu) / (time.monotonic() - began)
        finally:
            stop.set()
            worker.join(60)
            own.close()
    print(f"an idle daemon takes {share * 100:.1f} % of a core, a round {pulse.cycle_seconds * 1000:.0f} ms")
    assert pulse.cycle_seconds < 2.0
    assert share < 0.05
