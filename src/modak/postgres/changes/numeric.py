"""Postgres' binary form of numeric, turned into decimals for a whole column at once.

A value is a run of digits in base 10 000 with a weight. Every step adds the n-th digit of all values that have one, so
the loop is as long as the longest number and not as the column. Up to 18 decimal digits are summed in one integer, up
to 38 in two, which are put together into the 128 bits of Arrow's decimal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from modak.postgres.changes.wire import Mask, Places, Wire, malformed

_HEADER = 8
_DIGIT = 4
"""Decimal digits in one of Postgres' digits."""
_LIMB = 19
"""Decimal digits in one limb: the most that 64 bits without a sign hold."""
_NEGATIVE = 0x4000
_SPECIAL = 0xC000
_POWERS = np.array([10**power for power in range(20)], np.uint64)


class NotANumber(Exception):
    """A value is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    count: Places
    weight: Places
    sign: Places
    first: Places


def decimals(wire: Wire, starts: Places, kind: pa.DataType, valid: Mask | None) -> pa.Array:
    """The numerics at these positions as decimals of the given type, which holds each of them exactly."""
    at = starts if valid is None else starts[valid]
    numbers = _read(wire, at)
    high, low = _summed(wire, numbers, kind.scale)
    words = _words(high, low) if np.any(high) else np.stack([low, np.zeros_like(low)], axis=1)
    negative = numbers.sign == _NEGATIVE
    words[negative] = _negated(words[negative])
    if valid is None:
        return pa.Array.from_buffers(kind, len(at), [None, pa.py_buffer(words)])
    spread = np.zeros((len(starts), 2), np.uint64)
    spread[valid] = words
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(starts), [bitmap, pa.py_buffer(spread)])


def _read(wire: Wire, at: Places) -> _Numbers:
    # Count, weight (which may be negative), sign and scale, two bytes each: read together, and taken apart.
    header = wire.i8(at)
    sign = (header >> 16) & 0xFFFF
    if np.any(sign & _SPECIAL == _SPECIAL):
        raise NotANumber
    return _Numbers(header >> 48, (header << 16) >> 48, sign, at + _HEADER)


def _summed(wire: Wire, numbers: _Numbers, scale: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The absolute values in units of the last digit, as two limbs."""
    high = np.zeros(len(numbers.count), np.uint64)
    low = np.zeros(len(numbers.count), np.uint64)
    for index in range(int(numbers.count.max(initial=0))):
        rows = np.flatnonzero(numbers.count > index)
        digit = wire.i2(numbers.first[rows] + 2 * index).astype(np.uint64)
        power = _DIGIT * (numbers.weight[rows] - index) + scale
        if np.any((power < -_DIGIT) | (power >= 2 * _LIMB)):
            raise malformed("a numeric has more digits than its type")
        _add(high, low, rows, digit, power)
    return high, low


def _add(
    high: npt.NDArray[np.uint64],
    low: npt.NDArray[np.uint64],
    rows: Places,
    digit: npt.NDArray[np.uint64],
    power: Places,
) -> None:
    # Below the scale there are only zeros behind the last digit that counts.
    shrunk = digit // _POWERS[np.maximum(-power, 0)]
    power = np.maximum(power, 0)
    # A digit can lie across the border between the limbs; its upper part belongs to the high one.
    fits = _POWERS[np.clip(_LIMB - power, 0, _DIGIT)]
    upper, lower = shrunk // fits, shrunk % fits
    low[rows] += lower * _POWERS[np.minimum(power, _LIMB)]
    if np.any(upper):
        high[rows] += upper * _POWERS[np.maximum(power - _LIMB, 0)]


def _words(high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """high · 10¹⁹ + low as the low and the high 64 bits, by long multiplication in halves of 32 bits."""
    half, rest = np.uint64(32), np.uint64(0xFFFFFFFF)
    factor = np.uint64(10**_LIMB)
    a1, a0, b1, b0 = high >> half, high & rest, factor >> half, factor & rest
    middle = a1 * b0 + ((a0 * b0) >> half)
    cross = (middle & rest) + a0 * b1
    bottom = (cross << half) | ((a0 * b0) & rest)
    top = a1 * b1 + (middle >> half) + (cross >> half)
    total = bottom + low
    return np.stack([total, top + (total < low)], axis=1)


def _negated(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    low = ~words[:, 0] + np.uint64(1)
    return np.stack([low, ~words[:, 1] + (low == 0)], axis=1)
