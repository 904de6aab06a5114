"""A large window is sorted as a whole: same rows, no duplicates, ranges that follow each other."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.faults import Fault, InjectedFault
from modak.measurements.candidates import Candidate, Engine, TierPolicy, plan_window
from modak.measurements.isolation import SubprocessJobConfig
from modak.measurements.job import Job, JobConfig
from modak.measurements.runners import SparkRunner
from modak.measurements.sort import Range, sort_range
from modak.measurements.windows import Level
from modak.storage.objects import Meta, Objects
from tests.measurements.support import HOUR, NOW, data_files, manager, tiers, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VISITED = ("sort.before_upload", "sort.uploaded")


def random_rows(generator: np.random.Generator, count: int) -> pa.Table:
    start = int(HOUR.timestamp() * 1_000_000)
    times = pa.array(start + generator.integers(0, 3_600_000_000, count), pa.timestamp("us", tz="UTC"))
    hosts = pa.array([None, *(f"h{number}" for number in range(50))]).take(pa.array(generator.integers(0, 51, count)))
    rows = pa.table({"time": times, "host": hosts, "value": generator.random(count)})
    return rows.replace_schema_metadata({"arc:tags": "host"})


def test_a_large_window_is_sorted_over_all_cores(spark: SparkSession, folder: Objects, tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    made = [random_rows(generator, 55_000) for _ in range(8)]
    for rows in (*made, made[0]):
        write(folder, rows)
    corrupt = write(folder, b"no parquet")
    compactor = manager(
        folder,
        tmp_path,
        tiers=tiers(folder, FrozenClock(NOW), target_size_mb=1),
        default_sort_keys=("host",),
        runner=SparkRunner(spark),
    )
    (job,) = compactor.cycle(["hourly"]).jobs
    assert (job.error, job.files, job.rows_in, job.duplicates) == ("", 9, 495_000, 55_000)
    assert [path for path, _ in job.left_out] == [corrupt]
    outputs = sorted(path for path in data_files(folder) if path != corrupt)
    assert len(outputs) == job.outputs > 4
    read = [pq.read_table(io.BytesIO(folder.get(path).data)) for path in outputs]
    order = [("host", "ascending"), ("time", "ascending")]
    for part in read:
        assert part.equals(part.sort_by(order, null_placement="at_start"))
        assert part.schema.metadata[b"arc:tags"] == b"host"
    ends = [(key(part, 0), key(part, -1)) for part in read]
    assert all(one[1] <= other[0] for one, other in pairwise(ends))
    whole = [("host", "ascending"), ("time", "ascending"), ("value", "ascending")]
    found = pa.concat_tables(read).replace_schema_metadata(None).sort_by(whole)
    assert found.equals(pa.concat_tables(made).replace_schema_metadata(None).sort_by(whole))
    assert [each for each in compactor.find_candidates() if each.tier == "hourly"] == []


def key(part: pa.Table, index: int) -> tuple[str, object]:
    return (part["host"][index].as_py() or "", part["time"][index].as_py())


def test_the_plan_says_which_engine_and_why() -> None:
    policy = TierPolicy("hourly", Level.HOUR, NOW - NOW, 2, 100)

    def plan(size: int, can_sort: bool) -> tuple[Engine, int]:
        pins = tuple(Meta(f"f{index}", size, "e", NOW) for index in range(10))
        made = plan_window(
            Candidate("db", "cpu", "p", tuple(pin.path for pin in pins), "hourly", HOUR, pins=pins),
            policy,
            2,
            can_sort=can_sort,
        )
        assert made.reason
        return made.engine, len(made.batches)

    assert plan(10, True) == (Engine.TASK, 1)
    assert plan(79, True) == (Engine.TASK, 5)
    assert plan(80, True) == (Engine.SORT, 1)
    assert plan(80, False) == (Engine.TASK, 5)


@pytest.mark.parametrize("struck", VISITED)
def test_a_task_that_dies_leaves_only_what_carries_the_job(folder: Objects, tmp_path: Path, struck: str) -> None:
    config = SubprocessJobConfig(
        "db",
        "cpu",
        "db/cpu/2026/11/01/09",
        (),
        "hourly",
        1,
        str(tmp_path / "temp"),
        target_bytes=1 << 20,
        storage_config=json.dumps({"root": folder.root}),
        job_id="20261130t090000000-0123abcd",
    )
    rows = random_rows(np.random.default_rng(1), 100).replace_schema_metadata(None)
    stem = ("db/cpu/2026/11/01/09/cpu_20261101_090000_000000000_20261130t090000000-0123abcd-", "_compacted.parquet")
    work = Range(folder, config, stem, rows.schema.serialize().to_pybytes(), ("host", "time"), ("host",), 5000)
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        sort_range(work, iter(rows.to_batches()), 0)
    faults.arm(None)
    assert all("0123abcd" in path for path in data_files(folder))
    assert list((tmp_path / "temp").iterdir()) == []
    again = sort_range(work, iter(rows.to_batches()), 1000)
    assert [output[0] for output in again["outputs"]] == [f"{stem[0]}00001000{stem[1]}"]


def test_files_whose_times_need_a_look_are_merged_in_batches(
    spark: SparkSession, folder: Objects, tmp_path: Path
) -> None:
    from dataclasses import replace

    for number in range(3):
        write(folder, pa.table({"time": pa.array([number], pa.int64()), "v": [number]}))
    compactor = manager(folder, tmp_path, runner=SparkRunner(spark))
    tier = compactor.tiers[0]
    (hint,) = [each for each in compactor.find_candidates() if each.tier == "hourly"]
    small = replace(tier.policy, target_bytes=10)
    assert plan_window(hint, small, 2, can_sort=True).engine is Engine.SORT
    from modak.measurements.sort import sort_in_spark

    config = JobConfig("cpu", hint.partition_path, hint.files, folder, "db", pins=hint.pins, state=compactor.state)
    job = Job(config)
    answer = sort_in_spark(spark, job.begin())
    assert "merge in batches" in answer.error
    job.finish(answer)
    assert len(data_files(folder)) == 3
