"""Five hundred registered tables that nobody touches: what a round over them costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

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
from modak.runtime.schedule import Schedule
from modak.tables.observe import new_partition
from modak.tables.site import Site
from tests.tables.conftest import settings_for

LEAVES = 4


def register_without_a_lake(site: Site, leader: Leader, count: int) -> None:
    """Tables as the catalog knows them; a still table's pass never looks into its lake."""
    from modak.postgres.describe import describe

    writer = site.writer(leader.epoch)
    with site.connect(autocommit=True) as conn:
        for n in range(count):
            conn.execute(f"CREATE TABLE t{n} (id bigint, ts bigint, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts)")  # type: ignore[arg-type]
            for leaf in range(LEAVES):
                bounds = f"FROM ({leaf * 100}) TO ({leaf * 100 + 100})"
                conn.execute(f"CREATE TABLE t{n}_{leaf} PARTITION OF t{n} FOR VALUES {bounds}")  # type: ignore[arg-type]
            conn.execute(f"INSERT INTO t{n} VALUES (1, 50)")  # type: ignore[arg-type]
            name = TableName("public", f"t{n}")
            heap = describe(conn, name, "ts")
            config = TableConfig(
                name=name, relid=heap.oid, mode="tiered", pk_columns=("id",), pk_attnums=(1,), tier_key="ts",
                tier_attnum=2, axis=Axis.INTEGER, width=Width(100), profile_id=1,
                lake=LakeName(("modak", "public"), name.name), location=f"file:///nowhere/{n}",
            )  # fmt: skip
            op = new_op_id(site.clock)
            journal = Journal(writer)
            journal.begin(op, None, "test", {})
            journal.phase(op, OpPhase.PLANNED, OpPhase.PREPARED)
            with writer.transaction(op) as tx:
                line = Cutline(table_id=0, t=0, snapshot_id=None, metadata_location=f"file:///nowhere/{n}/m.json")
                tx.register(config, line, [new_partition(leaf) for leaf in heap.leaves])
            journal.finish(op)


@pytest.fixture
def fleet(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> Iterator[tuple[Site, Leader]]:
    with open_site(settings_for(fresh_database, warehouse, tmp_path)) as site, Leader.campaign(site, 5) as leader:
        yield site, leader


def rounds(site: Site, leader: Leader, schedule: Schedule) -> tuple[float, float]:
    """Seconds and CPU seconds (ours and the server's) of one round."""
    me = psutil.Process()
    server = [each for each in psutil.process_iter(["name"]) if "postgres" in (each.info["name"] or "")]

    def spent() -> float:
        total = sum(me.cpu_times()[:2])
        for each in server:
            try:
                total += sum(each.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        return float(total)

    began, cpu = time.monotonic(), spent()
    with Crew(schedule, lambda item: daemon.perform(site, leader, item), site.clock, 2) as crew:
        daemon.look(site, crew)
        while not crew.drained(5.0):
            continue
        crew.check()
    return time.monotonic() - began, spent() - cpu


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
