"""Many files in little memory: ten thousand small, freed or stranded ones, twenty thousand foreign equality deletes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from modak.catalog.journal import Journal
from modak.core.ids import new_op_id
from modak.core.states import OpPhase
from modak.lake.changes import Append
from modak.lake.iceberg.files import FileWriter
from modak.lake.model import data_folder
from modak.storage.uri import local_path, normal
from modak.tables.landing import land
from tests.maintenance import foreign
from tests.maintenance.lake import Lake, did, original

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

LIMIT = 2 << 30


@contextmanager
def within_two_gigabytes(lake: Lake) -> Iterator[None]:
    """The driver's Python memory together with what the JVM's heap holds stays below the limit."""
    process, runtime = psutil.Process(), lake.site.lake._java.jvm.java.lang.Runtime.getRuntime()
    runtime.gc()
    ended, peak = threading.Event(), [0]

    def sample() -> None:
        while not ended.wait(0.2):
            heap = runtime.totalMemory() - runtime.freeMemory()
            peak[0] = max(peak[0], process.memory_info().rss + heap)

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    print(f"peak {peak[0] >> 20} MiB")
    assert 0 < peak[0] < LIMIT


def append(lake: Lake, files: int, rows: int = 2) -> None:
    """So many small files in the first band, in one commit of ours."""
    site, table = lake.site, lake.table
    state = site.reader.state(lake.events.name)
    writer, op_id = site.writer(lake.leader.epoch), new_op_id(site.clock)
    folder = data_folder(table.location, op_id)
    Journal(writer).begin(op_id, state.table.table_id, "tier", {}, [folder])
    made = []
    for number in range(files):
        out = FileWriter(folder, table.schema, table.layout, task=f"{number:06d}", tier_key="ts")
        keys = pa.array(range(20_000 + number * rows, 20_000 + (number + 1) * rows), pa.int64())
        arrays = [keys, pa.array([number % 100] * rows, pa.int64()), pa.array(["small"] * rows)]
        out.write(pa.RecordBatch.from_arrays(arrays, schema=out.schema))
        made += out.close()
    land(
        site,
        writer,
        lake.events.name,
        op_id,
        OpPhase.PLANNED,
        lambda _lake, _state: [Append(tuple(made))],
        lambda tx, prepared, now: tx.move(
            now.cutline,
            replace(now.cutline, metadata_location=prepared.new_location, snapshot_id=prepared.snapshot_id),
        ),
        "tier",
    )


def data_files(lake: Lake) -> set[str]:
    """Every file in the table's data folder."""
    return {entry.uri for entry in lake.site.store.list(f"{lake.table.location}/data")}


@pytest.fixture(params=["embedded", pytest.param("spark", marks=pytest.mark.spark)])
def large(lake: Lake, request: pytest.FixtureRequest) -> Lake:
    lake.engine = request.param
    return lake


def test_ten_thousand_small_files_become_two(large: Lake) -> None:
    append(large, 10_000)
    with within_two_gigabytes(large):
        counters = did(large.maintain(), "pack").counters
    assert counters["files_before"] == 10_001
    assert len(large.files()) == 2
    assert sum(file.file.rows for file in large.files()) == 20_200


def test_ten_thousand_freed_files_go(large: Lake) -> None:
    append(large, 10_000)
    large.policy(snapshot_expiry_enabled=False)
    assert did(large.maintain(), "pack").counters["files_before"] == 10_001
    large.policy(snapshot_retention_hours=0, snapshot_min_retained=1)
    with within_two_gigabytes(large):
        counters = did(large.maintain(), "expiry").counters
    assert counters["files_deleted"] > 10_000
    assert data_files(large) == {normal(file.file.path) for file in large.files()}
    assert len(large.rows()) == 20_200


def test_ten_thousand_stranded_files_go_and_ten_thousand_live_ones_stay(large: Lake) -> None:
    append(large, 10_000)
    large.policy(orphan_sweep_enabled=True, rewrite_enabled=False)
    stranded = Path(local_path(large.table.location) or "", "data", "stranded")
    stranded.mkdir()
    for number in range(10_000):
        (stranded / f"{number}.parquet").write_bytes(b"left")
    foreign.grow_old(str(stranded.parent))
    with within_two_gigabytes(large):
        counters = did(large.maintain(), "orphans").counters
    assert (counters["files_deleted"], counters["bytes_deleted"]) == (10_000, 40_000)
    assert data_files(large) == {normal(file.file.path) for file in large.files()}
    assert len(large.rows()) == 20_200


def test_twenty_thousand_equality_deletes_are_paid_off(large: Lake) -> None:
    large.policy(rewrite_enabled=False)
    append(large, 50, rows=500)
    foreign.equality_delete(large, [[20_000 + number] for number in range(20_000)])
    with within_two_gigabytes(large):
        counters = did(large.maintain(), "debt").counters
    assert counters["delete_files_dropped"] == 20_000
    assert not [file for file in large.files() if file.deletes]
    found = large.rows()
    assert original() <= found
    assert len(found) == 200 + 25_000 - 20_000
