"""What is decided about the lake without Java: layouts, places, schemas as JSON, and whose a snapshot is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modak.core.axis import Axis, Width
from modak.core.errors import Refused
from modak.lake.iceberg.prepare import create_properties
from modak.lake.iceberg.read import foreign_since
from modak.lake.iceberg.schema import columns_of, layout_of, schema_json
from modak.lake.model import LakeColumn, LakeName, Layout, layout_for, metadata_stem, table_location

_HOUR = 3_600_000_000
_DAY = 24 * _HOUR


@pytest.mark.parametrize(
    ("axis", "width", "expected"),
    [
        (Axis.INTEGER, Width(100), Layout("truncate", 100, "k")),
        (Axis.INTEGER, Width(2**31 - 1), Layout("truncate", 2**31 - 1, "k")),
        (Axis.INTEGER, Width(2**31), Layout(None, None, "k")),
        (Axis.INTEGER, None, Layout(None, None, "k")),
        (Axis.TIMESTAMPTZ, Width(_HOUR // 4), Layout("hour", None, "k")),
        (Axis.TIMESTAMPTZ, Width(_HOUR), Layout("hour", None, "k")),
        (Axis.TIMESTAMP, Width(_DAY), Layout("day", None, "k")),
        (Axis.TIMESTAMP, Width(7 * _DAY), Layout("day", None, "k")),
        (Axis.TIMESTAMP, Width(30 * _DAY), Layout("month", None, "k")),
        (Axis.TIMESTAMP, Width(365 * _DAY), Layout("year", None, "k")),
        (Axis.DATE, Width(1), Layout("day", None, "k")),
        (Axis.DATE, Width(1, months=True), Layout("month", None, "k")),
        (Axis.TIMESTAMPTZ, Width(3, months=True, zone="Europe/Berlin"), Layout("month", None, "k")),
        (Axis.TIMESTAMPTZ, Width(12, months=True), Layout("year", None, "k")),
    ],
)
def test_the_lake_partitioning_follows_the_heaps_width(axis: Axis, width: Width | None, expected: Layout) -> None:
    assert layout_for(axis, width, "k") == expected


def test_a_table_lies_below_its_schema_and_odd_names_stay_apart() -> None:
    assert table_location("file:///w/", LakeName(("modak", "public"), "events")) == "file:///w/modak/public/events"
    odd = {table_location("s3://b", LakeName(("m", "p"), name)) for name in ("a b", "a/b", "a-b", "..", "é", "A b")}
    assert len(odd) == 6
    assert all(part not in ("", ".", "..") for place in odd for part in place.removeprefix("s3://").split("/"))
    assert all(place.count("/") == 5 for place in odd)


def test_the_name_of_an_attempts_metadata_is_known_before_it_is_written() -> None:
    assert metadata_stem(3, "op", 1) == metadata_stem(3, "op", 1)
    assert metadata_stem(3, "op", 1) != metadata_stem(3, "op", 2)
    assert metadata_stem(3, "op", 1).startswith("00003-")


def test_columns_survive_the_way_through_json() -> None:
    columns = (
        LakeColumn("id", "long", required=True, field_id=1),
        LakeColumn("d", "decimal(10,2)", field_id=2, initial_default='"1.50"'),
        LakeColumn("tags", "list<string>", field_id=3, element_id=4),
    )
    assert columns_of(json.loads(schema_json(columns))) == columns


def test_columns_without_ids_get_ids_that_do_not_clash() -> None:
    columns = [LakeColumn("a", "long", field_id=2), LakeColumn("b", "list<int>"), LakeColumn("c", "int")]
    made = columns_of(json.loads(schema_json(columns)))
    numbers = [number for column in made for number in (column.field_id, column.element_id) if number]
    assert len(numbers) == len(set(numbers)) == 4


def test_a_foreign_partitioning_is_refused_by_name() -> None:
    schema = {"fields": [{"id": 1, "name": "k"}]}
    spec = {"fields": [{"source-id": 1, "transform": "bucket[16]", "name": "k_bucket"}]}
    with pytest.raises(Refused, match=r"bucket\[16\]"):
        layout_of(spec, schema)


def test_the_users_properties_win_over_ours_but_not_over_the_format() -> None:
    made = create_properties(
        Layout(None, None, "k"), {"iceberg.table.write.metadata.previous-versions-max": "7", "a": "b"}
    )
    assert made["write.metadata.previous-versions-max"] == "7"
    assert made["write.metadata.metrics.column.k"] == "full"
    assert made["a"] == "b"
    with pytest.raises(Refused):
        create_properties(Layout(), {"iceberg.table.format-version": "2"})
    with pytest.raises(Refused, match="pinned readers"):
        create_properties(Layout(), {"iceberg.table.write.metadata.delete-after-commit.enabled": "true"})


def _metadata(*snapshots: tuple[int, int | None, bool], current: int | None = None) -> dict[str, Any]:
    entries = [
        {
            "snapshot-id": number,
            **({} if parent is None else {"parent-snapshot-id": parent}),
            "timestamp-ms": 0,
            "summary": {"operation": "append", **({"modak.op-id": "x"} if ours else {})},
        }
        for number, parent, ours in snapshots
    ]
    return {"snapshots": entries, "current-snapshot-id": current or snapshots[-1][0]}


def test_foreign_snapshots_are_those_without_an_operation_of_ours() -> None:
    metadata = _metadata((1, None, True), (2, 1, False), (3, 2, True), (4, 3, False))
    assert [found.id for found in foreign_since(metadata, None)] == [2, 4]
    assert [found.id for found in foreign_since(metadata, 2)] == [4]
    assert foreign_since(metadata, 4) == []
    assert all(found.operation == "append" and found.changes_rows for found in foreign_since(metadata, 1))


def test_a_line_that_does_not_lead_back_is_said_to_be_unrelated() -> None:
    rolled_back = _metadata((1, None, True), (2, 1, True), (3, 1, True))
    assert [(found.id, found.operation) for found in foreign_since(rolled_back, 2)] == [(3, "unrelated")]
    replaced: dict[str, Any] = {"snapshots": [], "current-snapshot-id": None}
    assert [found.operation for found in foreign_since(replaced, 2)] == ["unrelated"]


def test_an_expired_base_is_still_known_as_the_parent_of_what_followed() -> None:
    assert foreign_since(_metadata((3, 2, True), (4, 3, True)), 2) == []
