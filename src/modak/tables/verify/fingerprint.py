"""The fingerprint of a row: 128 bits over every column, the same whether it came from the heap, a file or the delta.

Both sides of a comparison hand in batches of one Arrow schema. A value becomes one or two 64-bit lanes without loss
(texts, bytes and lists: a hash), a row two independent hashes of its lanes. NULL differs from '', 0 and an empty list;
every NaN is the same NaN; −0.0 and 0.0 are different values, as they are different texts. A step of the hash is a
bijection, so two rows that differ in one number never meet. `Tally` adds fingerprints up per band and bucket of keys:
sums do not depend on order, and rows that differ do not cancel. Memory: a few numbers per row of a batch, and for a
tally 24 bytes per bucket of each band that the task has seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modak.spark.hashing import hash_bytes

BUCKETS = 1024
"""Buckets of keys in a band; only those whose sums differ are looked into."""

_BLOCK = 16_384
_SHIFT = np.uint64(32)
_TOP = np.uint64(54)
_FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))
_STARTS = (np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344))
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_POSITION = np.uint64(0xA0761D6478BD642F)

Numbers = Any
"""A numpy array of uint64."""


@dataclass(frozen=True, slots=True)
class Prints:
    """Two independent hashes for every row of a batch."""

    first: Numbers
    second: Numbers

    @property
    def buckets(self) -> Any:
        """The bucket of every row, when these are the hashes of keys."""
        return (self.first >> _TOP).astype(np.int64)

    def __getitem__(self, rows: Any) -> Prints:
        return Prints(self.first[rows], self.second[rows])


def prints(arrays: Sequence[pa.Array]) -> Prints:
    """The fingerprints of rows, given as columns."""
    lanes = _lanes(arrays)
    size = len(arrays[0])
    return Prints(*(_combined(lanes, size, start, factor) for start, factor in zip(_STARTS, _FACTORS, strict=True)))


def _combined(lanes: Sequence[Numbers], size: int, start: Any, factor: Any) -> Numbers:
    out = np.full(size, start, np.uint64)
    rest = np.empty(min(size, _BLOCK), np.uint64)
    # In blocks that stay in the processor's cache.
    for at in range(0, size, _BLOCK):
        acc = out[at : at + _BLOCK]
        high = rest[: len(acc)]
        for lane in lanes:
            np.bitwise_xor(acc, lane[at : at + _BLOCK], out=acc)
            np.multiply(acc, factor, out=acc)
            np.right_shift(acc, _SHIFT, out=high)
            np.bitwise_xor(acc, high, out=acc)
        _finish(acc, high)
    return out


def _finish(acc: Numbers, high: Numbers) -> None:
    """Spread every bit over the whole word (the finalizer of splitmix64), in place."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1]), (31, None)):
        np.right_shift(acc, np.uint64(shift), out=high)
        np.bitwise_xor(acc, high, out=acc)
        if factor is not None:
            np.multiply(acc, factor, out=acc)


