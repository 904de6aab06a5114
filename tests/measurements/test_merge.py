"""The merge: types are widened only without loss, equality is what people mean, nothing is lost or made up."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modak.measurements.merge import Merged, MergeOrder, merge
from modak.measurements.types import wider

T0 = datetime(2026, 11, 1, 9, tzinfo=UTC)
MICROS = int(T0.timestamp()) * 1_000_000


def merged(tmp_path: Path, *tables: pa.Table, tags: str | None = None, **more: Any) -> tuple[Merged, pa.Table]:
    """Files of the tables merged, and the outputs read again."""
    inputs = {}
    for number, each in enumerate(tables):
        file = tmp_path / f"in-{number}.parquet"
        pq.write_table(each.replace_schema_metadata({"arc:tags": tags} if tags else None), file)
        inputs[f"f{number}"] = file
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    result = merge(MergeOrder(inputs, work, 1 << 30, memory_bytes=256 << 20, **more))
    read = [pq.read_table(output.file) for output in result.outputs]
    return result, pa.concat_tables(read) if read else pa.table({})


def at(values: list[Any], kind: Any = None, times: list[int] | None = None) -> pa.Table:
    offsets = times or list(range(len(values)))
    stamps = pa.array([MICROS + offset for offset in offsets], pa.timestamp("us", tz="UTC"))
    return pa.table({"time": stamps, "v": pa.array(values, kind)})


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.int8(), pa.int64(), pa.int64()),
        (pa.uint32(), pa.int8(), pa.int64()),
        (pa.uint64(), pa.uint8(), pa.uint64()),
        (pa.uint64(), pa.int64(), None),
        (pa.int64(), pa.float64(), None),
        (pa.int32(), pa.float64(), pa.float64()),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.int16(), pa.float32(), pa.float32()),
        (pa.uint16(), pa.float32(), pa.float64()),
        (pa.uint32(), pa.float64(), None),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.decimal128(10, 2), pa.decimal128(8, 4), pa.decimal128(12, 4)),
        (pa.decimal128(38, 0), pa.decimal128(38, 38), None),
        (pa.null(), pa.string(), pa.string()),
        (pa.string(), pa.binary(), None),
        (pa.string(), pa.int64(), None),
        (pa.timestamp("us"), pa.timestamp("us", tz="UTC"), None),
        (pa.date32(), pa.timestamp("us"), None),
        (pa.bool_(), pa.int8(), None),
    ],
)
def test_types_meet_only_where_nothing_is_lost(one: Any, other: Any, expected: Any) -> None:
    assert wider(one, other) == expected
    assert wider(other, one) == expected


def test_integers_that_a_double_cannot_hold_stay_out_of_it(tmp_path: Path) -> None:
    whole = at([2**53, 2**53 + 1, 7], pa.int64())
    broken = at([0.5], pa.float64())
    result, rows = merged(tmp_path, whole, broken, tags="host")
    assert rows["v"].to_pylist() == [2**53, 2**53 + 1, 7]
    assert [path for path, _ in result.aside] == ["f1"]
    assert "no type for both" in result.aside[0][1]


def test_a_column_that_a_file_lacks_is_missing_there(tmp_path: Path) -> None:
    more = at([1]).append_column("extra", pa.array(["x"]))
    nulls = at([3], times=[2]).append_column("extra", pa.nulls(1))
    _, rows = merged(tmp_path, more, at([2], times=[1]), nulls)
    assert rows.select(["v", "extra"]).to_pylist() == [
        {"v": 1, "extra": "x"},
        {"v": 2, "extra": None},
        {"v": 3, "extra": None},
    ]


@pytest.mark.parametrize(
    "times",
    [
        pa.array([MICROS], pa.int64()),
        pa.array([T0.replace(tzinfo=None)], pa.timestamp("ms")),
        pa.array([T0], pa.timestamp("ns", tz="America/New_York")),
        pa.array(["2026-11-01T09:00:00"]),
        pa.array(["2026-11-01T11:00:00+02:00"]),
        pa.array(["2026-11-01 09:00:00.000000Z"]).dictionary_encode(),
    ],
)
def test_every_form_of_time_becomes_one(tmp_path: Path, times: pa.Array) -> None:
    _, rows = merged(tmp_path, at([1]), pa.table({"time": times, "v": pa.array([1])}), tags="v")
    assert rows.schema.field("time").type == pa.timestamp("us", tz="UTC")
    assert rows["time"].to_pylist() == [T0]


@pytest.mark.parametrize(
    "times",
    [
        pa.array([MICROS * 1000 + 1], pa.timestamp("ns")),
        pa.array(["2026-11-01T09:00:00.000000001Z"]),
    ],
)
def test_times_between_two_microseconds_stay_uncompacted(tmp_path: Path, times: pa.Array) -> None:
    result, rows = merged(tmp_path, at([1]), pa.table({"time": times, "v": pa.array([2])}))
    assert rows["v"].to_pylist() == [1]
    assert result.aside == (("f1", "it has times between two microseconds"),)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (pa.table({"v": [1]}), "no column time"),
        (at([1]).rename_columns(["time", "V"]), "only in case"),
        (pa.table({"time": [1.5], "v": [1]}), "cannot be merged safely"),
        (at([timedelta(1)], pa.duration("s")), "cannot be merged safely"),
    ],
)
def test_files_that_do_not_fit_are_named_with_the_reason(tmp_path: Path, odd: pa.Table, why: str) -> None:
    result, rows = merged(tmp_path, at([1, 2, 3]), odd)
    assert rows.num_rows == 3
    assert [path for path, _ in result.aside] == ["f1"]
    assert why in result.aside[0][1]


def test_missing_equals_missing_nan_equals_nan_and_zero_has_no_sign(tmp_path: Path) -> None:
    same = [0, 0, 1, 1, 2, 2, 3, 3]
    rows = at([None, None, math.nan, math.nan, -0.0, 0.0, 1.0, 1.5], pa.float64(), times=same)
    result, out = merged(tmp_path, rows, tags="v")
    assert (result.rows_in, result.rows_out, result.duplicates) == (8, 5, 3)
    assert [str(value) for value in out["v"].to_pylist()][:2] == ["None", "nan"]


def test_nested_rows_are_compared_whole(tmp_path: Path) -> None:
    values = [{"a": [1, 2]}, {"a": [1, 2]}, {"a": [2, 1]}]
    result, out = merged(tmp_path, at(values, times=[0, 0, 0]), tags="v")
    assert result.duplicates == 1
    assert sorted(map(str, out["v"].to_pylist())) == sorted(map(str, values[1:]))


def test_missing_and_empty_nested_values_between_equal_rows_keep_none_of_them_twice(tmp_path: Path) -> None:
    values: list[Any] = [None, {"a": []}, {"a": None}, {"a": [0.0]}, {"a": [-0.0]}] * 20
    result, out = merged(tmp_path, at(values, times=[0] * len(values)), tags="v")
    assert (result.rows_out, result.duplicates) == (4, 96)
    assert {str(value).replace("-", "") for value in out["v"].to_pylist()} == set(map(str, values[:4]))


def test_rows_that_differ_in_one_value_are_two_rows(tmp_path: Path) -> None:
    rows = pa.table({"time": [T0] * 3, "host": ["a"] * 3, "v": [1, 2, 1]})
    result, _ = merged(
        tmp_path,
        rows.cast(pa.schema([("time", pa.timestamp("us", tz="UTC")), ("host", pa.string()), ("v", pa.int64())])),
        tags="host",
    )
    assert (result.rows_out, result.duplicates) == (2, 1)


def test_a_partition_folder_never_becomes_a_column(tmp_path: Path) -> None:
    folder = tmp_path / "host=evil" / "day=1"
    folder.mkdir(parents=True)
    _, rows = merged(folder, at([1]))
    assert rows.schema.names == ["time", "v"]


def test_missing_keys_sort_first_and_unknown_sort_keys_are_ignored(tmp_path: Path) -> None:
    rows = at([1, 2, 3]).append_column("host", pa.array(["b", None, "a"]))
    _, out = merged(tmp_path, rows, sort_keys=("nope", "host", "time"))
    assert out["host"].to_pylist() == [None, "a", "b"]


def test_outputs_have_statistics_bloom_filters_and_the_tags_of_all_inputs(tmp_path: Path) -> None:
    rows = at([1, 2]).append_column("host", pa.array(["a", "b"]))
    result, _ = merged(tmp_path, rows, tags="host")
    meta = pq.read_metadata(result.outputs[0].file)
    assert meta.metadata[b"arc:tags"] == b"host"
    assert all(meta.row_group(0).column(index).is_stats_set for index in range(3))
    assert meta.row_group(0).column(2).compression == "ZSTD"
    assert meta.row_group(0).sorting_columns
    probe = "SELECT bloom_filter_excludes FROM parquet_bloom_probe(?, 'host', ?)"
    file = str(result.outputs[0].file)
    assert [duckdb.execute(probe, [file, value]).fetchall() for value in ("a", "zz")] == [[(False,)], [(True,)]]


VALUE = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, 2**53, 2**53 + 1]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", None]), VALUE), max_size=12), max_size=4)
)
def test_what_comes_out_is_the_set_of_what_went_in(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[tuple[int, str | None, int | None]]]
) -> None:
    schema = pa.schema([("time", pa.timestamp("us", tz="UTC")), ("host", pa.string()), ("v", pa.int64())])
    tables = [
        pa.Table.from_pylist([{"time": T0 + timedelta(seconds=t), "host": h, "v": v} for t, h, v in rows], schema)
        for rows in files
    ]
    result, out = merged(tmp_path_factory.mktemp("merge"), *tables, tags="host", sort_keys=("host",))
    rows = [row for some in files for row in some]
    found = [((row["time"] - T0).seconds, row["host"], row["v"]) for row in out.to_pylist()]
    assert len(found) == len(set(found))
    assert set(found) == set(rows)
    assert result.duplicates == len(rows) - len(set(rows))
    keys = [(host is not None, host or "", time) for time, host, _ in found]
    assert keys == sorted(keys)


def test_every_plain_type_survives(tmp_path: Path) -> None:
    row = {
        "time": pa.array([T0], pa.timestamp("us", tz="UTC")),
        "b": pa.array([True]),
        "u": pa.array([2**64 - 1], pa.uint64()),
        "d": pa.array([Decimal("12345678901234567890.12")], pa.decimal128(30, 2)),
        "day": pa.array([date(2026, 1, 2)]),
        "bytes": pa.array([b"\x00\xff"]),
        "naive": pa.array([datetime(2026, 1, 2, 3)], pa.timestamp("us")),  # noqa: DTZ001
        "list": pa.array([[1, None]]),
        'odd "name"': pa.array(["x'y"]),
    }
    _, out = merged(tmp_path, pa.table(row), pa.table({**row, "time": row["time"]}), tags="b")
    assert out.to_pylist() == pa.table(row).to_pylist()
