"""Loading, listing and creating lake tables, checked with readers that are not ours."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import psycopg
import pytest

from modak.core.errors import ModakError, Refused
from modak.lake.changes import AddColumn, Append, DropColumn, Range, RenameColumn, RowDelta
from modak.lake.iceberg import read
from modak.lake.iceberg.catalog import IcebergLake
from modak.lake.model import LakeColumn, Layout, Transform, pin_tag
from modak.postgres.dsn import Dsn
from modak.spark.gateway import Gateway
from tests.lake.iceberg_support import BY_HUNDRED, LONG_TABLE, Lab, only, rows, table_folder

ALL_TYPES: tuple[str, ...] = (
    "boolean",
    "int",
    "long",
    "float",
    "double",
    "decimal(10,2)",
    "string",
    "binary",
    "uuid",
    "date",
)
ALL_TYPES += ("timestamp", "timestamptz", "list<string>", "list<decimal(38,18)>", "list<timestamptz>")


def test_a_created_table_loads_with_ids_layout_and_properties(lab: Lab) -> None:
    columns = [LakeColumn("id", "long", required=True), *(LakeColumn(f"c{i}", t) for i, t in enumerate(ALL_TYPES))]
    name = lab.create(columns, Layout("truncate", 1000, "id"), {"iceberg.table.write.parquet.compression-level": "3"})
    table = lab.table(name)
    assert [(column.name, column.type, column.required) for column in table.schema] == [
        (column.name, column.type, column.required) for column in columns
    ]
    numbers = [number for column in table.schema for number in (column.field_id, column.element_id) if number]
    assert sorted(numbers) == list(range(1, len(columns) + 4))
    assert table.layout == Layout("truncate", 1000, "id")
    assert (table.format_version, table.spec_id, table.snapshot_id, table.snapshot_count) == (3, 0, None, 0)
    assert table.location == f"{lab.lake.warehouse}/modak/public/{name.name}"
    expected = {
        "write.metadata.delete-after-commit.enabled": "false",
        "write.metadata.previous-versions-max": "100",
        "write.metadata.metrics.column.id": "full",
        "write.parquet.compression-level": "3",
    }
    assert expected.items() <= table.properties.items()
    mapping = {
        entry["names"][0]: entry["field-id"] for entry in json.loads(table.properties["schema.name-mapping.default"])
    }
    assert mapping == {column.name: column.field_id for column in table.schema}
    assert lab.pyiceberg(name) == lab.duckdb(name) == []


@pytest.mark.parametrize("transform", ["hour", "day", "month", "year"])
@pytest.mark.parametrize("kind", ["timestamp", "timestamptz", "date"])
def test_time_layouts_load_as_they_were_made(lab: Lab, transform: Transform, kind: str) -> None:
    columns = [LakeColumn("id", "long"), LakeColumn("at", kind)]
    if (transform, kind) == ("hour", "date"):
        with pytest.raises(ModakError):
            lab.create(columns, Layout(transform, None, "at"))
        return
    assert lab.table(lab.create(columns, Layout(transform, None, "at"))).layout == Layout(transform, None, "at")


def test_an_unpartitioned_table_remembers_its_tier_key(lab: Lab) -> None:
    assert lab.table(lab.create(layout=Layout(None, None, "at"))).layout == Layout(None, None, "at")
    assert lab.table(lab.create(layout=Layout())).layout == Layout()


def test_a_table_is_created_once(lab: Lab) -> None:
    name = lab.create()
    with pytest.raises(Refused) as caught:
        lab.lake.prepare_create(name, LONG_TABLE, BY_HUNDRED, {}, lab.op())
    assert caught.value.code == "lake.exists"
    assert lab.lake.load(lab.lake.name("public", "nobody")) is None


def test_a_prepared_creation_is_invisible_and_one_file(lab: Lab) -> None:
    name = lab.lake.name("Odd Schema", 'Odd."Table"')
    prepared = lab.lake.prepare_create(name, LONG_TABLE, BY_HUNDRED, {}, lab.op())
    assert lab.lake.load(name) is None
    assert prepared.base_location is None
    assert lab.publish(prepared)
    assert table_folder(lab, name) == {prepared.new_location}
    lab.commit(name, Append(lab.write(name, rows(1))))
    assert lab.pyiceberg(name) == lab.duckdb(name) == rows(1)


DEFAULTS: dict[str, tuple[str, Any]] = {
    "boolean": ("true", True),
    "int": ("-5", -5),
    "long": ("5", 5),
    "float": ("1.5", 1.5),
    "double": ("2", 2.0),
    "decimal(10,2)": ('"12.50"', Decimal("12.50")),
    "string": ('"né\\n\\"q\\""', 'né\n"q"'),
    "binary": ('"00ff"', b"\x00\xff"),
    "uuid": ('"f79c3e09-677c-4bbd-a479-3f349cb785e7"', UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7")),
    "date": ('"2024-02-29"', date(2024, 2, 29)),
    "timestamp": ('"1970-01-01T00:00:00.000001"', datetime(1970, 1, 1, 0, 0, 0, 1)),  # noqa: DTZ001
    "timestamptz": ('"2024-02-29T12:00:00+00:00"', datetime(2024, 2, 29, 12, tzinfo=UTC)),
}


def test_old_rows_show_the_default_of_a_column_that_came_later(lab: Lab) -> None:
    name = lab.create()
    lab.commit(name, Append(lab.write(name, rows(1))))
    added = {f"c{index}": kind for index, kind in enumerate(DEFAULTS)}
    lab.commit(name, *(AddColumn(column, kind, DEFAULTS[kind][0]) for column, kind in added.items()))
    lab.commit(name, AddColumn("plain", "string"), AddColumn("many", "list<long>"))
    expected = {column: DEFAULTS[kind][1] for column, kind in added.items()} | {"plain": None, "many": None}
    assert lab.pyiceberg(name) == [{**rows(1)[0], **expected}]
    # Arrow carries DuckDB's uuid as text.
    as_text = {column: str(value) if isinstance(value, UUID) else value for column, value in expected.items()}
    assert lab.duckdb(name) == [{**rows(1)[0], **as_text}]
    for column, kind in added.items():
        loaded = lab.table(name).column(column)
        assert loaded is not None
        assert loaded.initial_default is not None
        assert json.loads(loaded.initial_default) is not None
        assert loaded.type == kind
    many = lab.table(name).column("many")
    assert many is not None
    assert many.element_id is not None


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("list<int>", "[1]"),
        ("double", '"NaN"'),
        ("float", '"Infinity"'),
        ("int", "3000000000"),
        ("date", '"soon"'),
        ("decimal(4,2)", '"1.234"'),
    ],
)
def test_a_default_that_iceberg_cannot_keep_is_refused(lab: Lab, kind: str, default: str) -> None:
    name = lab.create()
    with pytest.raises(Refused) as caught:
        lab.lake.prepare(name, lab.op(), 1, [AddColumn("c", kind, default)])
    assert caught.value.code == "lake.default"


def test_a_column_dropped_and_added_again_does_not_bring_old_values_back(lab: Lab) -> None:
    name = lab.create()
    lab.commit(name, Append(lab.write(name, rows(1))))
    lab.commit(name, DropColumn("note"))
    lab.commit(name, AddColumn("note", "string"))
    assert lab.pyiceberg(name) == lab.duckdb(name) == [{"id": 1, "at": 1, "note": None}]
    lab.commit(name, RenameColumn("at", "moment"))
    table = lab.table(name)
    assert table.layout == Layout("truncate", 100, "moment")
    assert table.properties["write.metadata.metrics.column.moment"] == "full"
    mapping = {
        entry["field-id"]: entry["names"] for entry in json.loads(table.properties["schema.name-mapping.default"])
    }
    assert mapping[2] == ["at", "moment"], "files without ids are read by either name"
    assert mapping[4] == ["note"]


def test_files_are_streamed_in_chunks_with_bounds_sequence_and_vectors(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "FILES_PER_CHUNK", 2)
    name = lab.create()
    lab.commit(name, Append(lab.write(name, rows(*range(10, 700, 100), 11))))
    first = next(file for file in only(lab, name) if file.lower == 10)
    vector = lab.vector(name, [1], first.file)
    lab.commit(name, RowDelta(rows=lab.write(name, rows(12)), vectors=(vector,), validate_from=lab.ids(name)[0]))
    found = sorted(only(lab, name), key=lambda file: file.lower or 0)
    assert [(file.lower, file.upper, file.file.rows) for file in found] == [
        (10, 11, 2),
        (12, 12, 1),
        *((low, low, 1) for low in range(110, 700, 100)),
    ]
    assert [file.sequence_number for file in found] == [1, 2, *[1] * 6]
    assert [(v.path, v.rows, v.data_file) for v in found[0].vectors] == [(vector.path, 1, first.file.path)]
    assert not any(file.vectors or file.foreign_deletes for file in found[1:])
    assert len(list(lab.lake.files(name, lab.ids(name)[0]))) == 7
    current = lab.ids(name)[-1]
    assert len(list(lab.lake.files(name, current, rows=Range("at", 100, 300)))) == 2
    first_only = lab.lake.files(name, current)
    next(first_only)
    first_only.close()  # type: ignore[attr-defined]


def test_overlapping_files_are_counted_by_half_open_ranges(lab: Lab) -> None:
    name = lab.create()
    assert lab.lake.overlapping_files(name, "at", None, None) == 0
    lab.commit(name, Append(lab.write(name, rows(10, 50, 150, 250))))
    assert lab.lake.overlapping_files(name, "at", None, None) == 3
    assert lab.lake.overlapping_files(name, "at", 0, 10) == 0
    assert lab.lake.overlapping_files(name, "at", 50, 150) == 1
    assert lab.lake.overlapping_files(name, "at", 50, 151) == 2
    assert lab.lake.overlapping_files(name, "at", 200, None) == 1


@pytest.mark.parametrize("kind", ["timestamp", "timestamptz", "date"])
def test_ranges_on_time_keys_are_axis_values_even_when_they_are_small(lab: Lab, kind: str) -> None:
    unit = 1 if kind == "date" else 86_400_000_000
    name = lab.create([LakeColumn("id", "long"), LakeColumn("at", kind)], Layout("day", None, "at"))
    days: list[Any] = [date(1970, 1, 1), date(1970, 1, 3)]
    if kind != "date":
        days = [datetime(day.year, day.month, day.day, tzinfo=UTC if kind == "timestamptz" else None) for day in days]
    lab.commit(name, Append(lab.write(name, [{"id": index, "at": day} for index, day in enumerate(days)])))
    assert [(file.lower, file.upper) for file in sorted(only(lab, name), key=lambda file: file.lower or 0)] == [
        (0, 0),
        (2 * unit, 2 * unit),
    ]
    assert lab.lake.overlapping_files(name, "at", 0, 1) == 1
    assert lab.lake.overlapping_files(name, "at", -5, 0) == 0
    assert lab.lake.overlapping_files(name, "at", unit, 3 * unit) == 1


def test_foreign_snapshots_are_found_in_a_real_table(lab: Lab) -> None:
    name = lab.create()
    since = lab.commit(name, Append(lab.write(name, rows(1)))).snapshot_id
    assert lab.lake.foreign_snapshots(lab.table(name), since) == []
    lab.foreign(name, lab.write(name, rows(2)))
    lab.commit(name, Append(lab.write(name, rows(3))))
    (found,) = lab.lake.foreign_snapshots(lab.table(name), since)
    assert (found.id, found.operation) == (lab.ids(name)[1], "append")
    assert found.summary["added-records"] == "1"
    assert lab.lake.foreign_snapshots(lab.table(name), 4711)[0].operation == "unrelated"


def test_a_metadata_location_can_be_read_long_after(lab: Lab) -> None:
    name = lab.create()
    first = lab.commit(name, Append(lab.write(name, rows(1))))
    assert first.snapshot_id is not None
    lab.commit(name, Append(lab.write(name, rows(2))), tag=[first.snapshot_id])
    assert lab.lake.load_at(name, first.new_location).snapshot_id == first.snapshot_id
    assert lab.table(name).tags == {pin_tag(first.snapshot_id): first.snapshot_id}


def test_purge_names_the_folder_and_never_one_outside_the_warehouse(lab: Lab, gateway: Gateway, pointers: Dsn) -> None:
    name = lab.create()
    assert lab.lake.purge(name) == lab.table(name).location
    assert lab.lake.purge(lab.lake.name("public", "nobody")) is None
    other = IcebergLake(gateway, pointers, f"{lab.lake.warehouse}/modak/public/{name.name}x")
    with pytest.raises(Refused) as caught:
        other.purge(name)
    assert caught.value.code == "lake.outside_warehouse"
    other.close()


@pytest.mark.bare
def test_a_database_without_the_pointer_tables_is_reported(
    gateway: Gateway, fresh_database: Dsn, warehouse: str
) -> None:
    lake = IcebergLake(gateway, fresh_database, warehouse)
    with pytest.raises(ModakError) as caught:
        lake.load(lake.name("public", "t"))
    assert caught.value.code == "lake.catalog_unreachable"
    assert fresh_database.password not in str(caught.value)
    lake.close()
    with psycopg.connect(fresh_database.conninfo()) as conn:
        found = conn.execute("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'iceberg_%'").fetchone()
    assert found == (0,), "Iceberg must not create its tables itself"


def test_tables_of_the_same_name_in_another_schema_do_not_disturb(lab: Lab, pointers: Dsn) -> None:
    with psycopg.connect(pointers.conninfo()) as conn:
        conn.execute("CREATE TABLE public.iceberg_tables (anything int)")
    try:
        assert lab.table(lab.create()).format_version == 3
    finally:
        with psycopg.connect(pointers.conninfo()) as conn:
            conn.execute("DROP TABLE public.iceberg_tables")


def test_nothing_is_left_beside_the_files_on_a_local_disk(lab: Lab) -> None:
    name = lab.create()
    lab.commit(name, Append(lab.write(name, rows(1))))
    assert not [uri for uri in table_folder(lab, name) if uri.endswith(".crc")]
