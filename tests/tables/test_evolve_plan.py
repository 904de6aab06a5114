"""How the lake's schema follows the heap's, decided without I/O."""

from __future__ import annotations

import json

import pytest

from modak.core.errors import Refused
from modak.core.names import TableName
from modak.lake.changes import AddColumn, RenameColumn, SetProperties, WidenColumn
from modak.lake.model import LakeColumn, LakeName, LakeTable, Layout
from modak.postgres.describe import PgColumn, PgTable, PgType
from modak.tables.backfill import BACKFILL
from modak.tables.columns import COLUMNS, RELID
from modak.tables.evolve import Evolution, plan_evolution
from modak.tables.registration.preflight import map_columns


def column(
    name: str, attnum: int, kind: str = "text", default: str | None = None, missing: str | None = None
) -> PgColumn:
    return PgColumn(
        name=name,
        attnum=attnum,
        type=PgType(kind, "scalar"),
        not_null=False,
        default=default,
        default_constant=missing is not None,
        default_value=missing,
        missing_value=missing,
        generated=False,
        n_distinct=None,
    )


def heap(*columns: PgColumn) -> PgTable:
    return PgTable(
        name=TableName("public", "events"),
        oid=1,
        owner="me",
        relkind="p",
        persistence="p",
        partition_strategy="range",
        partition_columns=("ts",),
        columns=columns,
        primary_key=("id",),
        leaves=(),
        inheritance_children=(),
        inbound_foreign_keys=(),
        privileges=frozenset(),
        row_security=False,
        relfilenode=0,
        pages=0,
        bytes=0,
        rows_estimate=0,
        time_zone="UTC",
    )


def lake(known: dict[int, str], **types: str) -> LakeTable:
    return LakeTable(
        identifier=LakeName(("modak", "public"), "events"),
        location="file:///lake",
        metadata_location="file:///lake/metadata/0.json",
        snapshot_id=None,
        schema=tuple(LakeColumn(name, kind, field_id=at) for at, (name, kind) in enumerate(types.items(), 1)),
        spec_id=0,
        layout=Layout(),
        format_version=3,
        properties={COLUMNS: json.dumps({str(number): name for number, name in known.items()}), RELID: "1"},
        snapshot_count=0,
        tags={},
    )


def plan(table: PgTable, current: LakeTable) -> Evolution:
    mapped, problems = map_columns(table, "decimal:18", frozenset({"id"}))
    assert not problems
    return plan_evolution(table, mapped, current)


def test_nothing_changes_when_nothing_changed():
    assert plan(heap(column("id", 1, "int8")), lake({1: "id"}, id="long")).changes == ()


def test_a_new_column_is_added_with_the_value_that_old_rows_show():
    changes = plan(
        heap(column("id", 1, "int8"), column("kind", 2, default="'x'::text", missing="x")), lake({1: "id"}, id="long")
    ).changes
    assert changes[0] == AddColumn("kind", "string", '"x"')
    assert isinstance(changes[-1], SetProperties)


def test_a_default_that_differs_from_row_to_row_is_filled_in_by_a_rewrite():
    found = plan(heap(column("id", 1, "int8"), column("u", 2, default="random()::text")), lake({1: "id"}, id="long"))
    assert found.changes[0] == AddColumn("u", "string", None)
    assert isinstance(found.changes[-1], SetProperties)
    assert json.loads(found.changes[-1].values[BACKFILL]) == {"u": {"expression": "random()::text"}}


def test_a_renamed_column_is_renamed():
    changes = plan(
        heap(column("id", 1, "int8"), column("new", 2)), lake({1: "id", 2: "old"}, id="long", old="string")
    ).changes
    assert changes[0] == RenameColumn("old", "new")


def test_a_column_dropped_and_added_again_under_its_name_is_a_new_column():
    changes = plan(
        heap(column("id", 1, "int8"), column("kind", 3)), lake({1: "id", 2: "kind"}, id="long", kind="string")
    ).changes
    assert changes[:2] == (RenameColumn("kind", "kind_dropped_2"), AddColumn("kind", "string", None))


def test_a_dropped_column_stays_in_the_lake():
    changes = plan(heap(column("id", 1, "int8")), lake({1: "id", 2: "old"}, id="long", old="string")).changes
    assert all(isinstance(change, SetProperties) for change in changes)


def test_a_wider_type_widens_and_any_other_change_of_type_is_refused():
    wider = plan(heap(column("id", 1, "int8")), lake({1: "id"}, id="int")).changes
    assert wider[0] == WidenColumn("id", "long")
    with pytest.raises(Refused, match="is string in Postgres now, but long in the lake"):
        plan(heap(column("id", 1, "text")), lake({1: "id"}, id="long"))


def test_two_columns_that_swap_names_are_told_apart():
    changes = plan(
        heap(column("b", 1, "int8"), column("a", 2, "int8")), lake({1: "a", 2: "b"}, a="long", b="long")
    ).changes
    renames = [change for change in changes if isinstance(change, RenameColumn)]
    names = {"a": 1, "b": 2}
    for rename in renames:
        assert rename.new_name not in names
        names[rename.new_name] = names.pop(rename.name)
    assert names == {"b": 1, "a": 2}
