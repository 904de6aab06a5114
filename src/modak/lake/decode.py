"""From the Arrow batches that a Postgres stream yields to the Arrow batches that a lake file holds.

Runs inside Spark tasks between `postgres.arrow.stream` and the file writer. Every step is a whole-column kernel; most
columns pass without a copy, and memory is bounded by one batch. A value that the lake type cannot hold stops the export
with an error that names the column: nothing is rounded, clipped or turned into NULL.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from modak.core.errors import ModakError
from modak.lake.model import LakeColumn
from modak.lake.types import MappedColumn

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
FIELD_ID = b"PARQUET:field_id"

_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "uuid": pa.uuid(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}

_DAYS_TO_2000 = 10_957
_MICROS_TO_2000 = _DAYS_TO_2000 * 86_400_000_000


class _Clock(NamedTuple):
    """Where ADBC puts the values that need care.

    It moves Postgres' epoch (2000) to 1970 without looking at overflow. So infinity arrives wrapped around, next to
    minus infinity, and so do the finite timestamps that int64 microseconds since 1970 cannot hold. Below the oldest
    value that Postgres itself knows (4713 BC) there is nothing else, which makes all of them decidable.
    """

    oldest: int
    infinity: int
    wrapped_plus: int
    wrapped_minus: int


_DATES = _Clock(-2_440_588, INT32_MAX, INT32_MAX + _DAYS_TO_2000 - 2**32, -(2**31) + _DAYS_TO_2000)
_MICROS = _Clock(-210_866_803_200_000_000, INT64_MAX, INT64_MAX + _MICROS_TO_2000 - 2**64, -(2**63) + _MICROS_TO_2000)


@functools.cache
def arrow_type(lake_type: str) -> pa.DataType:
    """The Arrow type that holds a lake type (list elements without their ids)."""
    if lake_type.startswith("list<"):
        return pa.list_(pa.field("element", arrow_type(lake_type[5:-1])))
    match = _DECIMAL.fullmatch(lake_type)
    return pa.decimal128(int(match[1]), int(match[2])) if match else _TYPES[lake_type]


def arrow_schema(columns: Sequence[LakeColumn]) -> pa.Schema:
    """The Arrow schema of a data file, with the Iceberg field ids by which readers find the columns."""
    fields = []
    for column in columns:
        kind = arrow_type(column.type)
        if column.element is not None:
            kind = pa.list_(pa.field("element", kind.value_type, metadata=_field_id(column.element_id)))
        fields.append(pa.field(column.name, kind, nullable=not column.required, metadata=_field_id(column.field_id)))
    return pa.schema(fields)


def decode(batch: pa.RecordBatch, mapped: Sequence[MappedColumn], schema: pa.Schema) -> pa.RecordBatch:
    """A batch of `SELECT select_list(mapped)` as a batch of the lake's schema."""
    _check_guards(batch, mapped)
    arrays = []
    for at, column in enumerate(mapped):
        field = schema.field(at)
        array = _column(batch.column(at), column.decode, field.type, column.column.name)
        if array.null_count and not field.nullable:
            raise ModakError(
                "types.null",
                f"Column {column.column.name} holds NULL, but the lake column is required.",
                hint="The column lost its NOT NULL in Postgres; make the lake column optional first.",
            )
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def decoded(
    batches: Iterable[pa.RecordBatch], mapped: Sequence[MappedColumn], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The batches of a stream in the lake's schema, one at a time; every error names a column."""
    try:
        for batch in batches:
            yield decode(batch, mapped, schema)
            # Or it would still be here while the next one is fetched.
            del batch
    except ModakError as error:
        raise _by_column(error, mapped) from None


def decimals(texts: pa.Array, kind: pa.DataType, name: str, *, checked: bool) -> pa.Array:
    """Postgres' text of numerics as decimals; unchecked only when the Postgres type has this precision and scale."""
    # Arrow parses more digits than 128 bits hold without complaint and can wrap around while it rescales, so a text is
    # only handed to it when its digits fit.
    whole = kind.precision - kind.scale
    try:
        if checked and (pc.max(pc.binary_length(texts)).as_py() or 0) > whole:
            texts = _fitting(texts, whole, kind.scale)
        return texts.cast(kind)
    except pa.ArrowInvalid as error:
        raise _not_decimal(texts, kind, name) from error


def _field_id(value: int | None) -> dict[bytes, bytes] | None:
    return None if value is None else {FIELD_ID: str(value).encode()}


def _check_guards(batch: pa.RecordBatch, mapped: Sequence[MappedColumn]) -> None:
    at = len(mapped)
    for column in mapped:
        if column.guard is None:
            continue
        if pc.any(batch.column(at)).as_py():
            raise multidimensional(column.column.name)
        at += 1


def multidimensional(name: str) -> ModakError:
    """The refusal of an array value that is not a plain list."""
    return ModakError(
        "types.multidimensional",
        f"Column {name} holds a multi-dimensional array, and a lake list has one dimension.",
        hint=f"Flatten those values, or store them as jsonb: UPDATE … WHERE array_ndims({name}) > 1.",
    )


def _column(array: pa.Array, how: str, target: pa.DataType, name: str) -> pa.Array:
    if how.startswith("list:"):
        elements = _column(array.values, how[5:], target.value_type, name)
        # Same offsets and validity over new elements: also right for a slice, and without a copy.
        return pa.Array.from_buffers(
            target, len(array), array.buffers()[:2], array.null_count, array.offset, children=[elements]
        )
    match how:
        case "decimal" | "checked_decimal":
            return decimals(array, target, name, checked=how == "checked_decimal")
        case "date":
            return _unwrapped(array.cast(pa.int32()), _DATES, name).cast(target)
        case "timestamp":
            return _unwrapped(array.cast(pa.int64()), _MICROS, name).cast(target)
        case "scaled":
            return _scaled(array, target)
        case _:
            return array if array.type == target else _cast(array, target)


def _scaled(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Whole numbers of the last digit, as the decimal that they are."""
    wide = array.cast(pa.decimal128(19, 0))
    return pa.Array.from_buffers(target, len(wide), wide.buffers(), wide.null_count, wide.offset)


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    plain = array.storage if isinstance(array, pa.ExtensionArray) else array
    if isinstance(target, pa.UuidType):
        return pa.ExtensionArray.from_storage(target, plain.cast(target.storage_type))
    return plain.cast(target)


def _by_column(error: ModakError, mapped: Sequence[MappedColumn]) -> ModakError:
    # Postgres itself refuses to make NaN a whole number, and does not say of which column.
    if error.code.startswith("types.") or "NaN" not in error.message:
        return error
    names = ", ".join(column.column.name for column in mapped if column.decode == "scaled")
    return ModakError(
        "types.not_a_number",
        f"A numeric column holds NaN, which no decimal can hold (one of: {names}).",
        hint="Set those values to NULL, or change the column's type to double precision or text.",
    )


def _unwrapped(raw: pa.Array, clock: _Clock, name: str) -> pa.Array:
    extent = pc.min_max(raw)
    if extent["max"].as_py() == clock.infinity:
        raise out_of_range(name, "a moment that is stored as infinity")
    lowest = extent["min"].as_py()
    if lowest is None or lowest >= clock.oldest:
        return raw
    plus, minus, oldest, infinity, negative = (
        pa.scalar(value, raw.type)
        for value in (clock.wrapped_plus, clock.wrapped_minus, clock.oldest, clock.infinity, -clock.infinity)
    )
    up, down = pc.equal(raw, plus), pc.equal(raw, minus)
    if pc.any(pc.and_not(pc.less(raw, oldest), pc.or_(up, down))).as_py():
        raise out_of_range(name, "a timestamp after the year 294246")
    return pc.if_else(up, infinity, pc.if_else(down, negative, raw))


def out_of_range(name: str, what: str) -> ModakError:
    """The refusal of a value that the lake type cannot hold."""
    return ModakError(
        "types.out_of_range",
        f"Column {name} holds {what}, which the lake type cannot hold.",
        hint="Correct those rows in Postgres; docs/types.md lists the range of every type.",
    )


def _fitting(texts: pa.Array, whole: int, scale: int) -> pa.Array:
    """The texts without superfluous zeros; raises ArrowInvalid for one whose digits do not fit."""
    parts = pc.extract_regex(texts, r"^(?P<sign>-?)0*(?P<whole>[0-9]*?)(?:\.(?P<part>[0-9]*?)0*)?$")
    digits, fraction = pc.struct_field(parts, "whole"), pc.struct_field(parts, "part")
    for piece, most in ((digits, whole), (fraction, scale)):
        if (pc.max(pc.binary_length(piece)).as_py() or 0) > most:
            raise pa.ArrowInvalid("too many digits")
    if parts.null_count > texts.null_count:
        raise pa.ArrowInvalid("not a number")
    integral = pc.binary_join_element_wise(
        pc.struct_field(parts, "sign"), pc.if_else(pc.equal(digits, ""), "0", digits), ""
    )
    # No zero may be put behind the point: a 39th digit is one that Arrow would silently wrap around.
    return pc.if_else(pc.equal(fraction, ""), integral, pc.binary_join_element_wise(integral, fraction, "."))


def _not_decimal(texts: pa.Array, kind: pa.DataType, name: str) -> ModakError:
    strange = pc.is_in(texts, value_set=pa.array(["NaN", "Infinity", "-Infinity"]))
    if pc.any(strange).as_py():
        value: Any = texts.filter(strange)[0].as_py()
        return ModakError(
            "types.not_a_number",
            f"Column {name} holds {value}, and the lake's {_shown(kind)} has no such value.",
            hint="Correct those rows in Postgres, or store a numeric without precision as text (numeric as string).",
        )
    return ModakError(
        "types.out_of_range",
        f"Column {name} holds a numeric that does not fit {_shown(kind)} exactly.",
        hint="Give the column a precision in Postgres, or store it as text (numeric as string).",
    )


def _shown(kind: pa.DataType) -> str:
    return f"decimal({kind.precision},{kind.scale})"
