"""From sums that differ to rows by name: what the driver does with the answers of the tasks.

First the tallies of both sides are added up and compared; then the hashes of the rows in differing buckets tell which
keys differ and how; then a few of those rows are put side by side, column by column. The driver holds a tally (24 bytes
per bucket and band), the hashes of a bounded number of rows, and a sample of rows; never the rows of a band.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from modak.tables.verify.fingerprint import Numbers, Prints, Tally, column_prints
from modak.tables.verify.plan import Bands
from modak.tables.verify.report import Difference, Kind
from modak.tables.verify.shape import Shape
from modak.tables.verify.work import Answer

DRILLED_ROWS = 1_000_000
"""Rows whose hashes the driver holds at a time while it looks for those that differ."""
_SHOWN = 80

Buckets = Mapping[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Differing:
    """Keys that differ, by their hashes, and how."""

    keys: Numbers
    kinds: Any
    """A number per key: an index into KINDS."""
    heap: Any = None
    """A hash per key of what the heap has under it; 0: nothing."""

    def __len__(self) -> int:
        return len(self.keys)

    def only(self, chosen: Any) -> Differing:
        """Those that a mask chooses."""
        heap = None if self.heap is None else self.heap[chosen]
        return Differing(self.keys[chosen], self.kinds[chosen], heap)

    def first(self, count: int) -> Differing:
        """Some of them: the same number of each kind, as far as there are."""
        if len(self) <= count:
            return self
        places = [np.flatnonzero(self.kinds == kind) for kind in range(len(KINDS))]
        share = -(-count // max(1, sum(1 for some in places if len(some))))
        picked = np.concatenate([some[:share] for some in places])[:count]
        return Differing(self.keys[picked], self.kinds[picked])


KINDS: tuple[Kind, ...] = ("changed", "missing", "extra", "duplicated")


def differing_buckets(heap: Tally, cold: Tally, bands: Bands) -> list[tuple[int, int, int]]:
    """Band, bucket and rows (of both sides) of every bucket that differs."""
    compared = (band.index for band in bands.chosen if band.compared)
    return [(band, bucket, rows) for band in compared for bucket, rows in heap.differing(cold, band)]


def in_portions(buckets: Sequence[tuple[int, int, int]], most: int = DRILLED_ROWS) -> list[Buckets]:
    """Differing buckets in portions whose rows the driver can hold the hashes of; one bucket at least."""
    portions: list[dict[int, set[int]]] = []
    room = 0
    for band, bucket, rows in buckets:
        if not portions or rows > room:
            portions.append({})
            room = most
        portions[-1].setdefault(band, set()).add(bucket)
        room -= rows
    return [{band: frozenset(some) for band, some in portion.items()} for portion in portions]


def find_differing(answers: Iterable[Answer]) -> Differing:
    """Which keys differ, out of the hashes of all rows in some buckets."""
    sides: dict[str, list[tuple[Prints, Prints]]] = {"heap": [], "cold": []}
    for answer in answers:
        sides[answer.side] += answer.gathered
    heap, heap_rows = _joined(sides["heap"])
    cold, cold_rows = _joined(sides["cold"])
    keys = np.unique(np.concatenate([heap.first, cold.first]))
    in_heap, heap_sums = _sums(keys, heap.first, heap_rows)
    in_cold, cold_sums = _sums(keys, cold.first, cold_rows)
    kinds = np.full(len(keys), -1)
    kinds[(heap_sums != cold_sums).any(axis=0)] = KINDS.index("changed")
    kinds[(in_cold == 0) & (in_heap > 0)] = KINDS.index("missing")
    kinds[(in_heap == 0) & (in_cold > 0)] = KINDS.index("extra")
    kinds[(in_cold > in_heap) & (in_cold > 1)] = KINDS.index("duplicated")
    differ = kinds >= 0
    return Differing(keys[differ], kinds[differ], heap_sums[0][differ])


def side_by_side(shape: Shape, differing: Differing, answers: Iterable[Answer]) -> list[Difference]:
    """The rows of some differing keys, column by column."""
    sides: dict[str, dict[int, list[_Row]]] = {"heap": {}, "cold": {}}
    for answer in answers:
        if answer.rows is not None:
            _by_key(answer.rows, answer.copies, sides[answer.side])
    found: list[Difference] = []
    for key, number in zip(differing.keys.tolist(), differing.kinds.tolist(), strict=True):
        found += _named(shape, KINDS[number], sides["heap"].get(key, []), sides["cold"].get(key, []))
    return found


def duplicated(shape: Shape, answers: Iterable[Answer]) -> list[Difference]:
    """Keys that the lake has more than once; `shape` has the key columns only."""
    rows: dict[int, list[_Row]] = {}
    for answer in answers:
        if answer.rows is not None:
            _by_key(answer.rows, answer.copies, rows)
    found = []
    for some in rows.values():
        copies: dict[tuple[str, str], int] = {}
        for row in some:
            name = _key(shape, row)
            copies[name] = copies.get(name, 0) + 1
        # Two keys of one hash are possible, if hardly; only equal keys count.
        found += [Difference("duplicated", *name, copies=count) for name, count in copies.items() if count > 1]
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    """A row out of a sample: its values as texts and their hashes, column by column."""

    texts: Mapping[str, str | None]
    hashes: Mapping[str, int]


def _by_key(rows: pa.Table, keys: Numbers, into: dict[int, list[_Row]]) -> None:
    texts = {name: _texts(rows.column(name).combine_chunks()) for name in rows.column_names}
    hashes = {name: column_prints(rows, name).tolist() for name in rows.column_names}
    for at, key in enumerate(keys.tolist()):
        row = _Row({name: texts[name][at] for name in texts}, {name: hashes[name][at] for name in hashes})
        into.setdefault(key, []).append(row)


def _named(shape: Shape, kind: Kind, heap: Sequence[_Row], cold: Sequence[_Row]) -> list[Difference]:
    if not heap and not cold:
        return []
    key = _key(shape, (heap or cold)[0])
    if kind == "duplicated":
        return [Difference(kind, *key, copies=len(cold))]
    if kind != "changed" or not heap or not cold:
        return [Difference(kind, *key)]
    mine, theirs = heap[0], cold[0]
    return [
        Difference("changed", *key, column.name, mine.texts[column.name], theirs.texts[column.name])
        for column in shape.columns
        if mine.hashes[column.name] != theirs.hashes[column.name]
    ]


def _key(shape: Shape, row: _Row) -> tuple[str, str]:
    parts = [_said(row.texts[shape.columns[at].name]) for at in shape.pk]
    return ", ".join(parts), _said(row.texts[shape.tier_column.name])


def _said(text: str | None) -> str:
    return "NULL" if text is None else text or "''"


def _joined(parts: Sequence[tuple[Prints, Prints]]) -> tuple[Prints, Prints]:
    def whole(which: int, attribute: str) -> Numbers:
        some = [getattr(part[which], attribute) for part in parts]
        return np.concatenate(some) if some else np.zeros(0, np.uint64)

    return Prints(whole(0, "first"), whole(0, "second")), Prints(whole(1, "first"), whole(1, "second"))


def _sums(keys: Numbers, own: Numbers, rows: Prints) -> tuple[Any, Any]:
    """How many rows each key has, and the sums of their hashes."""
    at = np.searchsorted(keys, own)
    sums = np.zeros((2, len(keys)), np.uint64)
    np.add.at(sums[0], at, rows.first)
    np.add.at(sums[1], at, rows.second)
    return np.bincount(at, minlength=len(keys)), sums


def _texts(column: pa.Array) -> list[str | None]:
    """Values for people; a moment that no calendar of ours can say stays a number."""
    if isinstance(column, pa.ExtensionArray):
        return [None if value is None else str(value) for value in column.to_pylist()]
    if pa.types.is_binary(column.type):
        return [None if value is None else _short("\\x" + value.hex()) for value in column.to_pylist()]
    try:
        if not pa.types.is_list(column.type):
            return [None if text is None else _short(text) for text in column.cast(pa.string()).to_pylist()]
        return [None if value is None else _short(str(value)) for value in column.to_pylist()]
    except (pa.ArrowException, ValueError, OverflowError):
        return [str(value) if not pa.types.is_temporal(column.type) else str(value.value) for value in column]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
