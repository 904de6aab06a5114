"""Reading a data file by field ids: what changed in the schema since it was written, and where its rows stand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from modak.core.errors import ModakError
from modak.lake.changes import Range
from modak.lake.decode import arrow_schema
from modak.lake.iceberg.scan import scan_file
from modak.lake.model import LakeColumn

ID = LakeColumn("id", "int", True, 1)


def _file(folder: Path, table: pa.Table, group: int = 4) -> str:
    path = folder / "rows.parquet"
    pq.write_table(table, path, row_group_size=group, store_schema=False)
    return f"file://{path}"


def _rows(uri: str, columns: Sequence[LakeColumn], **how: Any) -> list[dict[str, Any]]:
    return [row for batch in scan_file(uri, columns, **how) for row in batch.to_pylist()]


def _numbers(folder: Path, count: int, group: int = 4) -> str:
    return _file(folder, pa.table([pa.array(range(count), pa.int32())], schema=arrow_schema([ID])), group)


def test_columns_are_found_by_id_whatever_they_are_called_now(tmp_path: Path) -> None:
    then = [ID, LakeColumn("a", "string", False, 2), LakeColumn("a.b", "string", False, 3)]
    uri = _file(tmp_path, pa.table([pa.array([1], pa.int32()), ["x"], ["y"]], schema=arrow_schema(then)))
    now = [LakeColumn("a", "string", False, 3), LakeColumn("b", "string", False, 2), LakeColumn("id", "long", True, 1)]
    assert _rows(uri, now) == [{"a": "y", "b": "x", "id": 1}]
    assert _rows(uri, now[1:2]) == [{"b": "x"}]


@pytest.mark.parametrize(
    ("kind", "default", "value"),
    [
        ("int", "5", 5),
        ("string", '"é"', "é"),
        ("boolean", "true", True),
        ("double", "5", 5.0),
        ("decimal(5,2)", '"1.25"', Decimal("1.25")),
        ("date", '"2024-02-29"', date(2024, 2, 29)),
        ("timestamp", '"2024-02-29T01:02:03.000004"', datetime.fromisoformat("2024-02-29T01:02:03.000004")),
        ("timestamptz", '"2024-02-29T01:02:03+00:00"', datetime(2024, 2, 29, 1, 2, 3, tzinfo=UTC)),
        ("uuid", f'"{UUID(int=7)}"', UUID(int=7)),
        ("binary", '"00FF"', b"\x00\xff"),
        ("string", None, None),
        ("list<uuid>", None, None),
    ],
)
def test_a_column_that_came_later_shows_its_initial_default(
    tmp_path: Path, kind: str, default: str | None, value: object
) -> None:
    new = LakeColumn("new", kind, False, 8, 9, initial_default=default)
    assert _rows(_numbers(tmp_path, 2), [ID, new]) == [{"id": 0, "new": value}, {"id": 1, "new": value}]
    assert _rows(_numbers(tmp_path, 3), [new], batch_rows=2, with_positions=True) == [
        {"new": value, "_pos": at} for at in range(3)
    ]


def test_widened_types_are_read_as_they_are_now(tmp_path: Path) -> None:
    then = [ID, LakeColumn("f", "float", False, 2), LakeColumn("d", "decimal(4,2)", False, 3)]
    then.append(LakeColumn("l", "list<int>", False, 4, 5))
    table = pa.table(
        [
            pa.array([1], pa.int32()),
            pa.array([0.5], pa.float32()),
            pa.array([Decimal("1.50")], pa.decimal128(4, 2)),
            [[1, None]],
        ],
        schema=arrow_schema(then),
    )
    now = [
        LakeColumn("id", "long", True, 1),
        LakeColumn("f", "double", False, 2),
        LakeColumn("d", "decimal(10,2)", False, 3),
        LakeColumn("l", "list<long>", False, 4, 5),
    ]
    uri = _file(tmp_path, table)
    (batch,) = scan_file(uri, now)
    assert batch.schema == arrow_schema(now)
    assert batch.to_pylist() == [{"id": 1, "f": 0.5, "d": Decimal("1.50"), "l": [1, None]}]


@settings(deadline=None)
@given(
    count=st.integers(0, 40),
    gone=st.sets(st.integers(0, 39)),
    lower=st.none() | st.integers(-5, 45),
    upper=st.none() | st.integers(-5, 45),
    group=st.integers(1, 9),
    batch=st.integers(1, 9),
)
def test_positions_stay_right_whatever_is_deleted_or_skipped(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    gone: set[int],
    lower: int | None,
    upper: int | None,
    group: int,
    batch: int,
) -> None:
    uri = _numbers(tmp_path_factory.mktemp("scan"), count, group)
    rows = _rows(
        uri, [ID], deleted=BitMap64(gone), with_positions=True, batch_rows=batch, rows=Range("id", lower, upper)
    )
    assert all(row["id"] == row["_pos"] for row in rows)
    seen = {row["id"] for row in rows}
    assert len(seen) == len(rows)
    assert not seen & gone
    inside = {n for n in range(count) if (lower is None or n >= lower) and (upper is None or n < upper)}
    assert inside - gone <= seen
    groups = {n // group for n in inside}
    assert {n // group for n in seen} <= groups or (lower is not None and upper is not None and lower >= upper)


def test_a_file_without_field_ids_is_read_by_names(tmp_path: Path) -> None:
    uri = _file(tmp_path, pa.table({"id": pa.array([3], pa.int32()), "more": ["x"]}))
    assert _rows(uri, [LakeColumn("more", "string", False, 7), ID]) == [{"more": "x", "id": 3}]


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    uri = _numbers(tmp_path, 1)
    with pytest.raises(ModakError, match="column id as int32"):
        _rows(uri, [LakeColumn("id", "list<int>", False, 1, 2)])
    with pytest.raises(ModakError, match="There is no file"):
        _rows(f"file://{tmp_path}/gone.parquet", [ID])
