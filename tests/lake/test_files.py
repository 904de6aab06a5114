"""The writer of data files: buckets, rolling, bounds, memory, durability and what is left after a failure."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.core import faults
from modak.core.errors import ModakError
from modak.core.faults import Fault, InjectedFault
from modak.lake.decode import arrow_schema
from modak.lake.iceberg import files as module
from modak.lake.iceberg.bounds import column_bounds, unscaled
from modak.lake.iceberg.buckets import split
from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.output import local_path
from modak.lake.model import DataFile, LakeColumn, Layout

_COLUMNS = [LakeColumn("k", "long", field_id=1), LakeColumn("t", "string", field_id=2)]


def _batch(keys: Sequence[int | None], columns: Sequence[LakeColumn] = _COLUMNS) -> pa.RecordBatch:
    texts = pa.array([f"row {key}" for key in keys])
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.int64()), texts], schema=arrow_schema(columns))


def _write(folder: str, batches: Sequence[pa.RecordBatch], layout: Layout, **options: Any) -> list[DataFile]:
    with FileWriter(f"file://{folder}/op", _COLUMNS, layout, task="7", tier_key="k", **options) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.close()


def _read(files: Sequence[DataFile]) -> list[list[int]]:
    return [pq.read_table(local_path(file.path))["k"].to_pylist() for file in files]


def _bound(file: DataFile, which: str, field_id: int) -> bytes | None:
    found = json.loads(file.json)[f"{which}-bounds"]
    return dict(zip(found["keys"], map(bytes.fromhex, found["values"]), strict=True)).get(field_id)


@given(keys=st.lists(st.one_of(st.none(), st.integers(-(2**40), 2**40)), min_size=1), width=st.integers(1, 10**6))
def test_truncate_floors_negative_keys_and_keeps_every_row(keys: list[int | None], width: int) -> None:
    seen: list[int | None] = []
    batch = _batch(keys)
    for bucket, rows in split(batch, batch.column("k"), Layout("truncate", width, "k"), ()):
        for key in rows["k"].to_pylist():
            assert bucket.value == (None if key is None else key // width * width)
            seen.append(key)
    assert sorted(seen, key=repr) == sorted(keys, key=repr)


@given(st.lists(st.datetimes(), min_size=1))
@pytest.mark.parametrize("transform", ["hour", "day", "month", "year"])
def test_time_buckets_count_from_1970_also_before_it(transform: Any, moments: list[datetime]) -> None:
    epoch = datetime(1970, 1, 1)  # noqa: DTZ001
    expected = {
        "hour": lambda at: (at - epoch) // timedelta(hours=1),
        "day": lambda at: (at - epoch) // timedelta(days=1),
        "month": lambda at: (at.year - 1970) * 12 + at.month - 1,
        "year": lambda at: at.year - 1970,
    }[transform]
    for kind, values in (("us", moments), ("d", [moment.date() for moment in moments])):
        if kind == "d" and transform == "hour":
            continue
        keys = pa.array(values, pa.timestamp("us") if kind == "us" else pa.date32())
        batch = pa.RecordBatch.from_arrays([keys], ["k"])
        for bucket, rows in split(batch, keys, Layout(transform, None, "k"), ()):
            for value in rows["k"].to_pylist():
                at = value if isinstance(value, datetime) else datetime(value.year, value.month, value.day)  # noqa: DTZ001
                assert bucket.value == expected(at)


def test_an_infinite_key_has_no_hour() -> None:
    keys = pa.array([2**63 - 1]).cast(pa.timestamp("us"))
    with pytest.raises(ModakError, match="infinite"):
        list(split(pa.RecordBatch.from_arrays([keys], ["k"]), keys, Layout("hour", None, "k"), ()))


def test_each_file_lies_in_one_lake_partition(warehouse: str) -> None:
    files = _write(warehouse, [_batch([5, -1, 150, 7]), _batch([-100, 199])], Layout("truncate", 100, "k"))
    partitions = {json.loads(file.json)["partition"][0]: rows for file, rows in zip(files, _read(files), strict=True)}
    assert partitions == {0: [5, 7], -100: [-1, -100], 100: [150, 199]}
    assert all("/op/k_truncate=" in file.path and Path(file.path).name.startswith("7-") for file in files)


def test_files_of_an_unpartitioned_table_end_at_the_cuts(warehouse: str) -> None:
    files = _write(warehouse, [_batch([1, 99, 100, 101, 250])], Layout(None, None, "k"), cut=(200, 100))
    assert sorted(_read(files)) == [[1, 99], [100, 101], [250]]
    assert all(json.loads(file.json)["partition"] == [] for file in files)


def test_a_file_rolls_at_the_target_size(warehouse: str) -> None:
    batches = [_batch(range(at, at + 10_000)) for at in range(0, 200_000, 10_000)]
    files = _write(warehouse, batches, Layout(), target_bytes=100_000)
    assert len(files) >= 3
    assert sorted(key for keys in _read(files) for key in keys) == list(range(200_000))
    assert all(file.bytes < 200_000 for file in files)


def test_many_buckets_need_little_memory_and_few_open_files(warehouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    real = FileWriter._flush

    def watched(self: FileWriter, bucket: Any) -> None:
        nonlocal most
        assert len(self._open) <= 4
        most = max(most, self._waiting_bytes)
        real(self, bucket)

    monkeypatch.setattr(FileWriter, "_flush", watched)
    batches = [_batch(list(range(at, 1000, 3))) for at in (0, 1, 2) for _ in range(20)]
    files = _write(warehouse, batches, Layout("truncate", 10, "k"), buffer_bytes=50_000, open_files=4)
    assert sum(file.rows for file in files) == 20_000
    assert most < 50_000 + 2 * batches[0].nbytes
    for file, keys in zip(files, _read(files), strict=True):
        assert {key // 10 * 10 for key in keys} == set(json.loads(file.json)["partition"])


def test_a_small_bucket_does_not_hold_on_to_large_batches(warehouse: str) -> None:
    before = pa.total_allocated_bytes()
    with FileWriter(
        f"file://{warehouse}/op", _COLUMNS, Layout("truncate", 10**9, "k"), task="0", buffer_bytes=1 << 20
    ) as writer:
        for at in range(0, 2_000_000, 50_000):
            writer.write(_batch([*range(at, at + 50_000), 10**9 + at]))
            assert pa.total_allocated_bytes() - before < 30 << 20
        assert sum(file.rows for file in writer.close()) == 2_000_040


def test_bounds_are_exact_for_numbers_and_short_for_texts(warehouse: str) -> None:
    columns = [
        LakeColumn("k", "long", field_id=1),
        LakeColumn("t", "string", field_id=2),
        LakeColumn("n", "decimal(12,2)", field_id=3),
        LakeColumn("wide", "decimal(38,2)", field_id=4),
        LakeColumn("f", "double", field_id=5),
        LakeColumn("nan", "double", field_id=6),
        LakeColumn("u", "uuid", field_id=7),
        LakeColumn("by", "binary", field_id=8),
        LakeColumn("at", "timestamptz", field_id=9),
        LakeColumn("l", "list<int>", field_id=10, element_id=11),
        LakeColumn("none", "date", field_id=12),
        LakeColumn("b", "boolean", field_id=13),
    ]
    schema = arrow_schema(columns)
    from decimal import Decimal

    arrays = [
        pa.array([-5, 2**62]),
        pa.array(["a" * 15 + "é!", "z" * 20]),
        pa.array([Decimal("-1.28"), Decimal("1.27")], schema.field("n").type),
        pa.array([Decimal("-1.29"), Decimal(10) ** 30], schema.field("wide").type),
        pa.array([float("nan"), -0.5]),
        pa.array([float("nan"), None]),
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes([1] * 16), bytes([2] * 16)], pa.binary(16))),
        pa.array([b"\x01" * 20, b"\xff" * 20]),
        pa.array([-1, 2**63 - 1]).cast(pa.timestamp("us", "UTC")),
        pa.array([[1, None], []], schema.field("l").type),
        pa.array([None, None], pa.date32()),
        pa.array([False, True]),
    ]
    with FileWriter(f"file://{warehouse}/op", columns, Layout(), task="0") as writer:
        writer.write(pa.RecordBatch.from_arrays(arrays, schema=schema))
        (file,) = writer.close()
    low = {at: _bound(file, "lower", at) for at in range(1, 14)}
    high = {at: _bound(file, "upper", at) for at in range(1, 14)}
    assert (low[1], high[1]) == (struct.pack("<q", -5), struct.pack("<q", 2**62))
    assert (low[2], high[2]) == (("a" * 15 + "é").encode(), b"z" * 15 + b"{")
    assert (low[3], high[3]) == (b"\x80", b"\x7f")
    assert (low[4], high[4]) == (b"\xff\x7f", unscaled(10**32))
    assert (low[5], high[5]) == (struct.pack("<d", -0.5), struct.pack("<d", -0.5))
    assert (low[6], high[6]) == (None, None)
    assert (low[7], high[7]) == (bytes([1] * 7 + [0] + [0] * 8), bytes([2] * 7 + [3] + [0] * 8))
    assert (low[8], high[8]) == (b"\x01" * 16, None)
    assert (low[9], high[9]) == (struct.pack("<q", -1), struct.pack("<q", 2**63 - 1))
    assert (low[10], low[11], low[12], high[12]) == (None, None, None, None)
    assert (low[13], high[13]) == (b"\x00", b"\x01")
    described = json.loads(file.json)
    assert dict(zip(*described["nan-value-counts"].values(), strict=True)) == {5: 1, 6: 1}
    assert dict(zip(*described["null-value-counts"].values(), strict=True))[12] == 2
    assert described["split-offsets"] == [4]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=40), min_size=1))
def test_text_bounds_enclose_every_text(texts: list[str]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"t": pa.array(texts)}), sink)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    low, high = column_bounds("string", [footer.row_group(0).column(0).statistics])
    assert low is not None
    for text in texts:
        assert low <= text.encode()
        assert high is None or text.encode() <= high


@given(st.lists(st.uuids(), min_size=1))
def test_uuid_bounds_hold_in_the_signed_and_the_unsigned_order(values: list[Any]) -> None:
    def signed(value: bytes) -> tuple[int, int]:
        return struct.unpack(">qq", value)  # type: ignore[return-value]

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"u": pa.array([value.bytes for value in values], pa.binary(16))}), sink)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    low, high = column_bounds("uuid", [footer.row_group(0).column(0).statistics])
    if low is None or high is None:
        return
    for value in values:
        assert low <= value.bytes <= high
        assert signed(low) <= signed(value.bytes) <= signed(high)


def test_dictionaries_only_for_columns_of_few_values(warehouse: str) -> None:
    (file,) = _write(warehouse, [_batch([1, 2])], Layout(), low_cardinality=frozenset({"t"}))
    group = pq.read_metadata(local_path(file.path)).row_group(0)
    assert [group.column(at).has_dictionary_page for at in (0, 1)] == [False, True]
    assert [group.column(at).compression for at in (0, 1)] == ["ZSTD", "ZSTD"]


def test_a_failure_leaves_no_file_behind(warehouse: str) -> None:
    faults.arm(Fault("files.durable", after=1))
    with pytest.raises(InjectedFault):
        _write(warehouse, [_batch([1, 200, 400])], Layout("truncate", 100, "k"))
    assert not [path for path in Path(warehouse).rglob("*") if path.is_file()]


def test_every_file_and_folder_is_synced_before_it_counts(warehouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    real = os.fsync

    def watched(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(os, "fsync", watched)
    (file,) = _write(warehouse, [_batch([1])], Layout())
    path = local_path(file.path)
    assert {str(path), str(path.parent), str(path.parent.parent), warehouse} <= synced


@pytest.mark.parametrize(
    ("number", "code"), [(28, "storage.no_space"), (30, "storage.read_only"), (13, "storage.read_only")]
)
def test_a_full_or_closed_disk_is_named(
    number: int, code: str, warehouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.pq.ParquetWriter, "write_table", refuse)
    with pytest.raises(ModakError) as caught:
        _write(warehouse, [_batch([1])], Layout())
    assert (caught.value.code, caught.value.retryable) == (code, True)
    assert caught.value.hint


def test_a_really_full_disk_is_named() -> None:
    writer = FileWriter("file:///dev/full", _COLUMNS, Layout(), task="0")
    writer.write(_batch([1]))
    with pytest.raises(ModakError) as caught:
        writer.close()
    assert caught.value.code.startswith("storage.")


def test_no_rows_make_no_files(warehouse: str) -> None:
    assert _write(warehouse, [_batch([])], Layout("truncate", 10, "k")) == []


def test_day_partitions_are_spelled_as_java_reads_them(warehouse: str) -> None:
    columns = [LakeColumn("d", "date", field_id=1)]
    with FileWriter(f"file://{warehouse}/op", columns, Layout("day", None, "d"), task="0") as writer:
        days = pa.array([0, -719_529, 2_932_897], pa.int32()).cast(pa.date32())
        writer.write(pa.RecordBatch.from_arrays([days], schema=writer.schema))
        spelled = {json.loads(file.json)["partition"][0] for file in writer.close()}
    assert spelled == {date(1970, 1, 1).isoformat(), "-0001-12-31", "+10000-01-01"}
