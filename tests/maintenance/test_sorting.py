"""Rows in the order that a policy asks for: sorted, or along the z-curve of columns of any kind."""

from __future__ import annotations

import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from modak.spark.sorting import sorted_batches

SIDE = 64
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def laid(rows: list[dict[str, Any]], schema: pa.Schema, *columns: str) -> list[dict[str, Any]]:
    """The rows along the curve, having come in no order and in several batches."""
    random.Random(7).shuffle(rows)
    batches = pa.Table.from_pylist(rows, schema).to_batches(max_chunksize=1000)
    return [row for batch in sorted_batches(batches, schema, zorder=columns) for row in batch.to_pylist()]


def test_rows_that_are_near_in_two_columns_are_near_in_the_file() -> None:
    schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("place", pa.list_(pa.int32()))])
    rows = [
        # NULL comes first: here it stands where zero would.
        {"n": n or None, "at": BEGIN + timedelta(hours=h) if h else None, "place": [n, h]}
        for n in range(SIDE)
        for h in range(SIDE)
    ]
    ordered = [row["place"] for row in laid(rows, schema, "n", "at")]
    quarter = SIDE // 4
    for start in range(0, SIDE * SIDE, quarter * quarter):
        run = ordered[start : start + quarter * quarter]
        assert len({(n // quarter, h // quarter) for n, h in run}) == 1, "each run of the file is a square"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.uuid(), lambda n: uuid.UUID(int=n << 96).bytes),
        (pa.binary(), lambda n: n.to_bytes(4, "big")),
        (pa.string(), lambda n: f"{n:06d}"),
        (pa.decimal128(10, 2), lambda n: n),
        (pa.date32(), lambda n: BEGIN.date() + timedelta(days=n)),
        (pa.time64("us"), lambda n: (BEGIN + timedelta(seconds=n)).time()),
        (pa.float64(), float),
    ],
    ids=lambda given: str(given) if isinstance(given, pa.DataType) else "",
)
def test_any_kind_of_value_has_a_place(kind: pa.DataType, value: Any) -> None:
    schema = pa.schema([("n", pa.int64()), ("key", kind)])
    numbers = list(range(500))
    random.Random(7).shuffle(numbers)
    keys = pa.array([value(n) for n in numbers], kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind)
    if isinstance(kind, pa.BaseExtensionType):
        keys = pa.ExtensionArray.from_storage(kind, keys)
    batch = pa.RecordBatch.from_arrays([pa.array(numbers), keys], schema=schema)
    found = [n for each in sorted_batches([batch], schema, zorder=["key"]) for n in each.column("n").to_pylist()]
    assert found == sorted(found)


def test_a_list_has_none_and_the_rows_come_through_all_the_same() -> None:
    schema = pa.schema([("n", pa.int64()), ("tags", pa.list_(pa.string()))])
    rows: list[dict[str, Any]] = [{"n": n, "tags": ["a"] * (n % 3)} for n in range(50)]
    assert [row["n"] for row in laid(rows, schema, "tags", "n")] == list(range(50))
