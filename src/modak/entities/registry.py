"""The attribute registry: which attributes a schema has, what their values are and where Postgres keeps them.

It is JSON, one file for all schemas or a folder with one file each:
`{"schema_id": 7, "name": "invoice", "attributes": {"amount": {"id": 3, "type": "numeric", "scale": 2}}}`.
Reading it checks everything that can be checked without a database; what is wrong is refused by name, before any work.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modak.core.errors import ModakError, Refused

FIXED_COLUMNS = (
    "schema_id",
    "row_id",
    "changed_at",
    "deleted_at",
    "ltbase_created_at",
    "ltbase_updated_at",
    "ltbase_deleted_at",
)
"""The columns that every file begins with."""

SCALARS = ("text", "smallint", "integer", "bigint", "numeric", "date", "datetime", "uuid", "bool")
ENCODINGS = ("unix_ms", "iso8601", "bool_smallint", "bool_text")
SLOTS: Mapping[str, int] = {"text": 10, "smallint": 3, "integer": 3, "bigint": 5, "double": 5, "uuid": 2}
"""The families of typed columns of `entity_main`, and how many there are of each."""

DEFAULT_PRECISION, DEFAULT_SCALE = 38, 10
_MOST_DIGITS = 38
_SLOT = re.compile(r"(text|smallint|integer|bigint|double|uuid)_(\d\d)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BINDINGS: Mapping[tuple[str, str], str] = {
    ("text", "text"): "",
    ("text", "date"): "iso8601",
    ("text", "datetime"): "iso8601",
    ("text", "bool"): "bool_text",
    ("text", "uuid"): "",
    ("text", "numeric"): "",
    ("smallint", "smallint"): "",
    ("smallint", "integer"): "",
    ("smallint", "bigint"): "",
    ("smallint", "numeric"): "",
    ("smallint", "bool"): "bool_smallint",
    ("integer", "integer"): "",
    ("integer", "bigint"): "",
    ("integer", "numeric"): "",
    ("bigint", "bigint"): "",
    ("bigint", "numeric"): "",
    ("bigint", "date"): "unix_ms",
    ("bigint", "datetime"): "unix_ms",
    ("double", "numeric"): "",
    ("uuid", "uuid"): "",
}
"""Which column family can hold which type, and in which encoding."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute: what it is called, its number in `eav_data`, its type, and its column where it has one."""

    name: str
    id: int
    type: str
    items: str | None = None
    column: str | None = None
    encoding: str | None = None
    precision: int = DEFAULT_PRECISION
    scale: int = DEFAULT_SCALE

    @property
    def scalar(self) -> str:
        """The type of one value: of the items, for a list."""
        return self.items or self.type

    @property
    def is_list(self) -> bool:
        """Whether the attribute has many values."""
        return self.type == "list"

    @property
    def type_name(self) -> str:
        """The type as files and people know it: `numeric(18,2)`, `list<text>`."""
        inner = f"numeric({self.precision},{self.scale})" if self.scalar == "numeric" else self.scalar
        return f"list<{inner}>" if self.is_list else inner

    @property
    def binding(self) -> str:
        """Where Postgres keeps the value: a column with its encoding, or nothing for `eav_data`."""
        return "/".join(filter(None, (self.column, self.encoding)))


@dataclass(frozen=True, slots=True)
class EntitySchema:
    """The attributes of one schema, sorted by name."""

    schema_id: int
    name: str
    attributes: tuple[Attribute, ...]

    @property
    def digest(self) -> str:
        """A short text that changes whenever the meaning of the schema does."""
        told = [(each.name, each.id, each.type_name, each.binding) for each in self.attributes]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Registry:
    """All schemas that somebody has described."""

    schemas: tuple[EntitySchema, ...] = ()

    def resolve(self, schema_id: int) -> EntitySchema:
        """The schema of an id; `entities.unknown_schema` where the registry has none."""
        for schema in self.schemas:
            if schema.schema_id == schema_id:
                return schema
        raise Refused(
            "entities.unknown_schema",
            f"The registry has no schema {schema_id}.",
            hint="Describe it in the file or folder of MODAK_ENTITIES_REGISTRY; nothing was changed.",
        )

    def named(self, name: str) -> EntitySchema | None:
        """The schema of a name, as people write it."""
        return next((schema for schema in self.schemas if schema.name.lower() == name.lower()), None)


def load_registry(place: str | Path) -> Registry:
    """Read a JSON file, or every `*.json` of a folder."""
    path = Path(place)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    described: list[Any] = []
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise _unreadable(file, error.strerror or "cannot be read") from error
        except ValueError as error:
            raise _unreadable(file, "is not JSON") from error
        described += found["schemas"] if isinstance(found, dict) and "schemas" in found else [found]
    return read_registry(described)


