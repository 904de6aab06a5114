"""How a Postgres column becomes a lake column: its Iceberg type, the SQL that reads it and the way back from text.

Registration asks this module what a table will look like in the lake and whether its key can identify rows there; the
exporter takes the select list from here and `decode` turns what arrives into the lake's Arrow types. Pure and light: no
Arrow import. `docs/types.md` states the result for every type and value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modak.lake.model import LakeColumn

if TYPE_CHECKING:
    from modak.postgres.describe import PgColumn, PgType

Numeric = Literal["decimal", "string"]

_MAX_PRECISION = 38
_INT8_DIGITS = 18
_AS_THEY_ARE = {
    "bool": "boolean",
    "int2": "int",
    "int4": "int",
    "int8": "long",
    "float4": "float",
    "float8": "double",
    "text": "string",
    "varchar": "string",
    "name": "string",
    "bytea": "binary",
    "uuid": "uuid",
}
_MOMENTS = {"date": "date", "timestamp": "timestamp", "timestamptz": "timestamp"}

# Types that the cast to text spells otherwise than their output function does; the lake holds what the cast gives.
_TWO_TEXTS = {"bpchar": "blanks", "inet": "mask"}

# Types whose text is equal exactly when Postgres calls the values equal, so that it can stand for the value in a key.
_IDENTIFYING = frozenset(
    {"bool", "int2", "int4", "int8", "oid", "xid8", "pg_lsn", "uuid", "bytea", "bit", "varbit"}
    | {"text", "varchar", "bpchar", "name", "char", "inet", "cidr", "macaddr", "macaddr8"}
    | {"date", "timestamp", "timestamptz", "time", "timetz"}
    | {"int4range", "int8range", "daterange", "tsrange", "tstzrange"}
)
# Columns that Iceberg readers add to every table.
_RESERVED = frozenset(
    {"_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number"}
    | {"_change_type", "_change_ordinal", "_commit_snapshot_id"}
)


@dataclass(frozen=True, slots=True)
class MappedColumn:
    """A Postgres column with its place in the lake.

    `select` is the SQL expression that reads it, `decode` names what must still happen to the Arrow array that arrives
    (`plain`, `decimal`, `checked_decimal`, `scaled`, `date`, `timestamp`, `blanks`, `mask`, or `list:` and one),
    `guard` is an SQL condition that is true for values which the lake type cannot hold.
    """

    column: LakeColumn
    select: str
    decode: str
    guard: str | None = None


@dataclass(frozen=True, slots=True)
class TypeRefusal:
    """Why a column cannot go to the lake, or cannot be part of a key, and what to do about it."""

    column: str
    reason: str
    hint: str


def map_column(col: PgColumn, *, numeric: Numeric = "decimal", numeric_scale: int = 18) -> MappedColumn | TypeRefusal:
    """The lake column for a Postgres column; `numeric` decides about numerics that no decimal is sure to hold."""
    if col.name.lower() in _RESERVED:
        return TypeRefusal(
            col.name,
            f"Column {col.name} has the name of a column that Iceberg adds to every table.",
            "Rename the column in Postgres.",
        )
    quoted = quoted_identifier(col.name)
    element = col.type.element if col.type.kind == "array" else None
    guard = None
    if element is None or element.name == "box":
        # An array of box separates its elements by semicolons; it goes as one text, like every other rare type.
        lake_type, cast, decode = _scalar(col.type, numeric, numeric_scale)
        select = f"{quoted}::text" if cast else quoted
        fixed = _decimal(col.type) if decode == "decimal" else None
        if fixed and fixed[0] <= _INT8_DIGITS:
            # Half the cost of text on both sides of the wire; a digit more would not fit into eight bytes.
            select, decode = f"({quoted} * {10 ** fixed[1]})::int8", "scaled"
    else:
        lake_type, cast, decode = _scalar(element, numeric, numeric_scale)
        # A slice of the whole counts from one: the driver knows no other lower bound, and the lake none at all.
        select = f"({quoted}::text[])[:]" if cast else f"{quoted}[:]"
        lake_type, decode = f"list<{lake_type}>", f"list:{decode}"
        guard = f"array_ndims({quoted}) > 1"
    return MappedColumn(LakeColumn(col.name, lake_type, required=col.not_null), select, decode, guard)


def select_list(mapped: Sequence[MappedColumn]) -> str:
    """What stands between SELECT and FROM so that `decode` can read the answer: the columns, then the guards."""
    guards = (column.guard for column in mapped if column.guard)
    named = [f"{column.select} AS c{at}" for at, column in enumerate(mapped)]
    return ", ".join([*named, *(f"{guard} AS g{at}" for at, guard in enumerate(guards))])


def quoted_identifier(name: str) -> str:
    """An identifier for the SQL text that travels to an ADBC connection, where nothing can be composed."""
    if "\x00" in name:
        raise ValueError("an identifier cannot hold a zero byte")
    return '"' + name.replace('"', '""') + '"'


def identity_refusal(col: PgColumn) -> TypeRefusal | None:
    """Why a column cannot be part of a key: a key is compared by its text, in Postgres and in the lake."""
    why = _unfit(col.type)
    if why is None:
        return None
    if col.type.kind == "enum":
        hint = "Use a text column with a CHECK constraint for it."
    else:
        hint = "Use a key of integer, uuid, text, date or timestamp columns, or give the numeric a precision."
    return TypeRefusal(col.name, f"Key column {col.name} {why}.", hint)


def _unfit(kind: PgType) -> str | None:
    if kind.name == "numeric" and kind.precision is not None:
        return None if _decimal(kind) else f"is a numeric of more than {_MAX_PRECISION} digits"
    if not kind.collation_deterministic:
        return "has a non-deterministic collation, under which different texts are equal"
    if kind.kind == "enum":
        return "is an enum, whose labels can be renamed: lake and corrections would still know rows by the former one"
    if kind.name in _IDENTIFYING:
        return None
    what = {"float4": "a float", "float8": "a float", "numeric": "a numeric without precision", "citext": "citext"}
    other = f"an array of {kind.element.name}" if kind.element else f"of type {kind.name}"
    return f"is {what.get(kind.name, other)}, whose equal values can have different texts"


def name_clashes(columns: Iterable[str]) -> list[TypeRefusal]:
    """Columns that differ only in case: Spark and DuckDB could not tell them apart."""
    seen: dict[str, str] = {}
    clashes = []
    for name in columns:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            clashes.append(
                TypeRefusal(
                    name,
                    f"Columns {other} and {name} differ only in case, and lake readers ignore case.",
                    "Rename one of them in Postgres.",
                )
            )
    return clashes


def _scalar(kind: PgType, numeric: Numeric, numeric_scale: int) -> tuple[str, bool, str]:
    """Lake type, whether it is read as text, and what `decode` has to do."""
    if kind.kind == "scalar":
        if kind.name in _AS_THEY_ARE:
            return _AS_THEY_ARE[kind.name], False, "plain"
        if kind.name in _MOMENTS:
            return kind.name, False, _MOMENTS[kind.name]
        if kind.name in _TWO_TEXTS:
            return "string", True, _TWO_TEXTS[kind.name]
        if kind.name == "numeric":
            # Text, because ADBC takes twice as long over the binary form of numeric.
            fixed = _decimal(kind)
            if fixed:
                return f"decimal({fixed[0]},{fixed[1]})", True, "decimal"
            if numeric == "decimal":
                return f"decimal({_MAX_PRECISION},{numeric_scale})", True, "checked_decimal"
    return "string", True, "plain"


def _decimal(kind: PgType) -> tuple[int, int] | None:
    """Precision and scale of the decimal that holds every value of a numeric, if there is one."""
    if kind.precision is None:
        return None
    precision, scale = kind.precision, kind.scale or 0
    if scale < 0:
        # numeric(3,-2) rounds to hundreds: five digits, no fraction.
        precision, scale = precision - scale, 0
    precision = max(precision, scale)
    return (precision, scale) if precision <= _MAX_PRECISION else None
