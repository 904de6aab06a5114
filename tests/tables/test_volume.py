"""Volume: one partition uses every core, and a larger partition needs no more memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from modak.postgres.dsn import Dsn
from modak.postgres.splits import ctid_splits
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.site import Site
from modak.tables.tiering.export import SPLIT_BYTES
from tests.tables.conftest import settings_for
from tests.tables.events import Events

pytestmark = pytest.mark.spark


class Peaks:
    """The most memory that a Python worker of Spark, this process and the JVM had, and how long each worker worked."""

    def __enter__(self) -> Peaks:
        self.worker = self.driver = self.jvm = 0
        self.busy: dict[int, float] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        before = {p.pid: self._cpu(p) for p in self._workers(me)}
        while not self._done.wait(0.02):
            self.driver = max(self.driver, me.memory_info().rss)
            self.jvm = max([self.jvm, *(process.memory_info().rss for process in me.children() if _is_java(process))])
            for worker in self._workers(me):
                try:
                    self.worker = max(self.worker, worker.memory_info().rss)
                    worked = self._cpu(worker) - before.get(worker.pid, 0.0)
                    if worked > 0.05:
                        self.busy[worker.pid] = worked
                except psutil.Error:
                    continue

    @staticmethod
    def _workers(me: psutil.Process) -> list[psutil.Process]:
        found = []
        for child in me.children(recursive=True):
            try:
                if "modak.spark.daemon" in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
        return found

    @staticmethod
    def _cpu(process: psutil.Process) -> float:
        try:
            times = process.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)


def _is_java(process: psutil.Process) -> bool:
    try:
        return process.name() == "java"
    except psutil.Error:
        return False


def one_partition(site: Site, name: str, rows: int) -> Events:
    events = Events(site, Events.create(site, partitions=0, last=-1, name=name).name)
    events.add_partition(0, rows)
    events.add_partition(rows, rows)
    events.sql(f"INSERT INTO public.{name} SELECT i, i, 'the body of row ' || i FROM generate_series(0, {rows}) AS i")
    events.register()
    return events


def tier_measured(events: Events, leader: Leader) -> Peaks:
    with Peaks() as watched:
        report = events.tier(leader)
    assert len(report.moved_partitions) == 1
    return watched


@pytest.mark.parametrize("cores", [2, 16])
def test_one_partition_is_cut_into_a_task_for_every_core(cores: int) -> None:
    assert len(ctid_splits(40_000, 320 << 20, SPLIT_BYTES, cores)) == cores


def test_one_partition_uses_several_workers(site: Site, leader: Leader) -> None:
    watched = tier_measured(one_partition(site, "wide", 1_200_000), leader)
    assert len(watched.busy) >= 2


@pytest.mark.full
@pytest.mark.timeout(600)
def test_one_partition_of_five_million_rows_uses_all_cores(site: Site, leader: Leader) -> None:
    cores = site.spark.sparkContext.defaultParallelism
    watched = tier_measured(one_partition(site, "wide", 5_000_000), leader)
    shares = sorted(watched.busy.values(), reverse=True)
    assert len(shares) >= cores
    assert shares[cores - 1] > 0.5 * shares[0], shares


@pytest.fixture
def small_files(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Site]:
    """A site whose files, and with them row groups, are small: the bound on memory is reached with fewer rows."""
    settings = settings_for(fresh_database, warehouse, spark_home, MODAK_TARGET_FILE_BYTES="4MiB")
    with open_site(settings) as opened:
        _ = opened.spark
        yield opened


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_ten_times_larger_partition_needs_hardly_more_memory(small_files: Site) -> None:
    with Leader.campaign(small_files, 5) as leader:
        tier_measured(one_partition(small_files, "warm", 1_000_000), leader)
        small = tier_measured(one_partition(small_files, "small", 1_000_000), leader)
        large = tier_measured(one_partition(small_files, "large", 10_000_000), leader)
    assert len(large.busy) >= 2
    peaks = {name: (getattr(small, name), getattr(large, name)) for name in ("worker", "driver", "jvm")}
    assert all(before > 0 for before, _ in peaks.values())
    assert {name: (b >> 20, a >> 20) for name, (b, a) in peaks.items() if a > b * 1.2} == {}, peaks