def read_registry(described: Iterable[Any]) -> Registry:
    """Check and take in schemas as JSON describes them."""
    schemas = tuple(sorted(map(_schema, described), key=lambda schema: schema.schema_id))
    for what, values in (
        ("id", [str(schema.schema_id) for schema in schemas]),
        ("name", [schema.name.lower() for schema in schemas]),
    ):
        twice = _twice(values)
        if twice is not None:
            raise _wrong(f"Two schemas have the {what} {twice}.")
    return Registry(schemas)


def _schema(described: Any) -> EntitySchema:
    if not isinstance(described, dict) or not isinstance(described.get("attributes"), dict):
        raise _wrong("A schema is an object with schema_id, name and attributes.")
    schema_id = _whole(described.get("schema_id"), "schema_id", 0, 32_767)
    name = described.get("name", f"schema_{schema_id}")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise _wrong(f"Schema {schema_id}: {name!r} is not a name of letters, digits and _.")
    where = f"schema {schema_id}"
    attributes = tuple(
        sorted((_attribute(where, key, each) for key, each in described["attributes"].items()), key=lambda a: a.name)
    )
    check_names(attributes, where)
    for what, values in (
        ("id", [str(each.id) for each in attributes]),
        ("column", [each.column for each in attributes if each.column]),
    ):
        twice = _twice(values)
        if twice is not None:
            raise _wrong(f"In {where} two attributes have the {what} {twice}.")
    return EntitySchema(schema_id, name, attributes)


def check_names(attributes: Sequence[Attribute], where: str, former: Iterable[str] = ()) -> None:
    """Refuse names that engines without upper case could not tell apart: from each other, from ours, from former ones.

    A former name is one that files of the store still have; the very same spelling is not a collision.
    """
    taken = {fixed: fixed for fixed in FIXED_COLUMNS}
    for name in [*(each.name for each in attributes), *former]:
        folded = name.casefold()
        known = taken.setdefault(folded, name)
        if known != name or folded in FIXED_COLUMNS:
            raise _wrong(f"In {where} the attribute names {name!r} and {known!r} are the same once case is folded.")


def _attribute(where: str, name: str, described: Any) -> Attribute:
    at = f"{where}, attribute {name!r}"
    # A tilde at the beginning marks columns of merging, and those of attributes that the registry no longer has.
    if not name or name != name.strip() or name.startswith("~") or _CONTROL.search(name):
        raise _wrong(f"In {where} {name!r} is not the name of an attribute.")
    if not isinstance(described, dict):
        raise _wrong(f"{at}: expected an object with id and type.")
    unknown = set(described) - {"id", "type", "items", "column", "encoding", "precision", "scale"}
    if unknown:
        raise _wrong(f"{at}: {min(unknown)!r} means nothing here.")
    kind, items = described.get("type"), described.get("items")
    if kind not in (*SCALARS, "list"):
        raise _wrong(f"{at}: {kind!r} is not a type; known are {', '.join(SCALARS)} and list.")
    if kind == "list":
        items = items or "text"
    if (items is not None) != (kind == "list") or (items is not None and items not in SCALARS):
        raise _wrong(f"{at}: items is the type of the values of a list.")
    precision = _whole(described.get("precision", DEFAULT_PRECISION), f"{at}: precision", 1, _MOST_DIGITS)
    scale = _whole(described.get("scale", min(DEFAULT_SCALE, precision)), f"{at}: scale", 0, precision)
    column, encoding = _binding(at, kind, described.get("column"), described.get("encoding"))
    return Attribute(
        name, _whole(described.get("id"), f"{at}: id", -32_768, 32_767), kind, items, column, encoding, precision, scale
    )


def _binding(at: str, kind: str, column: Any, encoding: Any) -> tuple[str | None, str | None]:
    if column is None:
        if encoding is not None:
            raise _wrong(f"{at}: an encoding belongs to a column.")
        return None, None
    slot = _SLOT.fullmatch(str(column))
    if slot is None or not 1 <= int(slot[2]) <= SLOTS[slot[1]]:
        raise _wrong(f"{at}: entity_main has no column {column!r}.")
    wanted = _BINDINGS.get((slot[1], kind))
    if wanted is None:
        raise _wrong(f"{at}: the column {column} cannot hold a {kind}.")
    if encoding is not None and encoding not in ENCODINGS:
        raise _wrong(f"{at}: {encoding!r} is not an encoding; known are {', '.join(ENCODINGS)}.")
    if (encoding or wanted) != wanted:
        raise _wrong(f"{at}: a {kind} in {column} is encoded as {wanted or 'itself'}, not as {encoding}.")
    return str(column), wanted or None


def _whole(value: Any, what: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(f"{what}: expected a whole number from {least} to {most}.")
    return value


def _twice(values: Sequence[str]) -> str | None:
    return next((value for at, value in enumerate(values) if value in values[:at]), None)


def _unreadable(file: Path, why: str) -> ModakError:
    return Refused("entities.registry", f"The registry {file} {why}.", hint="Check MODAK_ENTITIES_REGISTRY.")


def _wrong(message: str) -> ModakError:
    return Refused("entities.registry", message, hint="Correct the attribute registry; nothing was changed.")
