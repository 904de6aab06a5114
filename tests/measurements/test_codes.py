"""Texts that repeat are sorted as codes: nobody can tell from what comes out."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.measurements import codes
from modak.measurements.engine import opened
from modak.measurements.merge import MergeOrder, merge, read_footers
from modak.measurements.output import rows_per_group
from modak.measurements.types import unify

START = 1_793_523_600_000_000
ODD = ["", "a", "A", "ä", "z", "é", "it's", '"', "', 'b", "\\", "$1", "\n", "\uffff", "\U0001f600", "10", "9", None]
TARGET = 64 << 10
"""Small enough for several row groups, and several files."""


def rows(count: int, seed: int, **texts: list[str | None]) -> pa.Table:
    """Rows at few times, with these texts in them."""
    chance = random.Random(seed)
    times = pa.array([START + chance.randrange(50) for _ in range(count)], pa.timestamp("us", tz="UTC"))
    columns: dict[str, Any] = {"time": times, "v": pa.array([chance.randrange(4) for _ in range(count)])}
    for name, values in texts.items():
        columns[name] = pa.array([chance.choice(values) for _ in range(count)], pa.string())
    return pa.table(columns)


def order_of(tmp_path: Path, tables: list[pa.Table], keys: tuple[str, ...] = ("host",)) -> MergeOrder:
    inputs = {}
    for number, table in enumerate(tables):
        file = tmp_path / f"in-{number}.parquet"
        pq.write_table(table.replace_schema_metadata({"arc:tags": "host"}), file)
        inputs[f"f{number}"] = file
    work = tmp_path / "work"
    work.mkdir()
    return MergeOrder(inputs, work, TARGET, keys, memory_bytes=256 << 20, threads=2)


def coded(order: MergeOrder) -> set[str]:
    """The columns that the merge sorts as codes."""
    footers, _ = read_footers(order.inputs)
    unified = unify(footers)
    size = sum(file.stat().st_size for file in order.inputs.values())
    with opened(order.work, order.memory_bytes, 1) as engine:

        def files(paths: Any) -> list[str]:
            return [str(order.inputs[path]) for path in paths]

        return set(codes.coded_types(engine, unified, files, rows_per_group(size, unified.rows, TARGET)))


def outcome(order: MergeOrder) -> tuple[int, list[dict[str, Any]]]:
    result = merge(order)
    tables = [pq.read_table(output.file) for output in result.outputs]
    assert all(table.schema.field("host").type == pa.string() for table in tables)
    return result.duplicates, pa.concat_tables(tables).to_pylist()


def test_rows_come_out_in_the_order_of_their_texts(tmp_path: Path) -> None:
    tables = [rows(8_000, 1, host=ODD, region=["eu", "us"]), rows(8_000, 2, host=ODD[3:], region=[None, "eu"])]
    order = order_of(tmp_path, tables)
    assert coded(order) == {"host", "region"}
    duplicates, found = outcome(order)
    given = [
        tuple(row.values()) for table in tables for row in table.select(["time", "v", "host", "region"]).to_pylist()
    ]
    said = [(row["time"], row["v"], row["host"], row["region"]) for row in found]
    assert len(said) == len(set(said))
    assert set(said) == set(given)
    assert duplicates == len(given) - len(said)
    keys = [(host is not None, (host or "").encode(), time) for time, _, host, _ in said]
    assert keys == sorted(keys)


def test_codes_and_texts_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = rows(4_000, 3, region=["eu", "us"])
    tables = [rows(12_000, 4, host=[f"h{n}" for n in range(300)], region=["eu", None]), lacking]
    (tmp_path / "coded").mkdir()
    order = order_of(tmp_path / "coded", tables, ("region", "host"))
    assert coded(order) == {"host", "region"}
    duplicates, by_code = outcome(order)
    monkeypatch.setattr("modak.measurements.merge.coded_types", lambda *_: {})
    as_text = outcome(order_of(tmp_path, tables, ("region", "host")))
    assert (duplicates, Counter(map(repr, by_code))) == (as_text[0], Counter(map(repr, as_text[1])))
    # Rows that agree in all keys come in any order.
    keys = [[(row["region"], row["host"], row["time"]) for row in some] for some in (by_code, as_text[1])]
    assert keys[0] == keys[1]


def test_texts_that_do_not_repeat_stay_texts(tmp_path: Path) -> None:
    trace = [f"{number:x}" for number in range(1 << 40, (1 << 40) + 5_000)]
    order = order_of(tmp_path, [rows(5_000, 5, host=["a", "b"], trace=trace)], ("trace", "host"))
    assert coded(order) == {"host"}
    _, found = outcome(order)
    assert [row["trace"] for row in found] == sorted(row["trace"] for row in found)


def test_a_sample_that_promised_too_much_costs_nothing_but_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "_SAMPLE_ROWS", 1_000)
    late = [f"host-{number}" for number in range(40_000)]
    order = order_of(tmp_path, [rows(20_000, 6, host=["a", "b"]), rows(20_000, 7, host=late)])
    assert coded(order) == set()
    _, found = outcome(order)
    assert [row["host"] for row in found] == sorted(row["host"] for row in found)


def test_many_files_of_few_rows_are_not_opened_once_more(tmp_path: Path) -> None:
    assert coded(order_of(tmp_path, [rows(20, number, host=["a", "b"]) for number in range(5)])) == set()


def test_a_zero_byte_in_a_text_is_sorted_as_text(tmp_path: Path) -> None:
    order = order_of(tmp_path, [rows(1_000, 9, host=["b", "a\0", "a", "\0"], region=["eu", "us"])])
    assert coded(order) == {"region"}
    hosts = [row["host"] for row in outcome(order)[1]]
    assert (hosts, set(hosts)) == (sorted(hosts), {"\0", "a", "a\0", "b"})


def test_texts_that_are_all_missing_stay_missing(tmp_path: Path) -> None:
    order = order_of(tmp_path, [rows(1_000, 8, host=[None])])
    assert coded(order) == set()
    assert {row["host"] for row in outcome(order)[1]} == {None}


def test_a_file_whose_texts_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    order = order_of(tmp_path, [rows(2_000, number, host=["a", "b"]) for number in range(3)])
    file = order.inputs["f1"]
    chunk = pq.read_metadata(file).row_group(0).column(2)
    data = bytearray(file.read_bytes())
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    data[begin : begin + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    file.write_bytes(bytes(data))
    result = merge(order)
    assert [path for path, _ in result.aside] == ["f1"]
    assert (result.rows_in, result.used) == (4_000, ("f0", "f2"))
