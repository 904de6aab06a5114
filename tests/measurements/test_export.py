"""A measurement as an Iceberg table: every engine reads every row, nothing is copied, nothing vanishes under it."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from modak.core import faults
from modak.core.clock import FrozenClock, SystemClock
from modak.core.errors import ModakError, Refused
from modak.core.faults import Fault, InjectedFault
from modak.measurements.discover import Source
from modak.measurements.exportable import joined, lake_type, widened
from modak.measurements.exporting import Exported, drop, export
from modak.measurements.state import State
from modak.storage.objects import Objects
from modak.storage.uri import local_path
from tests.measurements.compactor import PATIENCE, run
from tests.measurements.support import (
    AT_ONCE,
    HOUR,
    NOW,
    Rows,
    all_rows,
    as_tuples,
    data_files,
    fill,
    manager,
    points,
    table,
    write,
)
from tests.tables.readers import load_extensions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE = Source("db", "cpu")
VISITED = (
    "export.before_register",
    "export.registered",
    "export.before_files",
    "export.files_written",
    "export.before_commit",
    "export.committed",
    "export.hinted",
    "export.before_sweep",
    "export.swept",
    "export.before_drop",
    "export.dropped",
    "export.before_forget",
    "export.forgotten",
)
EXPORTING = VISITED[:7]
"""The points that a first export passes."""
KILLED = VISITED


def by_pyiceberg(objects: Objects, done: Exported, **how: Any) -> Rows:
    from pyiceberg.table import StaticTable

    props = {key: value for key, value in objects._props.items() if key != "s3.path-style-access"}
    found = StaticTable.from_metadata(done.metadata_location, props).scan(**how).to_arrow()
    return as_tuples(found.to_pylist())


def by_duckdb(done: Exported, where: str = "true") -> Rows:
    import duckdb

    with duckdb.connect() as engine:
        load_extensions(engine)
        engine.execute("SET TimeZone = 'UTC'")
        where = f"SELECT * FROM iceberg_scan('{local_path(done.metadata_location)}') WHERE {where}"
        return as_tuples(engine.execute(where).to_arrow_table().to_pylist())


def test_a_table_shows_every_row_and_copies_nothing(objects: Objects, tmp_path: Path) -> None:
    expected = fill(objects, files=4)
    compactor = manager(objects, tmp_path, storage_props=objects._props)
    compactor.cycle(["hourly"])
    expected += as_tuples(points(HOUR, 3, host="raw"))
    write(objects, table(points(HOUR, 3, host="raw")))
    before = data_files(objects)
    done = export(compactor.state, SOURCE)
    assert (done.files, done.rows, done.added, done.left_out) == (2, 23, 2, ())
    assert by_pyiceberg(objects, done) == expected
    assert data_files(objects) == before
    again = export(compactor.state, SOURCE)
    assert (again.snapshot_id, again.added, again.removed) == (done.snapshot_id, 0, 0)
    assert again.metadata_location == done.metadata_location


def test_duckdb_and_spark_read_it_too_and_prune_by_bounds(spark: SparkSession, folder: Objects) -> None:
    expected = fill(folder, files=3)
    done = export(State(folder, FrozenClock(NOW), AT_ONCE), SOURCE)
    assert by_duckdb(done) == expected
    assert by_duckdb(done, "host = 'h1'") == Counter({row: 1 for row in expected if ("host", "h1") in row})
    frame = spark.read.format("iceberg").load(done.location)
    assert sorted((row.host, row.value) for row in frame.collect()) == sorted(
        (dict(row)["host"], dict(row)["value"]) for row in expected
    )
    assert frame.where("host = 'h2'").count() == 5


def test_files_that_a_snapshot_shows_stay_until_it_is_expired(folder: Objects, tmp_path: Path) -> None:
    clock = FrozenClock(NOW)
    expected = fill(folder, files=3)
    compactor = manager(folder, tmp_path, clock=clock, export_kept=timedelta(hours=6))
    first = export(compactor.state, SOURCE, timedelta(hours=6))
    raw = data_files(folder)
    clock.sleep(60)
    compactor.cycle(["hourly"])
    version = compactor.state.exports.newest(SOURCE)
    assert version is not None
    assert len(version.snapshots) == 2
    # Both snapshots can be read, also with the inputs of the merge long out of date.
    assert set(raw) < set(data_files(folder))
    assert by_duckdb(first) == expected
    assert all_rows(compactor.state) == expected
    clock.sleep(6 * 3600)
    for _ in range(2):
        compactor.cycle(["hourly"])
    assert len(data_files(folder)) == 1
    now = export(compactor.state, SOURCE, timedelta(hours=6))
    assert by_duckdb(now) == by_pyiceberg(folder, now) == expected
    assert now.snapshots == 1
    kept = [meta.path.rpartition("/")[2] for meta in folder.list("_iceberg")]
    assert sum(name.endswith(".avro") for name in kept) == 2


def test_columns_that_come_and_widen_keep_their_ids(folder: Objects) -> None:
    state = State(folder, FrozenClock(NOW), AT_ONCE)
    moment = pa.array([HOUR], pa.timestamp("us", tz="UTC"))
    write(folder, pa.table({"time": moment, "n": pa.array([1], pa.int32())}))
    export(state, SOURCE)
    write(folder, pa.table({"time": moment, "n": pa.array([1 << 40]), "more": ["x"]}))
    done = export(state, SOURCE)
    at = HOUR.isoformat()
    assert (
        by_duckdb(done)
        == by_pyiceberg(folder, done)
        == Counter([(("more", None), ("n", 1), ("time", at)), (("more", "x"), ("n", 1 << 40), ("time", at))])
    )


def test_files_that_iceberg_cannot_read_are_left_out_and_named(folder: Objects, tmp_path: Path) -> None:
    state = State(folder, FrozenClock(NOW), AT_ONCE)
    expected = fill(folder, files=2)
    odd = [
        write(folder, b"no parquet"),
        write(folder, pa.table({"time": pa.array([5], pa.int64())})),
        write(folder, pa.table({"time": pa.array([HOUR], pa.timestamp("us", tz="UTC")), "value": ["text"]})),
    ]
    done = export(state, SOURCE)
    assert {path for path, _ in done.left_out} == set(odd)
    assert by_pyiceberg(folder, done) == expected
    record = manager(folder, tmp_path).cycle(["hourly"])
    assert sum("is not in the exported table" in problem for problem in record.problems) == 2


def test_nothing_to_show_is_told(folder: Objects) -> None:
    with pytest.raises(Refused, match="nothing that a table could show"):
        export(State(folder, FrozenClock(NOW), AT_ONCE), SOURCE)
    with pytest.raises(Refused, match="cannot be the name"):
        export(State(folder, FrozenClock(NOW), AT_ONCE), Source("..", "cpu"))


def test_a_database_with_slashes_has_its_table_and_loses_it_by_drop(objects: Objects) -> None:
    state = State(objects, FrozenClock(NOW), AT_ONCE)
    source = Source("team/eu prod", "cpu")
    expected = fill(objects, files=2, database=source.database)
    done = export(state, source)
    assert by_pyiceberg(objects, done) == expected
    assert list(state.exports.all()) == [source]
    assert drop(state, source) > 0
    assert drop(state, source) == 0
    assert list(state.exports.all()) == []
    assert len(data_files(objects)) == 2


def test_two_exporters_do_not_work_on_one_table(folder: Objects) -> None:
    fill(folder)
    one, other = (State(folder, SystemClock(), PATIENCE) for _ in range(2))
    met: list[str] = []

    def meanwhile(point: str) -> None:
        if point == "export.before_commit":
            faults.watch(None)
            try:
                export(other, SOURCE)
            except ModakError as error:
                met.append(error.code)

    faults.watch(meanwhile)
    export(one, SOURCE)
    assert met == ["measurements.claimed"]


@pytest.mark.parametrize("struck", VISITED)
def test_an_export_that_dies_is_done_again_and_leaves_nothing(folder: Objects, tmp_path: Path, struck: str) -> None:
    clock = FrozenClock(NOW)
    expected = fill(folder, files=2)
    state = State(folder, clock, AT_ONCE)
    if struck not in EXPORTING:
        export(state, SOURCE)
        write(folder, table(points(HOUR, 2, host="new")))
        expected += as_tuples(points(HOUR, 2, host="new"))
        clock.sleep(1)
        export(state, SOURCE)
        clock.sleep(3600)
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        (drop if "drop" in struck or "forg" in struck else export)(state, SOURCE, *_kept(struck))
    faults.arm(None)
    after = State(folder, clock, AT_ONCE)
    done = export(after, SOURCE, timedelta(minutes=1))
    assert by_pyiceberg(folder, done) == expected
    names = [meta.path.rpartition("/")[2] for meta in folder.list("_iceberg")]
    assert sum(name.endswith(".avro") for name in names) == 2 * done.snapshots
    drop(after, SOURCE)
    assert list(folder.list("_iceberg")) == []
    assert all_rows(after) == expected


def _kept(struck: str) -> tuple[timedelta, ...]:
    return () if "drop" in struck or "forg" in struck else (timedelta(minutes=1),)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "killed_at" in metafunc.fixturenames:
        drawn = random.Random(int(metafunc.config.getoption("randomly_seed", 0))).choice(KILLED)
        full = pytest.mark.full
        metafunc.parametrize(
            "killed_at", [pytest.param(point, marks=() if point == drawn else (full,)) for point in KILLED]
        )


def test_after_a_kill_of_an_exporter_the_next_one_goes_on(folder: Objects, tmp_path: Path, killed_at: str) -> None:
    expected = fill(folder, files=2)
    state = State(folder, SystemClock(), PATIENCE)
    if killed_at not in EXPORTING:
        export(state, SOURCE)
        write(folder, table(points(HOUR, 2, host="new")))
        expected += as_tuples(points(HOUR, 2, host="new"))
        export(state, SOURCE)
        state.clock.sleep(1.1)
    act = "drop" if killed_at in VISITED[-4:] else "export"
    assert run("--do", act, "--kill", killed_at, root=tmp_path) == -9
    # The claim of the dead must have stood still for a while.
    state.clock.sleep(0.6)
    if act == "drop":
        drop(state, SOURCE)
        assert list(folder.list("_iceberg")) == []
    done = export(state, SOURCE)
    assert by_pyiceberg(folder, done) == expected
    assert all_rows(state) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.int16(), "int"),
        (pa.int64(), "long"),
        (pa.uint32(), None),
        (pa.dictionary(pa.int32(), pa.string()), "string"),
        (pa.decimal128(10, 2), "decimal(10,2)"),
        (pa.timestamp("us", tz="Europe/Berlin"), "timestamptz"),
        (pa.timestamp("us"), "timestamp"),
        (pa.timestamp("ms"), None),
        (pa.list_(pa.int32()), None),
        (pa.time64("us"), None),
    ],
)
def test_types_have_one_meaning_or_none(kind: Any, expected: str | None) -> None:
    assert lake_type(kind) == expected


def test_only_what_iceberg_widens_is_widened() -> None:
    assert widened("int", "long") == widened("long", "int") == "long"
    assert widened("double", "float") == "double"
    assert widened("decimal(5,2)", "decimal(10,2)") == "decimal(10,2)"
    assert [widened("int", "double"), widened("decimal(5,2)", "decimal(5,3)"), widened("string", "long")] == [None] * 3
    assert "only in case" in str(joined({"host": "string"}, pa.schema([("Host", pa.string())])))
