"""From Postgres' text of a value to the lake's Arrow type: the way of delta payloads and of column defaults.

`modak.delta` holds rows as column → text, so a fold reads values here that an export would have read in binary; both
ways must give the same lake value. Whole columns at a time; only arrays with quoted elements are taken apart value by
value. Memory is bounded by the column handed in. The session that wrote the texts used our settings (UTC, ISO, hex).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modak.core.errors import ModakError
from modak.lake.decode import INT32_MAX, INT64_MAX, arrow_type, decimals, multidimensional, out_of_range
from modak.lake.types import MappedColumn

_DAY = 86_400_000_000
_LAST_DAY, _LAST_MICRO = divmod(INT64_MAX, _DAY)
_MOMENT = (
    r"^(?P<year>[0-9]+)-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})"
    r"(?:[ T](?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})(?:\.(?P<part>[0-9]{1,6}))?"
    r"(?P<zone>[+-][0-9]{2}(?::[0-9]{2}){0,2})?)?(?P<era> BC)?$"
)
_INFINITIES = pa.array(["infinity", "-infinity"])
_TRUE = pa.array(["t", "true"])
_HEX = np.zeros(256, np.uint8)
_HEX[np.frombuffer(b"0123456789", np.uint8)] = np.arange(10)
_HEX[np.frombuffer(b"abcdef", np.uint8)] = np.arange(10, 16)
_HEX[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
_UUID_DIGITS = np.array([at for at in range(36) if at not in (8, 13, 18, 23)])


def parse_text(mapped: MappedColumn, texts: pa.Array) -> pa.Array:
    """The lake values of a column, from their Postgres texts."""
    return _parse(texts, mapped.decode, arrow_type(mapped.column.type), mapped.column.name)


def initial_default(mapped: MappedColumn, text: str) -> str | None:
    """The Iceberg JSON value of a constant default, from its Postgres text; none when old rows must be back-filled."""
    if mapped.column.element is not None:
        return None
    value = parse_text(mapped, pa.array([text]))
    kind = mapped.column.type
    if kind in {"date", "timestamp", "timestamptz"}:
        return _moment_json(value, kind)
    plain: Any = value[0].as_py()
    if kind in {"float", "double"} and not np.isfinite(plain):
        return None
    if kind == "binary":
        plain = plain.hex().upper()
    elif kind == "uuid" or kind.startswith("decimal"):
        plain = f"{plain:f}" if kind != "uuid" else str(plain)
    return json.dumps(plain, ensure_ascii=False)


def _moment_json(value: pa.Array, kind: str) -> str | None:
    first, last = (-719_162, 2_932_896) if kind == "date" else (-719_162 * _DAY, 2_932_897 * _DAY - 1)
    if not first <= value.cast(pa.int32() if kind == "date" else pa.int64())[0].as_py() <= last:
        # Not every reader understands the JSON form of years outside 1 to 9999.
        return None
    text = value[0].as_py().isoformat()
    return json.dumps(text)


def _parse(texts: pa.Array, how: str, target: pa.DataType, name: str) -> pa.Array:
    if how.startswith("list:"):
        return _lists(texts, how[5:], target, name)
    match how:
        case "decimal" | "checked_decimal" | "scaled":
            return decimals(texts, target, name, checked=how == "checked_decimal")
        case "date" | "timestamp":
            return _moments(texts, target, name)
        case "blanks":
            return pc.ascii_rtrim(texts, " ")
        case "mask":
            full = pc.if_else(pc.match_substring(texts, ":"), "/128", "/32")
            bare = pc.invert(pc.match_substring(texts, "/"))
            return pc.if_else(bare, pc.binary_join_element_wise(texts, full, ""), texts)
        case _:
            return _plain(texts, target, name)


def _plain(texts: pa.Array, target: pa.DataType, name: str) -> pa.Array:
    if pa.types.is_boolean(target):
        return pc.if_else(pc.is_valid(texts), pc.is_in(texts, value_set=_TRUE), pa.scalar(None, pa.bool_()))
    if pa.types.is_binary(target):
        return _bytes(texts)
    if target == pa.uuid():
        return _uuids(texts, name)
    try:
        return texts.cast(target)
    except pa.ArrowInvalid as error:
        raise _malformed(name, str(target)) from error


def _moments(texts: pa.Array, target: pa.DataType, name: str) -> pa.Array:
    try:
        # Arrow reads years of four digits, ten times as fast; it refuses infinities, BC and later years as a whole.
        return texts.cast(target)
    except pa.ArrowInvalid:
        return _odd_moments(texts, target, name)


def _odd_moments(texts: pa.Array, target: pa.DataType, name: str) -> pa.Array:
    dates = pa.types.is_date(target)
    infinite = pc.is_in(texts, value_set=_INFINITIES)
    absent = np.asarray(texts.is_null())
    endless = np.asarray(infinite)
    plain = pc.if_else(pc.or_(infinite, texts.is_null()), "1970-01-01", texts)
    fields = pc.extract_regex(plain, _MOMENT)
    if fields.null_count:
        raise _malformed(name, "date or timestamp")
    years = _numbers(fields, "year")
    years = np.where(np.asarray(pc.equal(fields.field("era"), " BC")), 1 - years, years)
    days = _days(years, _numbers(fields, "month"), _numbers(fields, "day"))
    if dates:
        values = days
        limit = INT32_MAX
    else:
        clock = (_numbers(fields, "hour") * 60 + _numbers(fields, "minute")) * 60 + _numbers(fields, "second")
        clock = clock * 1_000_000 + np.asarray(pc.utf8_rpad(fields.field("part"), 6, "0").cast(pa.int64()))
        clock -= _zones(fields.field("zone")) * 1_000_000
        days, clock = days + clock // _DAY, clock % _DAY
        if np.any((days > _LAST_DAY) | ((days == _LAST_DAY) & (clock >= _LAST_MICRO))):
            raise out_of_range(name, "a timestamp after the year 294246")
        values = days * _DAY + clock
        limit = INT64_MAX
    if endless.any():
        positive = np.asarray(pc.fill_null(pc.equal(texts, "infinity"), False))
        values = np.where(endless, np.where(positive, limit, -limit), values)
    kind = pa.int32() if dates else pa.int64()
    return pa.array(values.astype(np.int32) if dates else values, kind, mask=absent).cast(target)


def _numbers(fields: pa.StructArray, part: str) -> Any:
    texts = fields.field(part)
    return np.asarray(pc.if_else(pc.equal(texts, ""), "0", texts).cast(pa.int64()))


def _zones(texts: pa.Array) -> Any:
    """Seconds east of UTC."""
    if not pc.any(pc.invert(pc.is_in(texts, value_set=pa.array(["", "+00"])))).as_py():
        return np.zeros(len(texts), np.int64)
    known = pc.if_else(pc.equal(texts, ""), "+00", texts)
    padded = pc.utf8_slice_codeunits(pc.binary_join_element_wise(known, ":00:00", ""), 0, 9)
    hours, minutes, seconds = (
        np.asarray(pc.utf8_slice_codeunits(padded, at, at + 2).cast(pa.int64())) for at in (1, 4, 7)
    )
    sign = np.where(np.asarray(pc.starts_with(padded, "-")), -1, 1)
    return sign * ((hours * 60 + minutes) * 60 + seconds)


def _days(years: Any, months: Any, days: Any) -> Any:
    """Days since 1970 in the proleptic Gregorian calendar; a year that begins in March has its leap day last."""
    shifted = years - (months <= 2)
    era, of_era = np.divmod(shifted, 400)
    of_year = (153 * ((months + 9) % 12) + 2) // 5 + days - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _bytes(texts: pa.Array) -> pa.Array:
    digits = pa.concat_arrays([pc.utf8_slice_codeunits(pc.fill_null(texts, "\\x"), 2)])
    offsets = np.frombuffer(digits.buffers()[1], np.int32)[digits.offset : digits.offset + len(digits) + 1]
    data = digits.buffers()[2]
    nibbles = _HEX[np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]] if data else _HEX[:0]
    joined = (nibbles[0::2] << 4) | nibbles[1::2]
    halves = ((offsets - offsets[0]) // 2).astype(np.int32)
    plain = pa.Array.from_buffers(pa.binary(), len(digits), [None, pa.py_buffer(halves), pa.py_buffer(joined)])
    return pc.if_else(texts.is_valid(), plain, pa.scalar(None, pa.binary())) if texts.null_count else plain


def _uuids(texts: pa.Array, name: str) -> pa.Array:
    filled = pa.concat_arrays([pc.fill_null(texts, "0" * 36)])
    if pc.any(pc.not_equal(pc.binary_length(filled), 36)).as_py():
        raise _malformed(name, "uuid")
    if not len(filled):
        return pa.array([], pa.uuid())
    start = 36 * filled.offset
    digits = np.frombuffer(filled.buffers()[2], np.uint8)[start : start + 36 * len(filled)].reshape(-1, 36)
    nibbles = _HEX[digits[:, _UUID_DIGITS]]
    joined = np.ascontiguousarray((nibbles[:, 0::2] << 4) | nibbles[:, 1::2])
    plain = pa.Array.from_buffers(pa.binary(16), len(filled), [None, pa.py_buffer(joined)])
    if texts.null_count:
        plain = pc.if_else(texts.is_valid(), plain, pa.scalar(None, pa.binary(16)))
    return pa.ExtensionArray.from_storage(pa.uuid(), plain)


def _lists(texts: pa.Array, how: str, target: pa.DataType, name: str) -> pa.Array:
    # Lower bounds other than 1 stand before the braces ([0:2]={1,2,3}) and are not kept.
    bare = pc.replace_substring_regex(texts, r"^(?:\[[-+0-9]+:[-+0-9]+\])+=", "")
    if pc.any(pc.starts_with(bare, "{{")).as_py():
        raise multidimensional(name)
    if pc.any(pc.match_substring(bare, '"')).as_py():
        split = pa.array(
            [None if text is None else _elements(text) for text in bare.to_pylist()], pa.list_(pa.string())
        )
    else:
        inner = pc.utf8_slice_codeunits(bare, 1, -1)
        parts = pc.split_pattern(inner, ",")
        empty = pc.equal(inner, "")
        if pc.any(empty).as_py():
            parts = pc.if_else(empty, pa.scalar([], pa.list_(pa.string())), parts)
        # An element spelled NULL that is a text would stand in quotes.
        words = pc.if_else(pc.equal(parts.values, "NULL"), pa.scalar(None, pa.string()), parts.values)
        split = _with_elements(parts, words, pa.list_(pa.string()))
    return _with_elements(split, _parse(split.values, how, target.value_type, name), target)


def _with_elements(lists: pa.Array, elements: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(
        kind, len(lists), lists.buffers()[:2], lists.null_count, lists.offset, children=[elements]
    )


def _elements(text: str) -> list[str | None]:
    """The elements of one array literal; a backslash in quotes takes the next character as it is."""
    found: list[str | None] = []
    at = 1
    while text[at] != "}":
        if text[at] == '"':
            at += 1
            letters: list[str] = []
            while text[at] != '"':
                at += text[at] == "\\"
                letters.append(text[at])
                at += 1
            found.append("".join(letters))
            at += 1
        else:
            end = at
            while text[end] not in ",}":
                end += 1
            found.append(None if text[at:end] == "NULL" else text[at:end])
            at = end
        if text[at] == ",":
            at += 1
    return found


def _malformed(name: str, what: str) -> ModakError:
    return ModakError(
        "types.malformed",
        f"Column {name} has a text that is not a {what}.",
        hint="Texts come from sessions with UTC, ISO dates and hex bytea; was modak.delta written by hand?",
    )
