"""A measurement as a DataFrame: every row once, at any moment of a compaction."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.errors import ModakError, Refused, UsageError
from modak.measurements.discover import Source
from modak.measurements.footers import footers
from modak.measurements.generate import Shape, generate
from modak.measurements.reading import read, visible_files
from modak.measurements.runners import SparkRunner
from modak.measurements.state import State
from modak.storage.objects import Objects
from tests.measurements.support import (
    AT_ONCE,
    HOUR,
    NOW,
    all_rows,
    data_files,
    fill,
    manager,
    parquet,
    points,
    table,
    write,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_frame_made_before_a_cycle_has_every_row_after_it(
    spark: SparkSession, objects: Objects, props: dict[str, str], tmp_path: Path
) -> None:
    expected = fill(objects, files=6)
    state = State(objects, FrozenClock(NOW), AT_ONCE)
    before = read(spark, state, "db", "cpu")
    compactor = manager(
        objects, tmp_path, storage_props=props, runner=SparkRunner(spark), clock=FrozenClock(NOW + timedelta(seconds=1))
    )
    record = compactor.cycle(["hourly"])
    assert [job.error for job in record.jobs] == [""]
    assert len(data_files(objects)) == 7
    after = read(spark, state, "db", "cpu")
    for frame in (before, after):
        found = Counter((row.host, row.value) for row in frame.collect())
        assert found == Counter((dict(key)["host"], dict(key)["value"]) for key in expected.elements())
    inside = read(spark, state, "db", "cpu", HOUR, HOUR + timedelta(seconds=2))
    assert sorted((row.host, row.value) for row in inside.collect()) == [("h0", 0.0), ("h0", 1.0)]
    assert read(spark, state, "db", "nothing").count() == 0


def test_files_that_differ_are_read_under_one_schema(spark: SparkSession, folder: Objects) -> None:
    write(folder, table(points(HOUR, 1)))
    write(folder, pa.table({"time": pa.array([int(HOUR.timestamp()) * 10**6]), "n": pa.array([7], pa.uint64())}))
    rows = read(spark, folder, "db", "cpu").collect()
    assert {(row.time.timestamp(), row.host, row.value, row.n) for row in rows} == {
        (HOUR.timestamp(), "a", 0.0, None),
        (HOUR.timestamp(), None, None, 7),
    }


def test_the_reading_of_the_page_runs(
    spark: SparkSession, folder: Objects, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(folder, Shape("demo", ("cpu",), datetime(2026, 11, 1, 12, tzinfo=UTC), 1, 2, 100, 5))
    page = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text()
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import read\n" in each)
    exec(compile(code.replace("/tmp/measurements", str(tmp_path / "store")), "page", "exec"), {"spark": spark})
    assert "host-0004" in capsys.readouterr().out


def test_files_that_cannot_be_read_are_an_error_or_left_out_if_so_wanted(spark: SparkSession, folder: Objects) -> None:
    fill(folder, files=2)
    corrupt = write(folder, b"no parquet")
    with pytest.raises(ModakError, match=r"cannot be read.*1 such files"):
        read(spark, folder, "db", "cpu")
    assert read(spark, folder, "db", "cpu", unreadable="skip").count() == 10
    folder.delete([corrupt])
    odd = pa.table({"time": pa.array([HOUR], pa.timestamp("us", tz="UTC")), "value": ["text"]})
    write(folder, odd)
    with pytest.raises(ModakError, match="does not fit"):
        read(spark, folder, "db", "cpu")
    assert read(spark, folder, "db", "cpu", unreadable="skip").count() == 10


@pytest.mark.parametrize("point", ["manifest.begun", "job.uploaded", "job.before_commit", "job.committed"])
def test_what_counts_is_the_same_at_every_moment(folder: Objects, tmp_path: Path, point: str) -> None:
    expected = fill(folder, files=4)
    state = State(folder, FrozenClock(NOW), AT_ONCE)
    seen = []

    def look(reached: str) -> None:
        if reached == point:
            faults.watch(None)
            seen.append(all_rows(state))

    faults.watch(look)
    manager(folder, tmp_path).cycle(["hourly"])
    assert seen == [expected]


def test_only_windows_and_files_inside_the_asked_time_are_looked_at(folder: Objects) -> None:
    state = State(folder, FrozenClock(NOW), AT_ONCE)
    for day in range(3):
        for month in (0, 40):
            hour = HOUR + timedelta(days=day + month)
            write(folder, table(points(hour, 2)), hour=hour)
    source = Source("db", "cpu")
    assert len(visible_files(state, source)) == 6
    some = visible_files(state, source, HOUR, HOUR + timedelta(days=1))
    assert [file.place.window.start for file in some] == [HOUR]
    assert len(visible_files(state, source, HOUR + timedelta(days=1))) == 5
    (pinned,) = footers((folder, [some[0].meta]))
    assert (pinned.rows, pinned.earliest, pinned.latest) == (2, HOUR, HOUR + timedelta(seconds=1))


@pytest.mark.parametrize("columns", [3, 2_000])
def test_a_footer_is_read_from_the_end_of_a_file_alone(objects: Objects, columns: int) -> None:
    rows = 20_000 if columns == 3 else 30
    wide = {f"c{number}": pa.array(range(rows), pa.int64()) for number in range(columns)}
    path = write(objects, pa.table({"time": pa.array([HOUR] * rows, pa.timestamp("us", tz="UTC")), **wide}))
    meta = objects.head(path)
    assert meta is not None
    assert meta.size > 100 << 10
    (pinned,) = footers((objects, [meta]))
    assert (pinned.problem, pinned.rows, pinned.earliest) == ("", rows, HOUR)
    assert len(pa.ipc.read_schema(pa.py_buffer(pinned.schema))) == columns + 1


def test_a_file_that_was_replaced_since_is_told_and_not_read(folder: Objects) -> None:
    path = write(folder, table(points(HOUR, 2)))
    meta = folder.head(path)
    assert meta is not None
    folder.put(path, parquet(table(points(HOUR, 3))))
    with pytest.raises(ModakError, match="compacted away"):
        footers((folder, [meta]))


def test_hostile_names_and_bounds_are_refused(folder: Objects) -> None:
    with pytest.raises(Refused):
        read(None, folder, "db/../x", "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        read(None, folder, "db", "cpu", datetime(2026, 1, 2), datetime(2026, 1, 1))  # type: ignore[arg-type] # noqa: DTZ001
