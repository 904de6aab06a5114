"""The values of row messages, found but not yet read: for each column where its value begins and how long it is.

The columns of a tuple follow each other without an index. So all tuples of a batch are walked together, one column a
step: the arrays of positions advance for all rows at once. Memory: a few integers per value of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from modak.postgres.changes.wire import Mask, Places, Wire, malformed

Form = Literal["binary", "text"]

_NULL, _UNCHANGED, _BINARY, _TEXT = (np.uint8(ord(kind)) for kind in "nubt")


@dataclass(frozen=True, slots=True)
class Cells:
    """One column of a batch of tuples.

    `valid` is None when every tuple has a value. `unchanged` marks TOAST values that the update did not touch and that
    Postgres therefore did not send; they are not NULL, and None means that there are none. `form` is None without any
    value.
    """

    starts: Places
    lengths: Places
    form: Form | None
    valid: Mask | None = None
    unchanged: Mask | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def whole(self, width: int) -> bool:
        """Whether every value has this many bytes."""
        same = self.lengths == width
        return bool(np.all(same if self.valid is None else same | ~self.valid))


def walk(wire: Wire, at: Places, columns: int) -> tuple[list[Cells], Places]:
    """The cells of tuples of so many columns that begin at these positions, and the positions behind the tuples."""
    if np.any(wire.i2(at) != columns):
        raise malformed("a row has another number of columns than its table")
    at = at + 2
    found = []
    for _ in range(columns):
        cells, at = _step(wire, at)
        found.append(cells)
    return found, at


def _step(wire: Wire, at: Places) -> tuple[Cells, Places]:
    kinds = wire.u1(at)
    for form, sign in (("binary", _BINARY), ("text", _TEXT)):
        if np.all(kinds == sign):
            return _all_sent(wire, at, form)  # type: ignore[arg-type]
    return _some_sent(wire, at, kinds)


def _all_sent(wire: Wire, at: Places, form: Form) -> tuple[Cells, Places]:
    lengths = wire.u4(at + 1)
    starts = at + 5
    return Cells(starts, lengths, form), starts + lengths


def _some_sent(wire: Wire, at: Places, kinds: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> tuple[Cells, Places]:
    binary, text, unchanged = kinds == _BINARY, kinds == _TEXT, kinds == _UNCHANGED
    valid = binary | text
    if not np.all(valid | unchanged | (kinds == _NULL)):
        raise malformed("a value is of no known kind")
    if np.any(binary) and np.any(text):
        raise malformed("a column comes as binary and as text")
    # A tuple can end with this cell, so that there is no length behind it to read.
    lengths = np.zeros(len(at), np.int64)
    lengths[valid] = wire.u4(at[valid] + 1)
    starts = np.where(valid, at + 5, at + 1)
    form: Form | None = "binary" if np.any(binary) else "text" if np.any(text) else None
    return Cells(starts, lengths, form, valid, unchanged if np.any(unchanged) else None), starts + lengths
