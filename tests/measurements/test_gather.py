"""More files than are read at a time: nobody can tell from what comes out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.measurements import gather
from modak.measurements.engine import opened
from modak.measurements.merge import Merged, MergeOrder, merge

T0 = datetime(2026, 11, 1, 9, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")


@pytest.fixture
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "AT_ONCE", 3)


def tables() -> list[pa.Table]:
    """Files of several schemas, some of which have columns, nested ones among them, that most lack."""
    found = []
    for number in range(10):
        times = [T0 + timedelta(seconds=second) for second in range(number % 3, number % 3 + 4)]
        columns: dict[str, Any] = {"time": pa.array(times, TIME), "host": pa.array(["b", "a", None, "ä"])}
        columns["v"] = pa.array([number % 2, 1, 2, None], pa.int32() if number % 4 else pa.int64())
        if number in {4, 9}:
            columns["parts"] = pa.array([{"a": [1, None]}, None, {"a": []}, {"a": None}])
        if number in {2, 3, 8}:
            columns["never"] = pa.nulls(4)
        if number == 7:
            columns["time"] = pa.array([int(time.timestamp()) * 1_000_000 for time in times])
        found.append(pa.table(columns))
    # Nothing in common with the others' type of `v`.
    return [*found, pa.table({"time": pa.array([T0], TIME), "v": pa.array(["x"])})]


def order_of(folder: Path, some: list[pa.Table], tags: str | None = "host") -> MergeOrder:
    folder.mkdir()
    inputs = {}
    for number, each in enumerate(some):
        inputs[f"f{number}"] = folder / f"in-{number}.parquet"
        pq.write_table(each.replace_schema_metadata({"arc:tags": tags} if tags else None), inputs[f"f{number}"])
    (folder / "work").mkdir()
    return MergeOrder(inputs, folder / "work", 1 << 30, ("host",), memory_bytes=256 << 20)


def rows_of(result: Merged) -> pa.Table:
    return pa.concat_tables([pq.read_table(output.file) for output in result.outputs])


@pytest.mark.parametrize("tags", ["host", None])
def test_slices_give_what_one_query_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: str | None) -> None:
    whole = merge(order_of(tmp_path / "whole", tables(), tags))
    monkeypatch.setattr(gather, "AT_ONCE", 3)
    order = order_of(tmp_path / "slices", tables(), tags)
    sliced = merge(order)
    assert len(list((order.work / "gathered").iterdir())) == 4
    told = [
        (each.used, each.aside, each.rows_in, each.rows_out, each.duplicates, each.tags) for each in (whole, sliced)
    ]
    assert told[0] == told[1]
    assert [path for path, _ in sliced.aside] == ["f10"]
    one, other = rows_of(whole), rows_of(sliced)
    assert one.schema == other.schema
    assert Counter(map(repr, one.to_pylist())) == Counter(map(repr, other.to_pylist()))
    # Rows that agree in all keys come in any order.
    assert one.select(["host", "time"]).equals(other.select(["host", "time"]))
    assert bool(sliced.duplicates) == (tags is not None)


@pytest.mark.usefixtures("three_at_once")
def test_damaged_files_among_many_are_set_aside_alone(tmp_path: Path) -> None:
    order = order_of(tmp_path / "damaged", tables()[:10])
    for name in ("f1", "f9"):
        chunk = pq.read_metadata(order.inputs[name]).row_group(0).column(1)
        data = bytearray(order.inputs[name].read_bytes())
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        data[begin : begin + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        order.inputs[name].write_bytes(bytes(data))
    order.inputs["f5"].write_bytes(b"PAR1 no file PAR1")
    result = merge(order)
    assert sorted(path for path, _ in result.aside) == ["f1", "f5", "f9"]
    assert (len(result.used), result.rows_in) == (7, 28)
    assert result.rows_out + result.duplicates == 28
    assert rows_of(result).num_rows == result.rows_out


@pytest.mark.usefixtures("three_at_once")
def test_a_file_that_breaks_after_many_rows_is_set_aside_too(tmp_path: Path) -> None:
    count = 60_000
    some = [
        pa.table({"time": pa.array(range(count), TIME), "v": pa.array([chance.random() for _ in range(count)])})
        for chance in map(random.Random, range(4))
    ]
    order = replace(order_of(tmp_path / "late", some), target_bytes=1 << 20)
    chunk = pq.read_metadata(order.inputs["f2"]).row_group(0).column(1)
    data = bytearray(order.inputs["f2"].read_bytes())
    end = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
    data[end - 100_000 : end] = b"\xff" * 100_000
    order.inputs["f2"].write_bytes(bytes(data))
    result = merge(order)
    assert [path for path, _ in result.aside] == ["f2"]
    assert "cannot be decoded" in result.aside[0][1]
    assert (result.rows_in, rows_of(result).num_rows) == (3 * count, 3 * count)


def test_files_that_one_query_can_read_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "AT_ONCE", 10)
    order = order_of(tmp_path / "few", tables()[:10])
    merge(order)
    assert not (order.work / "gathered").exists()


def test_the_engine_keeps_nothing_of_files_that_it_has_read(tmp_path: Path) -> None:
    order = order_of(tmp_path / "kept", tables())
    with opened(order.work, 256 << 20, 1) as engine:
        for file in order.inputs.values():
            engine.execute("SELECT * FROM read_parquet($1)", [str(file)]).to_arrow_table()
        kept = "SELECT sum(memory_usage_bytes) FROM duckdb_memory() WHERE tag = 'EXTERNAL_FILE_CACHE'"
        assert engine.execute(kept).fetchall() == [(0,)]