def _lanes(arrays: Sequence[pa.Array]) -> list[Numbers]:
    """Columns as words of 64 bits, and which values are NULL as words of their own."""
    size = len(arrays[0])
    lanes: list[Numbers] = []
    texts = [_as_bytes(array) for array in arrays if _is_text(array.type)]
    hashes = iter(hash_bytes(texts))
    absent: dict[int, Numbers] = {}
    for at, array in enumerate(arrays):
        valid = np.asarray(array.is_valid()) if array.null_count else None
        if valid is not None:
            word = absent.setdefault(at // 64, np.zeros(size, np.uint64))
            word |= (~valid).astype(np.uint64) << np.uint64(at % 64)
        words = [next(hashes)] if _is_text(array.type) else _words(array)
        lanes += words if valid is None else [np.where(valid, word, np.uint64(0)) for word in words]
    # A batch without NULLs must give the same as one with them.
    return [*lanes, *(absent.get(at, np.zeros(size, np.uint64)) for at in range((len(arrays) + 63) // 64))]


def _words(array: pa.Array) -> list[Numbers]:
    kind = array.type
    if pa.types.is_list(kind):
        return [_list_hash(array)]
    if isinstance(array, pa.ExtensionArray):
        array, kind = array.storage, array.storage.type
    if pa.types.is_decimal128(kind) or pa.types.is_fixed_size_binary(kind):
        pairs = np.frombuffer(array.buffers()[1], np.uint64)[2 * array.offset : 2 * (array.offset + len(array))]
        return [pairs[0::2], pairs[1::2]]
    if pa.types.is_boolean(kind):
        return [_plain(array.cast(pa.uint8())).astype(np.uint64)]
    if pa.types.is_date32(kind):
        array = array.cast(pa.int32())
    elif pa.types.is_timestamp(kind):
        array = array.cast(pa.int64())
    values = _plain(array)
    if values.dtype.kind == "f":
        odd = np.isnan(values)
        if odd.any():
            values = np.where(odd, values.dtype.type(np.nan), values)
        values = values.view(f"i{values.dtype.itemsize}")
    return [values.astype(np.int64, copy=False).view(np.uint64)]


def _plain(array: pa.Array) -> Any:
    """The values of a fixed-width column, whatever lies under its NULLs."""
    if not array.null_count:
        return np.asarray(array)
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)]


def _list_hash(array: pa.Array) -> Numbers:
    """One word for a list: its elements with their places, and its length."""
    offsets = np.asarray(array.offsets).astype(np.int64)
    elements = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    offsets = offsets - offsets[0]
    lengths = np.diff(offsets)
    own = prints([elements]).first if len(elements) else np.zeros(0, np.uint64)
    places = np.arange(len(elements)) - np.repeat(offsets[:-1], lengths)
    own = own ^ ((places.astype(np.uint64) + np.uint64(1)) * _POSITION)
    _finish(own, np.empty_like(own))
    running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(own, dtype=np.uint64)])
    return running[offsets[1:]] - running[offsets[:-1]] + lengths.astype(np.uint64)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _as_bytes(array: pa.Array) -> pa.Array:
    return array if pa.types.is_binary(array.type) else array.cast(pa.binary())


def column_prints(table: pa.Table, name: str) -> Numbers:
    """A hash for every value of one column, to tell which columns of two rows differ."""
    column = table.column(name).combine_chunks()
    return prints([column]).first if len(column) else np.zeros(0, np.uint64)


def axis_values(keys: pa.Array) -> Any:
    """A tier-key column on its int64 axis; a NULL is the lowest value, which no table allows."""
    lowest = np.iinfo(np.int64).min
    if pa.types.is_date32(keys.type):
        keys = keys.cast(pa.int32())
    return np.asarray(pc.fill_null(keys.cast(pa.int64()), lowest))


@dataclass(slots=True)
class Tally:
    """Rows and sums of both hashes, per band and bucket."""

    bands: dict[int, Numbers] = field(default_factory=dict)

    def add(self, bands: Any, keys: Prints, rows: Prints) -> None:
        """Count rows of a batch; `bands` is one number, or one per row."""
        if isinstance(bands, int):
            self._add(bands, keys, rows)
            return
        for band in np.unique(bands):
            here = np.flatnonzero(bands == band)
            self._add(int(band), keys[here], rows[here])

    def merge(self, other: Tally) -> None:
        """Add what another task has counted."""
        for band, sums in other.bands.items():
            self.bands[band] = self.bands[band] + sums if band in self.bands else sums

    def rows(self, band: int) -> int:
        """How many rows a band has."""
        sums = self.bands.get(band)
        return 0 if sums is None else int(sums[0].sum())

    def differing(self, other: Tally, band: int) -> Iterator[tuple[int, int]]:
        """The buckets in which a band is not the same here and there, with the rows that both have in them."""
        empty = np.zeros((3, BUCKETS), np.uint64)
        mine, theirs = self.bands.get(band, empty), other.bands.get(band, empty)
        for bucket in np.flatnonzero(np.any(mine != theirs, axis=0)):
            yield int(bucket), int(mine[0, bucket] + theirs[0, bucket])

    def _add(self, band: int, keys: Prints, rows: Prints) -> None:
        if not len(keys.first):
            return
        sums = self.bands.setdefault(band, np.zeros((3, BUCKETS), np.uint64))
        buckets = keys.buckets
        sums[0] += np.bincount(buckets, minlength=BUCKETS).astype(np.uint64)
        np.add.at(sums[1], buckets, rows.first)
        np.add.at(sums[2], buckets, rows.second)
