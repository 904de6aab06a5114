"""Consistent under fire: money moves between rows, hot and cold, while the table is tiered, folded and expired.

Every worker of WORKERS runs in a thread of its own until the fire is out; to put another pass under the readers, add it
there.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

import modak
from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.retention.run import retain
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from tests.tables.conftest import settings_for
from tests.tables.events import Events

pytestmark = pytest.mark.spark

ROWS, WIDTH, EACH = 400, 100, 100
PAST = 2 * WIDTH
"""Below lie rows without money, which retention may take."""
RETENTION = 500
NAME = TableName("public", "accounts")
CORRECT = """
    SELECT modak_upsert('public.accounts',
        jsonb_build_object('id', %s::bigint, 'ts', %s::bigint, 'balance', %s::bigint))
"""
IN_BETWEEN = (psycopg.errors.ObjectInUse, psycopg.errors.SerializationFailure, psycopg.errors.CheckViolation)


@dataclass
class Fire:
    """What the workers share."""

    site: Site
    leader: Leader
    table_id: int
    out: threading.Event = field(default_factory=threading.Event)
    moves: int = 0
    folded: int = 0
    expired: int = 0
    transfers: int = 0
    trouble: list[BaseException] = field(default_factory=list)

    def keep(self, worker: Callable[[Fire], None]) -> threading.Thread:
        def run() -> None:
            try:
                while not self.out.is_set():
                    worker(self)
            except BaseException as error:
                self.trouble.append(error)
                self.out.set()

        thread = threading.Thread(target=run, name=worker.__name__, daemon=True)
        thread.start()
        return thread


def transfers(fire: Fire) -> None:
    """Move money between any two rows in one transaction: in the heap where it has the row, else in the delta."""
    balances = dict.fromkeys(range(ROWS), EACH)
    with fire.site.connect() as conn:
        while not fire.out.is_set():
            giver, taker = random.sample(range(ROWS), 2)
            after = {giver: balances[giver] - 7, taker: balances[taker] + 7}
            try:
                for key, balance in after.items():
                    conn.execute(CORRECT, (key, PAST + key, balance))
                conn.commit()
            except IN_BETWEEN:
                # The partition is just leaving; the whole transfer is tried again.
                conn.rollback()
                continue
            balances |= after
            fire.transfers += 1
            time.sleep(0.005)


def tiering(fire: Fire) -> None:
    """Let the table grow, so that one partition after the other becomes old enough."""
    top = PAST + ROWS + 1 + WIDTH * min(fire.moves, 4)
    with fire.site.connect(autocommit=True) as conn:
        conn.execute("INSERT INTO public.accounts VALUES (%s, %s, 0) ON CONFLICT DO NOTHING", (top, top))
    if tier(fire.site, fire.leader.epoch, NAME).moved_partitions:
        fire.moves += 1
    try:
        fire.folded += fold(fire.site, fire.leader.epoch, NAME).rows
        fire.expired += retain(fire.site, fire.leader.epoch, NAME).moved_to is not None
    except ModakError as error:
        if not error.retryable:
            raise


WORKERS: tuple[Callable[[Fire], None], ...] = (transfers, tiering)


@pytest.fixture
def fire(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Fire]:
    lag = {"MODAK_TIERING_LAG": str(ROWS - WIDTH), "MODAK_RECLAIM_LAG": str(ROWS - WIDTH)}
    with open_site(settings_for(fresh_database, warehouse, spark_home, **lag)) as site:
        _ = site.spark
        table = Events(site, NAME)
        table.sql(
            "CREATE TABLE public.accounts (id bigint, ts bigint, balance bigint NOT NULL, PRIMARY KEY (id, ts))"
            " PARTITION BY RANGE (ts)"
        )
        for lower in range(0, PAST + 1_000, WIDTH):
            table.add_partition(lower)
        table.sql(f"INSERT INTO public.accounts SELECT {ROWS} + i, i, 0 FROM generate_series(0, {PAST - 1}) i")
        table.sql(f"INSERT INTO public.accounts SELECT i, {PAST} + i, {EACH} FROM generate_series(0, {ROWS - 1}) i")
        register(site, RegisterRequest(NAME, ("id",), "ts", lake_retention=str(RETENTION)))
        with Leader.campaign(site, 5) as leader:
            yield Fire(site, leader, site.reader.state(NAME).table.table_id)


def test_readers_never_see_a_row_twice_or_money_vanish(fire: Fire) -> None:
    _burn(fire, least_reads=5, most_seconds=45)


@pytest.mark.full
def test_readers_never_see_a_row_twice_or_money_vanish_for_minutes(fire: Fire) -> None:
    _burn(fire, least_reads=60, most_seconds=270)


def _burn(fire: Fire, *, least_reads: int, most_seconds: float) -> None:
    threads = [fire.keep(worker) for worker in WORKERS]
    until = time.monotonic() + most_seconds
    seen: list[tuple[int, int, int]] = []
    try:
        while time.monotonic() < until and not fire.out.is_set() and (len(seen) < least_reads or fire.moves < 4):
            with modak.snapshot(fire.site.spark, ["public.accounts"], settings=fire.site.settings) as at:
                frame = at.read("accounts", ["id", "balance"], f"id < {ROWS}")
                (row,) = frame.selectExpr("sum(balance)", "count(*)", "count(distinct id)").collect()
            seen.append(tuple(row))
            if set(seen) != {(ROWS * EACH, ROWS, ROWS)}:
                break
    finally:
        fire.out.set()
        for thread in threads:
            thread.join(60)
    assert not fire.trouble, fire.trouble
    assert set(seen) == {(ROWS * EACH, ROWS, ROWS)}
    assert len(seen) >= 3
    assert fire.moves >= 1
    assert fire.transfers > 10


READER = """
import sys, time
from modak import config
from modak.core.names import TableName
from modak.runtime.opening import open_site
from modak.tables.seam.pinned import Point

with open_site(config.load()) as site:
    point = Point(site, [TableName("public", "events")], lifetime_seconds=2)
    print("pinned", flush=True)
    time.sleep(600)
"""


def test_a_killed_readers_pin_lapses_and_the_partition_goes(events: Events, leader: Leader) -> None:
    site = events.site
    events.register()
    environ = {
        "MODAK_PG_URL": site.dsn.safe(),
        "MODAK_PG_PASSWORD": site.dsn.password,
        "MODAK_WAREHOUSE": site.settings.lake.warehouse,
        "MODAK_HOME": str(site.settings.home.path),
    }
    with subprocess.Popen(
        [sys.executable, "-c", READER], env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "pinned\n"
        time.sleep(3)
        held = events.tier(leader)
        assert (held.rows, held.dropped) == (200, ()), "the pin is renewed, and needs the heap copy"
        reader.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    dropped: set[str] = set()
    while len(dropped) < 2 and time.monotonic() < deadline:
        time.sleep(0.5)
        dropped |= set(events.tier(leader).dropped)
    assert dropped == {"events_0", "events_100"}
