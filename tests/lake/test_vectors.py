"""Deletion vectors that Python writes, read by Spark, DuckDB and PyIceberg, and by ourselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from modak.core.errors import ModakError
from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.java import Java
from modak.lake.iceberg.vectors import decode, encode, read_vector, vector_uri, write_vector
from modak.lake.model import DataFile, LakeColumn, Layout
from tests.lake.lakehouse import Lakehouse

_COLUMNS = [LakeColumn("k", "long", required=True, field_id=1), LakeColumn("t", "string", field_id=2)]
_BY_THOUSANDS = Layout("truncate", 1000, "k")


def _files(folder: str, rows: int) -> list[DataFile]:
    with FileWriter(f"file://{folder}/op", _COLUMNS, _BY_THOUSANDS, task="0", tier_key="k") as writer:
        keys = pa.array(range(rows))
        writer.write(pa.RecordBatch.from_arrays([keys, keys.cast(pa.string())], schema=writer.schema))
        return writer.close()


@given(st.sets(st.one_of(st.integers(0, 100_000), st.integers(0, 2**40)), min_size=1))
def test_positions_survive_the_blob(positions: set[int]) -> None:
    assert set(decode(encode(BitMap64(positions)), "here")) == positions


@given(st.integers(0, 59), st.integers(1, 255))
def test_a_damaged_blob_is_noticed(at: int, flip: int) -> None:
    blob = bytearray(encode(BitMap64([1, 5, 70_000, 2**33])))
    blob[at % len(blob)] ^= flip
    with pytest.raises(ModakError) as caught:
        decode(bytes(blob), "here")
    assert caught.value.code == "lake.vector_damaged"


def test_a_new_vector_takes_in_the_old_one(warehouse: str) -> None:
    file = _files(warehouse, 500)[0]
    folder = f"file://{warehouse}/op"
    old = write_vector(vector_uri(folder, "0"), [1, 2], file)
    new = write_vector(vector_uri(folder, "1"), [2, 3], file, existing=old)
    assert list(read_vector(new)) == [1, 2, 3]
    assert (new.rows, new.data_file) == (3, file.path)
    assert new.bytes == Path(new.path.removeprefix("file://")).stat().st_size


def test_positions_outside_the_file_are_refused(warehouse: str) -> None:
    file = _files(warehouse, 500)[0]
    with pytest.raises(ModakError, match="Position 500 is outside"):
        write_vector(vector_uri(f"file://{warehouse}/op", "0"), [500], file)


@pytest.mark.spark
def test_all_readers_leave_out_the_deleted_rows(spark: Any, gateway: Any, warehouse: str) -> None:
    lake = Lakehouse(Java(gateway), warehouse, _COLUMNS, _BY_THOUSANDS)
    files = _files(warehouse, 3000)
    lake.append(files)
    folder = f"file://{warehouse}/op"
    first = [write_vector(vector_uri(folder, "0"), range(0, 1000, 2), file) for file in files[:2]]
    lake.delete(first)
    second = write_vector(vector_uri(folder, "1"), [1, 3, 999], files[0], existing=first[0])
    lake.delete([second], removed=[first[0]])

    gone = set(range(0, 2000, 2)) | {1, 3, 999}
    expected = [key for key in range(3000) if key not in gone]
    assert lake.by_spark(spark, "k")["k"].to_pylist() == expected
    assert lake.by_duckdb("k")["k"].to_pylist() == expected
    assert lake.by_pyiceberg("k")["k"].to_pylist() == expected
