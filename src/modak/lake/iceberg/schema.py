"""Columns and layout of a lake table, between our values and Iceberg's JSON and Java types.

Whole schemas cross the border as Iceberg's own JSON; only a column that is added later needs Java objects, for its type
and for the default that old rows show.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from modak.core.errors import Refused
from modak.lake.iceberg.java import Java, JavaFailure
from modak.lake.model import LakeColumn, Layout, Transform

_LIST = re.compile(r"list<(.+)>")
_TRUNCATE = re.compile(r"truncate\[(\d+)\]")
_TIME = ("hour", "day", "month", "year")


def schema_json(columns: Sequence[LakeColumn]) -> str:
    """A schema in Iceberg's JSON. Ids not given are made up; Iceberg assigns its own when it creates a table."""
    taken = {number for column in columns for number in (column.field_id, column.element_id) if number is not None}
    fresh = iter(number for number in range(1, 2 * len(columns) + len(taken) + 1) if number not in taken)
    fields = []
    for column in columns:
        number = column.field_id if column.field_id is not None else next(fresh)
        kind: object = column.type
        if column.element is not None:
            kind = {
                "type": "list",
                "element-id": column.element_id if column.element_id is not None else next(fresh),
                "element": column.element,
                "element-required": False,
            }
        entry: dict[str, object] = {"id": number, "name": column.name, "required": column.required, "type": kind}
        if column.initial_default is not None:
            entry["initial-default"] = entry["write-default"] = json.loads(column.initial_default)
        fields.append(entry)
    return json.dumps({"type": "struct", "schema-id": 0, "fields": fields})


def columns_of(
    schema: Mapping[str, Any], file_names: Mapping[int, tuple[str, ...]] | None = None
) -> tuple[LakeColumn, ...]:
    """The columns of a schema in Iceberg's JSON, with the names that files without ids have for them."""
    columns = tuple(_column_of(entry) for entry in schema["fields"])
    if file_names is None:
        return columns
    return tuple(replace(column, file_names=file_names.get(column.field_id or 0, ())) for column in columns)


def _column_of(entry: Mapping[str, Any]) -> LakeColumn:
    kind = entry["type"]
    default = entry.get("initial-default")
    return LakeColumn(
        name=entry["name"],
        type=_type_text(kind),
        required=entry["required"],
        field_id=entry["id"],
        element_id=kind["element-id"] if isinstance(kind, dict) and kind["type"] == "list" else None,
        initial_default=None if default is None else json.dumps(default),
    )


def _type_text(kind: Any) -> str:
    if isinstance(kind, str):
        return kind.replace(" ", "")
    match kind["type"]:
        case "list":
            return f"list<{_type_text(kind['element'])}>"
        case "map":
            return f"map<{_type_text(kind['key'])},{_type_text(kind['value'])}>"
        case _:
            inner = ",".join(f"{field['name']}:{_type_text(field['type'])}" for field in kind["fields"])
            return f"struct<{inner}>"


def layout_of(spec: Mapping[str, Any], schema: Mapping[str, Any], tier_key: str | None = None) -> Layout:
    """The layout of a spec in Iceberg's JSON; a foreign spec that is none of ours is refused."""
    fields = [field for field in spec["fields"] if field["transform"] != "void"]
    if not fields:
        return Layout(None, None, tier_key)
    names = {entry["id"]: entry["name"] for entry in schema["fields"]}
    transform = fields[0]["transform"]
    width = _TRUNCATE.fullmatch(transform)
    if len(fields) > 1 or not (width or transform in _TIME) or fields[0]["source-id"] not in names:
        raise Refused(
            "lake.foreign_layout",
            f"The lake table is partitioned by {', '.join(field['transform'] for field in fields)}.",
            hint="Modak writes tables partitioned by truncate, hour, day, month or year of one column, or not at all.",
        )
    column = names[fields[0]["source-id"]]
    if width:
        return Layout("truncate", int(width[1]), column)
    return Layout(cast("Transform", transform), None, column)


def spec_of(java: Java, schema: Any, layout: Layout) -> Any:
    """The Java partition spec of a layout."""
    builder = java.iceberg.PartitionSpec.builderFor(schema)
    match layout:
        case Layout(transform=None):
            pass
        case Layout(transform="truncate", width=int(width), column=str(column)):
            builder.truncate(column, width)
        case Layout(transform=str(transform), column=str(column)) if transform in _TIME:
            getattr(builder, transform)(column)
        case _:
            raise ValueError(f"{layout} is not a layout")
    return builder.build()


def java_type(java: Java, text: str) -> Any:
    """The Java type of a type text. Nested ids are placeholders: Iceberg gives its own when it adds the column."""
    element = _LIST.fullmatch(text)
    if element:
        return java.iceberg.types.Types.ListType.ofOptional(1, java_type(java, element[1]))
    return java.iceberg.types.Types.fromPrimitiveString(text)


def literal(java: Java, kind: Any, type_text: str, default: str) -> Any:
    """A default (JSON single value) as a Java literal of the column's type."""
    value = json.loads(default)
    if type_text.startswith("list<"):
        raise _no_default(default, type_text, "Iceberg has no defaults for lists")
    if type_text in ("float", "double"):
        value = float(value)
        if not math.isfinite(value):
            # Iceberg would write it, and then nobody could read the table's metadata any more.
            raise _no_default(default, type_text, "only finite numbers can be written down")
    try:
        with java.failures():
            parsed = java.iceberg.SingleValueParser.fromJson(kind, json.dumps(value))
            # Small numbers arrive in Java as Integer, which Iceberg refuses to take for a point in time.
            given = java.iceberg.expressions.Expressions.lit(parsed)
            if type_text in ("timestamp", "timestamptz"):
                given = given.to(java.iceberg.types.Types.LongType.get())
            made = given.to(kind)
    except JavaFailure as failure:
        raise _no_default(default, type_text, failure.message) from failure
    if made is None or made.getClass().getSimpleName() in ("AboveMax", "BelowMin"):
        raise _no_default(default, type_text, "the value is out of range")
    return made


def _no_default(default: str, type_text: str, reason: str) -> Refused:
    return Refused(
        "lake.default",
        f"{default} cannot be the default of old rows in a column of type {type_text}: {reason}.",
        hint="Add the column without a default and fill the old rows in.",
    )
