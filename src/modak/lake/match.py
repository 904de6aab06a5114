"""Which rows of a batch carry one of many keys: the join inside `locate`, on whole columns.

Every key column becomes a lookup from value to a small number, and the numbers of several columns are combined column
by column; rows that one column rules out are not asked for the next. Where one column alone tells all keys apart, the
others are only compared. Integers, dates and timestamps go through a table
(dense) or a binary search (sparse), everything else through Arrow's hash kernel. Memory is bounded by the keys handed
in and one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

DENSE = 1 << 26
"""The widest table: 256 MB of numbers would be the limit, four bytes each."""
_SPARSE = 32
"""A table may have so many empty places per value before a binary search is the better way."""


class KeySet:
    """Keys made ready once, to be found in many batches. All columns have the same length and no NULL."""

    def __init__(self, columns: Sequence[pa.Array]) -> None:
        self.size = len(columns[0]) if columns else 0
        if not self.size:
            return
        self._unique = _Unique.of(columns)
        if self._unique is not None:
            return
        lookups = [_lookup(column) for column in columns]
        # The column that tells most keys apart goes first: what it excludes costs nothing more.
        self._order = sorted(range(len(columns)), key=lambda at: -lookups[at].distinct)
        self._lookups = [lookups[at] for at in self._order]
        self._joint: list[Integers] = []
        codes = self._lookups[0].find(columns[self._order[0]])
        for at, lookup in zip(self._order[1:], self._lookups[1:], strict=True):
            joined = codes * lookup.distinct + lookup.find(columns[at])
            self._joint.append(Integers(joined))
            codes = self._joint[-1].places(joined)

    def find(self, columns: Sequence[pa.Array]) -> Any:
        """The rows (ascending, numpy) whose columns, in the order of the keys' columns, are one of the keys."""
        if not self.size:
            return np.empty(0, np.int64)
        if self._unique is not None:
            return self._unique.find(columns)
        codes = self._lookups[0].find(columns[self._order[0]])
        rows = np.flatnonzero(codes >= 0)
        codes = codes[rows]
        for step, (at, lookup) in enumerate(zip(self._order[1:], self._lookups[1:], strict=True)):
            if not len(rows):
                break
            found = lookup.find(columns[at].take(pa.array(rows)))
            joined = np.where(found >= 0, self._joint[step].places(codes * lookup.distinct + found), -1)
            kept = joined >= 0
            rows, codes = rows[kept], joined[kept]
        return rows


class _Unique:
    """Keys of which one integer column has every value once: a row that has such a value can only be that one key."""

    def __init__(self, leading: int, lookup: Integers, columns: Sequence[pa.Array]) -> None:
        self._leading = leading
        self._lookup = lookup
        places = lookup.find(columns[leading])
        in_order = np.empty(len(places), np.int64)
        in_order[places] = np.arange(len(places))
        self._others = {
            at: column.take(pa.array(in_order)) for at, column in enumerate(map(_storage, columns)) if at != leading
        }

    @classmethod
    def of(cls, columns: Sequence[pa.Array]) -> _Unique | None:
        """The keys in this form, if they have it."""
        if not all(map(_is_comparable, columns)):
            return None
        for at, column in enumerate(columns):
            if is_integral(column.type):
                lookup = Integers(np.asarray(integers(column)))
                if lookup.distinct == len(column):
                    return cls(at, lookup, columns)
        return None

    def find(self, columns: Sequence[pa.Array]) -> Any:
        """The rows whose columns are one of the keys."""
        places = self._lookup.find(columns[self._leading])
        rows = np.flatnonzero(places >= 0)
        for at, keys in self._others.items():
            here = _storage(columns[at]).take(pa.array(rows))
            same = pc.equal(here, keys.take(pa.array(places[rows]))).fill_null(False)
            rows = rows[np.asarray(same)]
        return rows


class Integers:
    """Places of integers among the distinct ones."""

    def __init__(self, values: Any) -> None:
        self._low, self._high = int(values.min()), int(values.max())
        span = self._high - self._low + 1
        self._table: Any = None
        if span <= min(max(_SPARSE * len(values), 1 << 16), DENSE):
            present = np.zeros(span, bool)
            present[values - self._low] = True
            self.distinct = int(np.count_nonzero(present))
            self._table = np.where(present, np.cumsum(present, dtype=np.int32) - 1, np.int32(-1))
        else:
            ordered = np.sort(values)
            self._values = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
            self.distinct = len(self._values)

    def find(self, column: pa.Array) -> Any:
        """The place of every value of a column; -1 for those that are not among them."""
        plain = integers(column)
        if plain.null_count:
            places = self.places(np.asarray(plain.fill_null(self._low)))
            return np.where(np.asarray(plain.is_null()), -1, places)
        return self.places(np.asarray(plain))

    def places(self, values: Any) -> Any:
        """The same for plain integers."""
        if not len(values):
            return np.empty(0, np.int64)
        if self._table is None:
            at = np.minimum(np.searchsorted(self._values, values), self.distinct - 1)
            return np.where(self._values[at] == values, at, -1)
        if values.min() >= self._low and values.max() <= self._high:
            return self._table[values - self._low].astype(np.int64)
        inside = np.flatnonzero((values >= self._low) & (values <= self._high))
        found = np.full(len(values), -1, np.int64)
        found[inside] = self._table[values[inside] - self._low]
        return found


class _Values:
    """Places of values of any other type among the distinct ones."""

    def __init__(self, column: pa.Array) -> None:
        self._values = pc.unique(_storage(column))
        self.distinct = len(self._values)

    def find(self, column: pa.Array) -> Any:
        """The place of every value of a column; -1 for those that are not among them."""
        found = pc.index_in(_storage(column), value_set=self._values, skip_nulls=True)
        return np.asarray(found.fill_null(-1)).astype(np.int64)


def is_cheap(columns: Sequence[pa.Array]) -> bool:
    """Whether asking for these keys costs about the same however many they are."""
    return all(is_integral(column.type) for column in columns)


def _lookup(column: pa.Array) -> Integers | _Values:
    if is_integral(column.type):
        return Integers(np.asarray(integers(column)))
    return _Values(column)


def is_integral(kind: pa.DataType) -> bool:
    """Whether values of a type are integers to compare by."""
    return bool(pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind))


def _is_comparable(column: pa.Array) -> bool:
    """Whether Arrow's equality is the one of keys; for floats it is not: NaN is a key like any other."""
    kind = _storage(column).type
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind)
    blobs = pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind)
    return bool(texts or blobs or is_integral(kind))


def integers(column: pa.Array) -> pa.Array:
    """The integers of a column of such a type."""
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    return column.cast(pa.int64())


def _storage(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column
