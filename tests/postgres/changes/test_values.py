"""Numerics and arrays against what Python makes of them; the server's own spelling is checked by the replay tests."""

from __future__ import annotations

import struct
from decimal import Decimal, localcontext

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.core.errors import ModakError
from modak.postgres.changes.cells import Cells, Form
from modak.postgres.changes.columns import arrow_type, read_column, reads_binary
from modak.postgres.changes.wire import Wire
from modak.postgres.model import PgType

INT4 = PgType("int4", "scalar")
TEXT = PgType("text", "scalar")


def column(values: list[bytes | None], form: Form, kind: PgType) -> pa.Array:
    lengths = np.array([len(value or b"") for value in values], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64) + 8
    valid = np.array([value is not None for value in values])
    wire = Wire(pa.py_buffer(bytes(8) + b"".join(value or b"" for value in values)))
    cells = Cells(starts, lengths, form if valid.any() else None, None if valid.all() else valid)
    found = read_column(wire, cells, kind, "c")
    found.validate(full=True)
    assert found.type == arrow_type(kind)
    return found


def numeric(value: Decimal) -> bytes:
    """The binary form as Postgres writes it: no zero digits at either end."""
    sign, _, _ = value.as_tuple()
    whole, _, fraction = f"{value.copy_abs():f}".partition(".")
    whole, scale = whole.lstrip("0"), len(fraction)
    whole = whole.rjust(-(-len(whole) // 4) * 4, "0")
    fraction = fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    digits = [int((whole + fraction)[at : at + 4]) for at in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while digits and digits[0] == 0:
        digits, weight = digits[1:], weight - 1
    while digits and digits[-1] == 0:
        digits = digits[:-1]
    if not digits:
        sign, weight = 0, 0
    return struct.pack(f">HhHH{len(digits)}H", len(digits), weight, 0x4000 * sign, scale, *digits)


@st.composite
def numerics(draw: st.DrawFn) -> tuple[PgType, list[Decimal | None]]:
    precision = draw(st.integers(1, 38))
    scale = draw(st.integers(0, precision))
    limit = 10**precision - 1
    unscaled = st.one_of(st.sampled_from([0, 1, -1, limit, -limit]), st.integers(-limit, limit))
    with localcontext(prec=80):
        values = [Decimal(value).scaleb(-scale) for value in draw(st.lists(unscaled, max_size=6))]
    return PgType("numeric", "scalar", precision, scale), [*values, *draw(st.sampled_from([[], [None]]))]


@given(numerics())
def test_every_numeric_with_a_precision_is_read_exactly(case: tuple[PgType, list[Decimal | None]]) -> None:
    kind, values = case
    found = column([None if value is None else numeric(value) for value in values], "binary", kind)
    assert found.to_pylist() == values


@pytest.mark.parametrize("sign", [0xC000, 0xD000, 0xF000])
def test_nan_and_infinity_have_no_decimal(sign: int) -> None:
    with pytest.raises(ModakError) as refusal:
        column([struct.pack(">HhHH", 0, 0, sign, 0)], "binary", PgType("numeric", "scalar", 10, 2))
    assert refusal.value.code == "types.not_a_number"
    with pytest.raises(ModakError) as refusal:
        column([b"1.00", b"NaN"], "text", PgType("numeric", "scalar", 10, 2))
    assert refusal.value.code == "types.not_a_number"


def test_a_numeric_without_precision_is_text() -> None:
    free = PgType("numeric", "scalar")
    assert not reads_binary(free)
    assert column([b"1.50", None, b"NaN"], "text", free).to_pylist() == ["1.50", None, "NaN"]


def text_array(values: list[str | None]) -> bytes:
    """An array as Postgres spells it when every element is quoted."""
    escaped = [
        "NULL" if value is None else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values
    ]
    return ("{" + ",".join(escaped) + "}").encode()


def binary_array(values: list[str | None]) -> bytes:
    if not values:
        return struct.pack(">iii", 0, 0, 25)
    body = b"".join(
        struct.pack(">i", -1) if value is None else struct.pack(">i", len(value.encode())) + value.encode()
        for value in values
    )
    return struct.pack(">iiiii", 1, 0, 25, len(values), 1) + body


_words = st.text(st.sampled_from(["a", "b", '"', "\\", ",", "{", "}", " ", "é", "N"]), max_size=6)


@given(st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), _words), max_size=5)), max_size=5))
def test_lists_of_text_are_read_from_both_forms(values: list[list[str | None] | None]) -> None:
    kind = PgType("_text", "array", element=TEXT)
    for form, spelled in (("binary", binary_array), ("text", text_array)):
        found = column([None if value is None else spelled(value) for value in values], form, kind)  # type: ignore[arg-type]
        assert found.to_pylist() == values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{}", []),
        ("{1,2}", [1, 2]),
        ("{NULL}", [None]),
        ("{1,NULL,-3}", [1, None, -3]),
        ("[0:1]={5,6}", [5, 6]),
    ],
)
def test_numbers_in_text_arrays(text: str, values: list[int | None]) -> None:
    kind = PgType("_int4", "array", element=INT4)
    assert column([text.encode(), None], "text", kind).to_pylist() == [values, None]


@pytest.mark.parametrize("value", [b"{{1,2},{3,4}}", b"[0:0][1:1]={{7}}"])
def test_more_than_one_dimension_is_refused(value: bytes) -> None:
    with pytest.raises(ModakError) as refusal:
        column([b"{1}", value], "text", PgType("_int4", "array", element=INT4))
    assert refusal.value.code == "types.multidimensional"
    with pytest.raises(ModakError) as refusal:
        column(
            [struct.pack(">iiiiiiiii", 2, 0, 23, 1, 1, 1, 1, 4, 7)], "binary", PgType("_int4", "array", element=INT4)
        )
    assert refusal.value.code == "types.multidimensional"


def test_long_arrays_of_one_width_are_cut_without_walking() -> None:
    many = list(range(100_000))
    body = struct.pack(">iiiii", 1, 0, 23, len(many), 1) + b"".join(struct.pack(">ii", 4, value) for value in many)
    assert column([body], "binary", PgType("_int4", "array", element=INT4)).to_pylist() == [many]


@pytest.mark.parametrize(
    ("kind", "value", "code"),
    [
        ("timestamp", struct.pack(">q", 2**63 - 1 - 946_684_800_000_000), "types.out_of_range"),
        ("int8", b"1234", "changes.malformed"),
        ("jsonb", b"\x02{}", "changes.malformed"),
        ("text", b"\xff", "changes.malformed"),
        ("interval", bytes(16), "changes.needs_text"),
    ],
)
def test_what_cannot_be_read_is_an_error_by_name(kind: str, value: bytes, code: str) -> None:
    with pytest.raises(ModakError) as refusal:
        column([value], "binary", PgType(kind, "scalar"))
    assert refusal.value.code == code
