"""What becomes of a Postgres column, which keys are refused, and that the documentation says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from modak.lake import types as module
from modak.lake.parse import initial_default
from modak.lake.types import (
    MappedColumn,
    TypeRefusal,
    identity_refusal,
    map_column,
    name_clashes,
    quoted_identifier,
    select_list,
)
from modak.postgres.connect import connect
from modak.postgres.describe import PgColumn, PgType
from modak.postgres.dsn import Dsn

_DOCS = Path(__file__).parents[2] / "docs" / "types.md"


def _column(name: str = "c", kind: str = "int8", **options: Any) -> PgColumn:
    of = options.pop("of", None) or PgType(kind, options.pop("type_kind", "scalar"), **options)
    return PgColumn(
        name=name,
        attnum=1,
        type=of,
        not_null=False,
        default=None,
        default_constant=False,
        default_value=None,
        missing_value=None,
        generated=False,
        n_distinct=None,
    )


def _mapped(column: PgColumn, **options: Any) -> MappedColumn:
    mapped = map_column(column, **options)
    assert isinstance(mapped, MappedColumn)
    return mapped


@pytest.mark.parametrize(
    ("precision", "scale", "lake_type"),
    [
        (12, 2, "decimal(12,2)"),
        (38, 0, "decimal(38,0)"),
        (3, 5, "decimal(5,5)"),
        (3, -2, "decimal(5,0)"),
        (30, -9, "decimal(38,18)"),
        (39, 2, "decimal(38,18)"),
        (None, None, "decimal(38,18)"),
    ],
)
def test_a_numeric_becomes_the_decimal_that_holds_it(precision: int | None, scale: int | None, lake_type: str) -> None:
    assert _mapped(_column(kind="numeric", precision=precision, scale=scale)).column.type == lake_type


def test_only_a_numeric_that_no_decimal_is_sure_to_hold_becomes_text() -> None:
    assert _mapped(_column(kind="numeric"), numeric="string").column.type == "string"
    assert _mapped(_column(kind="numeric", precision=5, scale=2), numeric="string").column.type == "decimal(5,2)"


def test_the_select_list_quotes_names_and_adds_the_guards() -> None:
    text = PgType("text", "scalar")
    mapped = [
        _mapped(_column('a"; DROP TABLE x; --')),
        _mapped(_column("b", of=PgType("_text", "array", element=text))),
    ]
    assert select_list(mapped) == '"a""; DROP TABLE x; --" AS c0, "b"[:] AS c1, array_ndims("b") > 1 AS g0'
    with pytest.raises(ValueError, match="zero byte"):
        quoted_identifier("a\x00")


@pytest.mark.parametrize(
    "kind",
    [
        PgType("float4", "scalar"),
        PgType("float8", "scalar"),
        PgType("numeric", "scalar"),
        PgType("numeric", "scalar", precision=50, scale=0),
        PgType("citext", "scalar"),
        PgType("text", "scalar", collation_deterministic=False),
        PgType("interval", "scalar"),
        PgType("jsonb", "scalar"),
        PgType("money", "scalar"),
        PgType("pair", "composite"),
        PgType("_int4", "array", element=PgType("int4", "scalar")),
    ],
)
def test_a_key_whose_equal_values_can_have_different_texts_is_refused(kind: PgType) -> None:
    refusal = identity_refusal(_column("key", of=kind))
    assert refusal is not None
    assert "key" in refusal.reason
    assert refusal.hint


def test_an_enum_is_no_key_because_its_labels_can_be_renamed() -> None:
    refusal = identity_refusal(_column("key", of=PgType("mood", "enum")))
    assert refusal is not None
    assert "labels can be renamed" in refusal.reason
    assert refusal.hint == "Use a text column with a CHECK constraint for it."


@pytest.mark.parametrize(
    "kind",
    [
        *(PgType(name, "scalar") for name in ("int2", "int8", "text", "uuid", "date", "timestamptz", "bytea")),
        PgType("numeric", "scalar", precision=12, scale=2),
    ],
)
def test_other_keys_are_fine(kind: PgType) -> None:
    assert identity_refusal(_column(of=kind)) is None


def test_the_refusals_of_keys_are_those_of_postgres_itself(fresh_database: Dsn) -> None:
    different_but_equal = [("numeric", "1", "1.0"), ("float8", "0", "-0"), ("interval", "1 day", "24:00:00")]
    with connect(fresh_database) as conn:
        for kind, left, right in [*different_but_equal, ("jsonb", "1", "1.0")]:
            row = conn.execute(f"SELECT '{left}'::{kind} = '{right}'::{kind}, '{left}'::{kind}::text").fetchone()
            assert row is not None
            assert row[0]
            assert identity_refusal(_column(kind=kind)) is not None


def test_names_that_lake_readers_cannot_tell_apart_are_refused() -> None:
    assert [clash.column for clash in name_clashes(["id", "Name", "name", "x"])] == ["name"]
    assert isinstance(map_column(_column("_ROW_ID")), TypeRefusal)


@pytest.mark.parametrize(
    ("kind", "text", "json_text"),
    [
        (PgType("int4", "scalar"), "5", "5"),
        (PgType("bool", "scalar"), "t", "true"),
        (PgType("float8", "scalar"), "1.5", "1.5"),
        (PgType("float8", "scalar"), "NaN", None),
        (PgType("numeric", "scalar", precision=5, scale=2), "1.50", '"1.50"'),
        (PgType("text", "scalar"), 'a"é', '"a\\"é"'),
        (PgType("bytea", "scalar"), "\\x00ff", '"00FF"'),
        (PgType("uuid", "scalar"), "0" * 8 + "-0000" * 3 + "-" + "0" * 12, '"00000000-0000-0000-0000-000000000000"'),
        (PgType("date", "scalar"), "2024-02-29", '"2024-02-29"'),
        (PgType("date", "scalar"), "infinity", None),
        (PgType("date", "scalar"), "0044-03-15 BC", None),
        (PgType("timestamp", "scalar"), "2024-02-29 01:02:03.5", '"2024-02-29T01:02:03.500000"'),
        (PgType("timestamptz", "scalar"), "2024-02-29 01:02:03+00", '"2024-02-29T01:02:03+00:00"'),
        (PgType("time", "scalar"), "12:00:00", '"12:00:00"'),
        (PgType("_int4", "array", element=PgType("int4", "scalar")), "{1}", None),
    ],
)
def test_a_constant_default_becomes_an_initial_default_where_iceberg_has_one(
    kind: PgType, text: str, json_text: str | None
) -> None:
    assert initial_default(_mapped(_column(of=kind)), text) == json_text


def test_iceberg_takes_every_initial_default(gateway: Any) -> None:
    from modak.lake.iceberg.java import Java
    from modak.lake.iceberg.schema import java_type, literal

    java = Java(gateway)
    for name, text in {
        "bool": "t", "int4": "5", "int8": "5", "float4": "0.1", "float8": "1e300", "numeric": "1.50", "text": "é",
        "bytea": "\\x00ff", "uuid": "12345678-0000-0000-0000-000000000000", "date": "0001-01-01",
        "timestamp": "9999-12-31 23:59:59.999999", "timestamptz": "1969-12-31 23:59:59+00",
    }.items():  # fmt: skip
        mapped = _mapped(_column(kind=name))
        default = initial_default(mapped, text)
        assert default is not None
        literal(java, java_type(java, mapped.column.type), mapped.column.type, default)


def test_the_documentation_lists_every_mapped_type() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", _DOCS.read_text(), re.MULTILINE)[1:]
    documented = {name: lake for types, lake in rows for name in re.findall(r"`\"?([a-z0-9]+)", types)}
    mapped = {
        **module._AS_THEY_ARE,
        **{name: name for name in module._MOMENTS},
        **dict.fromkeys(module._TWO_TEXTS, "string"),
    }
    for name, lake_type in mapped.items():
        assert f"`{lake_type}`" in documented[name], name
    for name in ("numeric", "time", "timetz", "interval", "json", "jsonb", "money", "cidr", "bit", "xml", "citext"):
        assert name in documented
    assert "char" in documented
