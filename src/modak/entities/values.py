"""Texts of Postgres become values of an attribute's type, a column at a time, and what does not fit is told.

The usual column is cast at once. Only where that fails, or where Arrow would take a text for another number, is it
looked at closely, with patterns instead of exceptions, and the values that do not fit come out as NULL with a mark.
Memory is that of the column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modak.entities.registry import Attribute
from modak.entities.types import arrow_scalar

if TYPE_CHECKING:
    import pyarrow as pa

_UUID = r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_WHOLE = r"^-?0*[0-9]{1,19}(\.0*)?$"
_DAY = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_MOMENT = (
    r"^(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2})[T ](?P<minute>[0-9]{2}:[0-9]{2})(?P<second>:[0-9]{2})?"
    r"(?:[.,](?P<fraction>[0-9]+))?(?P<zone>[Zz]|(?P<sign>[+-])(?P<hours>[0-9]{2}):?(?P<minutes>[0-9]{2})?)$"
)
_MOST_DIGITS = 38
_BOUNDS = {"smallint": 2**15, "integer": 2**31, "bigint": 2**63, "date": 2**63, "datetime": 2**63}


def typed(attribute: Attribute, raw: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """The values of a column, and where it is not `None` a mark for each that does not fit (and is NULL instead)."""
    import pyarrow as pa

    kind = attribute.scalar
    if pa.types.is_integer(raw.type):
        return _bool_of_numbers(raw) if kind == "bool" else (raw.cast(arrow_scalar(attribute)), None)
    if kind in ("text", "uuid", "bool"):
        return {"text": _texts, "uuid": _uuids, "bool": _bools}[kind](raw)
    if attribute.encoding == "iso8601":
        # Where moments are texts, a number is no moment.
        return _moments(raw, pa.nulls(len(raw), pa.int64()), kind)
    if not _to_the_letter(attribute, raw):
        return _looked_at(attribute, raw)
    try:
        return raw.cast(arrow_scalar(attribute)), None
    except pa.ArrowInvalid:
        return _looked_at(attribute, raw)


def _to_the_letter(attribute: Attribute, raw: pa.Array) -> bool:
    """Whether Arrow takes every number for itself.

    It reads `0x10` and `1e3` too, and a decimal wraps around without a word when it has more digits, together with the
    zeroes that its scale adds, than 128 bits hold.
    """
    import pyarrow.compute as pc

    if _has_letters(raw):
        return False
    if attribute.scalar != "numeric":
        return True
    longest = pc.max(pc.binary_length(raw)).as_py() or 0
    return bool(longest + attribute.scale <= _MOST_DIGITS)


def _has_letters(raw: pa.Array) -> bool:
    """Whether a byte of the texts is beyond the digits; points and signs are below them."""
    import numpy as np

    _, offsets, data = raw.buffers()
    if data is None or not len(raw):
        return False
    edges = np.frombuffer(offsets, np.int32)
    octets = np.frombuffer(data, np.uint8)[edges[raw.offset] : edges[raw.offset + len(raw)]]
    return bool((octets.max(initial=0) > ord("9")).item())


def _looked_at(attribute: Attribute, raw: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """A column of numbers of which some are not in the plain form."""
    kind = attribute.scalar
    if kind == "numeric":
        return _decimals(raw, attribute.precision, attribute.scale)
    whole, unfit = _whole(raw, _BOUNDS[kind])
    if kind in ("date", "datetime"):
        return _moments(raw, whole, kind)
    return whole.cast(arrow_scalar(attribute)), unfit


def _texts(raw: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    return raw, None


def _uuids(raw: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    import pyarrow.compute as pc

    return _where(pc.match_substring_regex(raw, _UUID), pc.utf8_lower(raw), raw)


def _bools(raw: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    word = pc.utf8_lower(raw)
    yes = pc.is_in(word, pa.array(["true", "1"]))
    return _where(pc.or_(yes, pc.is_in(word, pa.array(["false", "0"]))), yes, raw)


def _bool_of_numbers(raw: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    import pyarrow.compute as pc

    yes = pc.equal(raw, 1)
    return _where(pc.or_(yes, pc.equal(raw, 0)), yes, raw)


def _whole(raw: pa.Array, bound: int) -> tuple[pa.Array, pa.Array | None]:
    """Whole numbers within −bound … bound − 1; `5.00` is one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    shaped, _ = _where(pc.match_substring_regex(raw, _WHOLE), raw, raw)
    plain = pc.replace_substring_regex(shaped, r"\.0*$", "")
    numbers = pc.replace_substring_regex(plain, r"^(-?)0+([0-9])", r"\1\2").cast(pa.decimal128(38, 0))
    low, high = pa.scalar(-bound, pa.decimal128(38, 0)), pa.scalar(bound - 1, pa.decimal128(38, 0))
    inside = pc.and_(pc.greater_equal(numbers, low), pc.less_equal(numbers, high))
    kept = pc.if_else(pc.fill_null(inside, False), numbers, pa.scalar(None, numbers.type))
    return _told(kept.cast(pa.int64()), raw)


