"""Whole cycles on a folder and on a bucket: what goes in comes out, once, in fewer files."""

from __future__ import annotations

import io
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.core.clock import FrozenClock
from modak.core.errors import ModakError, Refused, UsageError
from modak.measurements.discover import Source
from modak.measurements.history import recall
from modak.measurements.isolation import SubprocessJobConfig, SubprocessJobResult
from modak.measurements.manager import CycleAlreadyRunning
from modak.measurements.runners import ProcessRunner
from modak.storage.objects import Objects
from tests.measurements.support import (
    HOUR,
    NOW,
    Inside,
    Rows,
    all_rows,
    as_tuples,
    data_files,
    fill,
    manager,
    parquet,
    points,
    table,
    tiers,
    visible_rows,
    write,
)

HOURLY = ["hourly"]


def test_an_hour_of_small_files_becomes_one(objects: Objects, props: dict[str, str], tmp_path: Path) -> None:
    expected = fill(objects, files=5)
    compactor = manager(objects, tmp_path / "tmp", storage_props=props)
    record = compactor.cycle(HOURLY)
    assert [(job.files, job.rows_in, job.rows_out, job.error) for job in record.jobs] == [(5, 25, 25, "")]
    (left,) = data_files(objects)
    assert left.endswith("_compacted.parquet")
    assert left.startswith("db/cpu/2026/11/01/09/cpu_20261101_090000_")
    assert all_rows(compactor.state) == expected
    assert compactor.manifest_manager.list_manifests() == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_hours_then_go_into_their_day(objects: Objects, props: dict[str, str], tmp_path: Path) -> None:
    expected: Rows = Counter()
    for hour in range(3):
        expected.update(fill(objects, files=3, hour=HOUR + timedelta(hours=hour)))
    write(objects, table(points(HOUR + timedelta(hours=5), 2)), hour=HOUR + timedelta(hours=5))
    expected.update(as_tuples(points(HOUR + timedelta(hours=5), 2)))
    compactor = manager(objects, tmp_path / "tmp", storage_props=props)
    assert compactor.run_compaction_cycle() == 1
    (left,) = data_files(objects)
    assert left.startswith("db/cpu/2026/11/01/cpu_")
    assert left.endswith("_daily.parquet")
    assert all_rows(compactor.state) == expected
    assert compactor.run_compaction_cycle() == 2
    assert data_files(objects) == [left]


def test_an_empty_store_is_a_cycle_with_nothing_to_do(objects: Objects, tmp_path: Path) -> None:
    compactor = manager(objects, tmp_path)
    assert compactor.run_compaction_cycle() == 1
    assert compactor.get_current_cycle_id() == 1
    assert not compactor.is_cycle_running()
    assert compactor.find_candidates() == []


def test_databases_with_slashes_and_hidden_folders(folder: Objects, tmp_path: Path) -> None:
    fill(folder, database="team/eu/prod")
    fill(folder, database="team")
    fill(folder, database="other", measurement="2026")
    for hidden in (".hidden", "_state"):
        folder.put(f"{hidden}/cpu/2026/11/01/09/cpu_20261101_090000_1.parquet", b"x")
    compactor = manager(folder, tmp_path)
    found = {(each.database, each.measurement) for each in compactor.find_candidates() if each.tier == "hourly"}
    assert found == {("team/eu/prod", "cpu"), ("team", "cpu"), ("other", "2026")}
    record = compactor.cycle(HOURLY, database="team")
    assert [job.database for job in record.jobs] == ["team"]


def test_the_same_base_name_in_two_hours_is_two_files(folder: Objects, tmp_path: Path) -> None:
    expected: Rows = Counter()
    for hour in (HOUR, HOUR + timedelta(hours=1)):
        rows = points(hour, 3)
        folder.put(f"db/cpu/{hour:%Y/%m/%d/%H}/cpu_20261101_120000_5.parquet", parquet(table(rows)))
        expected.update(as_tuples(rows))
    compactor = manager(folder, tmp_path)
    compactor.cycle(["daily"])
    assert all_rows(compactor.state) == expected
    assert len(data_files(folder)) == 1


def test_new_files_are_merged_with_the_small_output_that_is_there(folder: Objects, tmp_path: Path) -> None:
    expected = fill(folder)
    compactor = manager(folder, tmp_path)
    compactor.cycle(HOURLY)
    more = points(HOUR + timedelta(minutes=30), 4, host="late")
    for part in (more[:2], more[2:]):
        write(folder, table(part))
    compactor.cycle(HOURLY)
    assert len(data_files(folder)) == 1
    assert all_rows(compactor.state) == expected + as_tuples(more)


