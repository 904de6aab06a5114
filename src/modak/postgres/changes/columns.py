"""From the cells of a column to a typed Arrow array, the same that an export of the table gives.

Postgres sends a value in binary form, when it was asked to and the type has one, else as text. Every type can be read
from text; `reads_binary` says which can be read from their binary form too. All values of a column are turned at once.
A value that the lake cannot hold stops the reading with an error that names the column: nothing is rounded, clipped or
turned into NULL. Memory: the arrays of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from modak.core.errors import ModakError
from modak.postgres.changes.arrays import Multidimensional, binary_elements, text_elements
from modak.postgres.changes.cells import Cells
from modak.postgres.changes.moments import DAY_MICROS, TooLate, dates, timestamps
from modak.postgres.changes.numeric import NotANumber, decimals
from modak.postgres.changes.wire import Mask, Wire, gathered, malformed
from modak.postgres.model import PgType

Reader = Callable[[Wire, Cells, PgType], pa.Array]

_MOST_DIGITS = 38
_DAYS_TO_2000 = 10_957
_MICROS_TO_2000 = _DAYS_TO_2000 * DAY_MICROS
_HEX = np.full(256, 255, np.uint8)
_HEX[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_UUID_DIGITS = np.array([place for place in range(36) if place not in (8, 13, 18, 23)])

_TYPES: Mapping[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int2": pa.int32(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bytea": pa.binary(),
    "uuid": pa.uuid(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}


@cache
def arrow_type(kind: PgType) -> pa.DataType:
    """The Arrow type of a Postgres type; a numeric that no decimal is sure to hold, and every rare type, is text."""
    if kind.kind == "array" and kind.element is not None and kind.element.name != "box":
        return pa.list_(pa.field("element", arrow_type(kind.element)))
    if kind.kind == "scalar" and kind.name == "numeric":
        fixed = _decimal(kind)
        return pa.decimal128(*fixed) if fixed else pa.string()
    return _TYPES.get(kind.name, pa.string()) if kind.kind == "scalar" else pa.string()


def reads_binary(kind: PgType) -> bool:
    """Whether values of the type can be read from their binary form."""
    if kind.kind == "array" and kind.element is not None:
        return kind.element.kind != "array" and reads_binary(kind.element)
    if kind.name == "numeric":
        return kind.kind == "scalar" and _decimal(kind) is not None
    return kind.kind == "enum" or (kind.kind == "scalar" and kind.name in _BINARY)


def read_column(wire: Wire, cells: Cells, kind: PgType, name: str) -> pa.Array:
    """The values of a column; what was not sent is null."""
    try:
        return _read(wire, cells, kind)
    except NotANumber:
        raise _unfit("types.not_a_number", name, "NaN or infinity, which no decimal is") from None
    except TooLate:
        raise _unfit("types.out_of_range", name, "a timestamp after the year 294246, the last of the lake's") from None
    except Multidimensional:
        raise _unfit(
            "types.multidimensional", name, "a multi-dimensional array; a lake list has one dimension"
        ) from None
    except pa.ArrowInvalid as error:
        raise malformed(f"column {name}: {error}") from error


def _unfit(code: str, name: str, what: str) -> ModakError:
    return ModakError(
        code, f"Column {name} holds {what}.", hint="Correct those rows in Postgres; docs/types.md lists every type."
    )


def _read(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    target = arrow_type(kind)
    if cells.form is None:
        return pa.nulls(len(cells), target)
    if pa.types.is_list(target):
        return _lists(wire, cells, kind)
    if cells.form == "text":
        return _of_text(wire, cells, kind, target)
    if kind.kind == "enum":
        return _strings(wire, cells, kind)
    if not reads_binary(kind):
        raise needs_text(kind)
    return _BINARY[kind.name](wire, cells, kind)


def needs_text(kind: PgType) -> ModakError:
    """Values of a type came in a binary form that is not read here; asked for as text they can be."""
    return ModakError(
        "changes.needs_text",
        f"The binary form of type {kind.name} is not read from the change stream.",
        hint="The changes are read again as text.",
        retryable=True,
    )


def _lists(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    if kind.element is None:
        raise AssertionError("only arrays become lists")
    found = binary_elements(wire, cells) if cells.form == "binary" else text_elements(wire, cells)
    values = _read(found.wire, found.cells, kind.element)
    edges = pa.py_buffer(found.edges.astype(np.int32))
    return pa.Array.from_buffers(arrow_type(kind), len(cells), [_bitmap(cells.valid), edges], children=[values])


def _bitmap(valid: Mask | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _array(kind: pa.DataType, values: npt.NDArray[np.generic], valid: Mask | None) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [_bitmap(valid), pa.py_buffer(np.ascontiguousarray(values))])


def _places(cells: Cells, width: int) -> npt.NDArray[np.int64]:
    """Where values of a fixed width are; a position of no value points to the start, where something can be read."""
    if not cells.whole(width):
        raise malformed(f"a value has not {width} bytes")
    return cells.starts if cells.valid is None else np.where(cells.valid, cells.starts, 0)


def _bools(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    return _truths(wire.u1(_places(cells, 1)) == 1, cells.valid)


def _truths(truths: Mask, valid: Mask | None) -> pa.Array:
    bits = pa.py_buffer(np.packbits(truths, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(truths), [_bitmap(valid), bits])


def _int2(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    return _array(pa.int32(), wire.i2(_places(cells, 2)).astype(np.int32), cells.valid)


def _four_bytes(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    return _array(arrow_type(kind), wire.i4(_places(cells, 4)), cells.valid)


def _eight_bytes(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    return _array(arrow_type(kind), wire.i8(_places(cells, 8)), cells.valid)


def _dates(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    raw, most = wire.i4(_places(cells, 4)), np.int32(2**31 - 1)
    days = np.where(raw == most, most, np.where(raw == -most - 1, -most, raw + np.int32(_DAYS_TO_2000)))
    return _array(pa.date32(), days, cells.valid)


def _timestamps(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    raw, most = wire.i8(_places(cells, 8)), np.int64(2**63 - 1)
    late = (raw >= most - _MICROS_TO_2000) & (raw != most)
    if np.any(late if cells.valid is None else late & cells.valid):
        raise TooLate
    micros = np.where(raw == most, most, np.where(raw == -most - 1, -most, raw + np.int64(_MICROS_TO_2000)))
    return _array(arrow_type(kind), micros, cells.valid)


def _uuids(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    return _uuids_of(wire.block(_places(cells, 16), 16), cells.valid)


def _uuids_of(values: npt.NDArray[np.uint8], valid: Mask | None) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.uuid(), _array(pa.binary(16), values, valid))


def _numerics(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    return decimals(wire, cells.starts, arrow_type(kind), cells.valid)


def _raw(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    return gathered(wire, cells.starts, cells.lengths, cells.valid)


def _strings(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    # The cast looks whether the bytes are UTF-8, which a database of encoding SQL_ASCII does not promise.
    return gathered(wire, cells.starts, cells.lengths, cells.valid).cast(pa.string())


def _padded(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    return pc.utf8_rtrim(_strings(wire, cells, kind), " ")


def _jsonb(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    valid = np.ones(len(cells), bool) if cells.valid is None else cells.valid
    if np.any(wire.u1(cells.starts[valid]) != 1):
        raise malformed("a jsonb value is of an unknown version")
    return _strings(wire, Cells(cells.starts + valid, cells.lengths - valid, "binary", cells.valid), kind)


_BINARY: Mapping[str, Reader] = {
    "bool": _bools,
    "int2": _int2,
    "int4": _four_bytes,
    "int8": _eight_bytes,
    "float4": _four_bytes,
    "float8": _eight_bytes,
    "text": _strings,
    "varchar": _strings,
    "bpchar": _padded,
    "name": _strings,
    "json": _strings,
    "jsonb": _jsonb,
    "bytea": _raw,
    "uuid": _uuids,
    "date": _dates,
    "timestamp": _timestamps,
    "timestamptz": _timestamps,
    "numeric": _numerics,
}


def _of_text(wire: Wire, cells: Cells, kind: PgType, target: pa.DataType) -> pa.Array:
    if kind.kind != "scalar":
        return _strings(wire, cells, kind)
    reader = _TEXT.get(kind.name)
    if reader is not None:
        return reader(wire, cells, kind)
    texts = _strings(wire, cells, kind)
    if pa.types.is_string(target):
        return texts
    if pa.types.is_decimal(target) and pc.any(pc.is_in(texts, pa.array(["NaN", "Infinity", "-Infinity"]))).as_py():
        raise NotANumber
    return texts.cast(target)


def _bool_texts(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    return _truths(wire.u1(_places(cells, 1)) == ord("t"), cells.valid)


def _date_texts(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    return dates(_strings(wire, cells, kind))


def _timestamp_texts(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    return timestamps(_strings(wire, cells, kind), arrow_type(kind))


def _uuid_texts(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    digits = wire.block(_places(cells, 36), 36)[:, _UUID_DIGITS]
    return _uuids_of(_unhexed(digits.reshape(-1)).reshape(-1, 16), cells.valid)


def _hex_texts(wire: Wire, cells: Cells, _: PgType) -> pa.Array:
    """Bytes written as \\x and two digits each."""
    valid = np.ones(len(cells), np.int64) if cells.valid is None else cells.valid.astype(np.int64)
    digits = gathered(wire, cells.starts + 2 * valid, cells.lengths - 2 * valid)
    _, offsets, data = digits.buffers()
    edges = np.frombuffer(offsets, np.int32)[: len(cells) + 1] // 2
    values = _unhexed(np.frombuffer(data, np.uint8)[: 2 * int(edges[-1])] if data else np.zeros(0, np.uint8))
    return pa.Array.from_buffers(
        pa.binary(), len(cells), [_bitmap(cells.valid), pa.py_buffer(edges), pa.py_buffer(values)]
    )


def _unhexed(digits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    halves = _HEX[digits]
    return np.ascontiguousarray((halves[::2] << 4) | halves[1::2])


def _masked(wire: Wire, cells: Cells, kind: PgType) -> pa.Array:
    """Addresses with their mask, which the output function leaves out where it is full and the cast to text gives."""
    texts = _strings(wire, cells, kind)
    full = pc.if_else(pc.match_substring(texts, ":"), "/128", "/32")
    return pc.binary_join_element_wise(texts, pc.if_else(pc.match_substring(texts, "/"), "", full), "")


_TEXT: Mapping[str, Reader] = {
    "bool": _bool_texts,
    "bpchar": _padded,
    "inet": _masked,
    "bytea": _hex_texts,
    "uuid": _uuid_texts,
    "date": _date_texts,
    "timestamp": _timestamp_texts,
    "timestamptz": _timestamp_texts,
}


def _decimal(kind: PgType) -> tuple[int, int] | None:
    """Precision and scale of the decimal that holds every value of a numeric, if there is one."""
    if kind.precision is None:
        return None
    scale = kind.scale or 0
    precision = max(kind.precision - min(scale, 0), scale)
    return (precision, max(scale, 0)) if precision <= _MOST_DIGITS else None