def _decimals(raw: pa.Array, precision: int, scale: int) -> tuple[pa.Array, pa.Array | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    fraction = rf"(\.[0-9]{{0,{scale}}}0*)?"
    formed = pc.match_substring_regex(raw, rf"^[+-]?0*[0-9]{{0,{precision - scale}}}{fraction}$")
    shaped, _ = _where(pc.and_(formed, pc.match_substring_regex(raw, "[0-9]")), raw, raw)
    trimmed = pc.replace_substring_regex(shaped, rf"^([+-]?[0-9]*\.[0-9]{{{scale}}})0+$", r"\1")
    bare = pc.replace_substring_regex(trimmed, r"\.$", "")
    plain = pc.replace_substring_regex(bare, r"^([+-]?)0+([0-9])", r"\1\2")
    zero = pc.replace_substring_regex(plain, r"^[+-]?$", "0")
    return _told(zero.cast(pa.decimal128(precision, scale)), raw)


def _moments(raw: pa.Array, whole: pa.Array, kind: str) -> tuple[pa.Array, pa.Array | None]:
    """Epoch milliseconds from numbers, from ISO texts with an offset, and from plain days where days are wanted."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts: Any = pc.extract_regex(raw, _MOMENT)
    text = {name: pc.struct_field(parts, name) for name in ("day", "minute", "second", "fraction", "sign")}
    seconds = pc.if_else(pc.equal(text["second"], ""), pa.scalar(":00"), text["second"])
    local = pc.binary_join_element_wise(text["day"], "T", text["minute"], seconds, "")
    millis = pc.utf8_slice_codeunits(pc.utf8_rpad(text["fraction"], 3, "0"), 0, 3).cast(pa.int64())
    hours, minutes = (
        pc.utf8_rpad(pc.struct_field(parts, name), 1, "0").cast(pa.int64()) for name in ("hours", "minutes")
    )
    offset = pc.multiply(pc.add(pc.multiply(hours, 60), minutes), 60_000)
    signed = pc.if_else(pc.equal(text["sign"], "-"), pc.negate(offset), offset)
    found = pc.add(pc.subtract(_local_millis(local), signed), millis)
    if kind == "date":
        day, _ = _where(pc.match_substring_regex(raw, _DAY), raw, raw)
        found = pc.coalesce(found, _local_millis(pc.binary_join_element_wise(day, "T00:00:00", "")))
    return _told(pc.coalesce(whole, found), raw)


def _local_millis(local: pa.Array) -> pa.Array:
    """Milliseconds since 1970 of texts such as 2026-01-31T00:00:00; a day that no calendar has is NULL."""
    import pyarrow as pa
    import pyarrow.compute as pc

    form = "%Y-%m-%dT%H:%M:%S"
    moments = pc.strptime(local, format=form, unit="ms", error_is_null=True)
    # The C library takes the 30th of February for the 1st of March.
    real = pc.equal(pc.utf8_slice_codeunits(pc.strftime(moments, format=form), 0, 19), local)
    return pc.if_else(pc.fill_null(real, False), moments.cast(pa.int64()), pa.scalar(None, pa.int64()))


def _where(fits: pa.Array, values: pa.Array, raw: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """The values that fit, NULL for the others."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return _told(pc.if_else(pc.fill_null(fits, False), values, pa.scalar(None, values.type)), raw)


def _told(values: pa.Array, raw: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """The values, and a mark for each that has become NULL on the way."""
    import pyarrow.compute as pc

    if values.null_count == raw.null_count:
        return values, None
    return values, pc.and_(pc.is_null(values), pc.is_valid(raw))