def test_outputs_are_sorted_roll_at_the_target_and_carry_the_tags(folder: Objects, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    start = int(HOUR.timestamp() * 1_000_000)
    for _ in range(6):
        times = pa.array(start + generator.integers(0, 3_600_000_000, 20_000), pa.timestamp("us", tz="UTC"))
        hosts = pa.array([f"h{number}" for number in range(50)]).take(pa.array(generator.integers(0, 50, 20_000)))
        rows = pa.table({"time": times, "host": hosts, "value": generator.random(20_000)})
        write(folder, rows.replace_schema_metadata({"arc:tags": "host"}))
    compactor = manager(
        folder, tmp_path, tiers=tiers(folder, FrozenClock(NOW), target_size_mb=1), default_sort_keys=("host",)
    )
    record = compactor.cycle(HOURLY)
    assert record.jobs[0].outputs > 1
    last = None
    for path in sorted(data_files(folder)):
        stored = folder.get(path).data
        assert len(stored) < 2 << 20
        file = pq.ParquetFile(io.BytesIO(stored))
        assert file.metadata.metadata[b"arc:tags"] == b"host"
        read = file.read()
        assert read.equals(read.sort_by([("host", "ascending"), ("time", "ascending")]))
        first = (read["host"][0].as_py(), read["time"][0].as_py())
        assert last is None or last <= first
        last = (read["host"][-1].as_py(), read["time"][-1].as_py())
    assert sum(pq.ParquetFile(io.BytesIO(folder.get(path).data)).metadata.num_rows for path in data_files(folder)) == (
        120_000
    )


def test_files_that_cannot_be_read_stay_are_named_once_and_do_not_count_again(folder: Objects, tmp_path: Path) -> None:
    expected = fill(folder, files=3)
    whole = parquet(table(points(HOUR, 50)))
    bad = [write(folder, b"not parquet"), write(folder, whole[: len(whole) // 2]), write(folder, b"")]
    compactor = manager(folder, tmp_path)
    record = compactor.cycle(HOURLY)
    assert {path for path, _ in record.jobs[0].left_out} == set(bad)
    assert set(bad) < set(data_files(folder))
    assert compactor.find_candidates() == []
    assert compactor.cycle(HOURLY).jobs == []
    good = [path for path in data_files(folder) if path not in bad]
    assert as_tuples(row for path in good for row in pq.read_table(io.BytesIO(folder.get(path).data)).to_pylist()) == (
        expected
    )


def test_no_valid_input_at_all_is_a_failed_job_that_leaves_everything(folder: Objects, tmp_path: Path) -> None:
    bad = [write(folder, b"x"), write(folder, b"y")]
    compactor = manager(folder, tmp_path)
    record = compactor.cycle(HOURLY)
    assert "no valid input" in record.jobs[0].error
    assert data_files(folder) == sorted(bad)
    assert compactor.total_jobs_failed == 1


def test_a_page_that_cannot_be_decoded_isolates_its_file(folder: Objects, tmp_path: Path) -> None:
    expected = fill(folder, files=3)
    broken = bytearray(parquet(table(points(HOUR, 3000))))
    broken[200:1200] = b"\xff" * 1000
    bad = write(folder, bytes(broken))
    compactor = manager(folder, tmp_path)
    record = compactor.cycle(HOURLY)
    assert [path for path, _ in record.jobs[0].left_out] == [bad]
    assert record.jobs[0].error == ""
    folder.delete([bad])
    assert all_rows(compactor.state) == expected


def test_only_named_known_tiers_and_sound_databases_are_taken(folder: Objects, tmp_path: Path) -> None:
    compactor = manager(folder, tmp_path)
    with pytest.raises(UsageError, match="No tier"):
        compactor.run_compaction_cycle_for_tiers([])
    with pytest.raises(UsageError, match="no tier 'yearly'"):
        compactor.run_compaction_cycle_for_database("db", ["yearly"])
    with pytest.raises(Refused):
        compactor.run_compaction_cycle_for_database("../db", HOURLY)


def test_one_cycle_at_a_time(folder: Objects, tmp_path: Path) -> None:
    fill(folder)
    compactor = manager(folder, tmp_path)
    refused: list[type[Exception]] = []

    def meanwhile() -> None:
        assert compactor.is_cycle_running()
        for act in (
            compactor.run_compaction_cycle,
            lambda: compactor.run_compaction_cycle_for_database("db", HOURLY),
        ):
            try:
                act()
            except CycleAlreadyRunning as error:
                refused.append(type(error))

    compactor.set_on_compaction_complete(meanwhile)
    compactor.run_compaction_cycle()
    assert refused[:2] == [CycleAlreadyRunning] * 2
    assert not compactor.is_cycle_running()


def test_the_manager_counts_and_remembers(folder: Objects, tmp_path: Path) -> None:
    fill(folder, files=4)
    compactor = manager(folder, tmp_path)
    compactor.cycle(HOURLY)
    assert (compactor.total_jobs_completed, compactor.total_files_compacted) == (1, 4)
    assert compactor.total_bytes_saved > 0
    stats = compactor.stats()
    assert stats["tiers"]["hourly"]["total_compactions"] == 1
    (told,) = recall(folder)
    assert told.jobs[0].files == 4
    assert told.started_at == NOW


def test_inputs_outlive_the_commit_by_the_grace_period(folder: Objects, tmp_path: Path) -> None:
    from modak.measurements.state import Patience

    expected = fill(folder, files=4)
    clock = FrozenClock(NOW)
    compactor = manager(folder, tmp_path, clock=clock, patience=Patience(timedelta(minutes=15)))
    compactor.cycle(HOURLY)
    assert len(data_files(folder)) == 5
    assert all_rows(compactor.state) == expected
    assert compactor.find_candidates() == []
    clock.sleep(15 * 60)
    compactor.cycle(HOURLY)
    assert len(data_files(folder)) == 1
    assert len(compactor.manifest_manager.list_manifests()) == 1
    assert all_rows(compactor.state) == expected
    clock.sleep(15 * 60)
    compactor.cycle(HOURLY)
    assert compactor.manifest_manager.list_manifests() == []
    assert all_rows(compactor.state) == expected


def test_a_reader_that_came_before_the_commit_keeps_its_files(folder: Objects, tmp_path: Path) -> None:
    expected = fill(folder, files=4)
    compactor = manager(folder, tmp_path)
    lease = compactor.state.lease()
    listed = data_files(folder)
    compactor.state.clock.sleep(1)
    compactor.cycle(HOURLY)
    assert set(listed) < set(data_files(folder))
    lease.release()
    compactor.cycle(HOURLY)
    assert len(data_files(folder)) == 1
    assert visible_rows(compactor.state, Source("db", "cpu")) == expected


def test_a_file_that_is_replaced_while_it_is_merged_makes_the_job_fail(folder: Objects, tmp_path: Path) -> None:
    from modak.core import faults

    fill(folder, files=3)
    victim = data_files(folder)[0]
    new = points(HOUR, 2, host="new")

    def replace(point: str) -> None:
        if point == "job.answered":
            folder.put(victim, parquet(table(new)))

    compactor = manager(folder, tmp_path)
    faults.watch(replace)
    record = compactor.cycle(HOURLY)
    faults.watch(None)
    assert "has changed" in record.jobs[0].error
    assert len(data_files(folder)) == 3
    compactor.cycle(HOURLY)
    assert all_rows(compactor.state) & as_tuples(new) == as_tuples(new)


def test_jobs_in_child_processes(objects: Objects, props: dict[str, str], tmp_path: Path) -> None:
    expected = fill(objects, files=3) + fill(objects, files=3, measurement="mem")
    compactor = manager(objects, tmp_path / "tmp", runner=ProcessRunner(2), storage_props=props)
    record = compactor.cycle(HOURLY)
    assert [job.error for job in record.jobs] == ["", ""]
    assert len(data_files(objects)) == 2
    assert all_rows(compactor.state) == expected


def test_a_partition_can_be_compacted_by_itself(folder: Objects, tmp_path: Path) -> None:
    fill(folder)
    compactor = manager(folder, tmp_path)
    (hourly,) = [each for each in compactor.find_candidates() if each.tier == "hourly"]
    compactor.compact_partition(hourly)
    assert len([path for path in data_files(folder) if "_compacted" in path]) == 1
    other = manager(folder, tmp_path)
    claim = "_compaction_state/claims/db/cpu/day-2026-11-01.json"
    assert other.state.claims.acquire(claim)
    fill(folder)
    with pytest.raises(ModakError, match="Another compactor"):
        compactor.compact_partition(hourly)


def test_rows_without_tags_are_never_taken_for_duplicates(folder: Objects, tmp_path: Path) -> None:
    for tags in (None, "host"):
        for _ in range(3):
            write(folder, table(points(HOUR, 4), tags=tags), measurement=f"m{tags}")
    record = manager(folder, tmp_path).cycle(HOURLY)
    assert {job.measurement: (job.rows_out, job.duplicates) for job in record.jobs} == {
        "mNone": (12, 0),
        "mhost": (4, 8),
    }


def test_an_hour_of_empty_files_becomes_none(folder: Objects, tmp_path: Path) -> None:
    for _ in range(3):
        write(folder, pa.Table.from_pylist([], table([]).schema))
    manager(folder, tmp_path).cycle(HOURLY)
    assert data_files(folder) == []


def test_a_temporary_folder_whose_name_is_a_pattern_is_refused_and_no_file_blamed(
    folder: Objects, tmp_path: Path
) -> None:
    fill(folder)
    record = manager(folder, tmp_path / "odd[1]").cycle(HOURLY)
    assert "cannot be a temporary folder" in record.jobs[0].error
    assert record.jobs[0].left_out == ()
    assert len(data_files(folder)) == 4


class Picky(Inside):
    """Dies for lack of memory over more than so many files; remembers what it was given."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.given: list[SubprocessJobConfig] = []

    def run(self, orders: Any) -> Any:
        answers = []
        for order in orders:
            self.given.append(order)
            too_many = len(order.files) > self.most
            answers += [SubprocessJobResult.failed("exit code 137")] if too_many else super().run([order])
        return answers


def test_a_batch_that_is_too_large_is_halved_and_halves_that_succeed_stay(folder: Objects, tmp_path: Path) -> None:
    expected = fill(folder, files=7)
    runner = Picky(2)
    record = manager(folder, tmp_path, runner=runner).cycle(HOURLY)
    # Seven, three and four, and the four twice two; a half of the three would be a single file.
    assert [len(order.files) for order in runner.given] == [7, 3, 4, 2, 2]
    assert [(job.reason, job.retried) for job in record.jobs] == [
        ("oom_killed", True),
        ("oom_killed", False),
        ("oom_killed", True),
        ("", False),
        ("", False),
    ]
    assert record.failed == 1
    assert len(data_files(folder)) == 5
    assert all_rows(manager(folder, tmp_path).state) == expected


def test_halving_ends_after_four_times(folder: Objects, tmp_path: Path) -> None:
    fill(folder, files=70, rows=1)
    runner = Picky(0)
    manager(folder, tmp_path, runner=runner).cycle(HOURLY)
    assert min(len(order.files) for order in runner.given) == 70 // 16
    assert len(data_files(folder)) == 70


def test_jobs_share_the_memory(folder: Objects, tmp_path: Path) -> None:
    fill(folder, files=2)
    runner = Picky(9)
    manager(folder, tmp_path, runner=runner, memory_limit=6 << 30).cycle(HOURLY)
    assert [order.memory_limit for order in runner.given] == [str((6 << 30) // runner.slots)]


def test_a_source_that_vanishes_is_skipped(folder: Objects, tmp_path: Path) -> None:
    from modak.core import faults

    fill(folder, files=3)
    victim = data_files(folder)[0]

    def vanish(point: str) -> None:
        if point == "manifest.begun":
            faults.watch(None)
            folder.delete([victim])

    faults.watch(vanish)
    (job,) = manager(folder, tmp_path).cycle(HOURLY).jobs
    assert (job.error, job.files, job.left_out) == ("", 2, ((victim, "it is gone"),))
    assert len(data_files(folder)) == 1


def test_keys_to_sort_by_are_chosen_per_measurement(folder: Objects, tmp_path: Path) -> None:
    for name in ("cpu", "mem"):
        fill(folder, files=2, measurement=name)
    runner = Picky(9)
    compactor = manager(
        folder, tmp_path, runner=runner, sort_keys_config={"cpu": ("value", "host")}, default_sort_keys=("host",)
    )
    assert (compactor.get_sort_keys("cpu"), compactor.get_sort_keys("mem")) == (["value", "host"], ["host"])
    compactor.cycle(HOURLY)
    assert {order.measurement: order.sort_keys for order in runner.given} == {
        "cpu": ("value", "host"),
        "mem": ("host",),
    }
    (cpu,) = [path for path in data_files(folder) if "/cpu/" in path]
    read = pq.read_table(io.BytesIO(folder.get(cpu).data))
    assert read.equals(read.sort_by([("value", "ascending"), ("host", "ascending"), ("time", "ascending")]))
