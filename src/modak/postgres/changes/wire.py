"""Messages of pgoutput as one buffer of bytes, read at many places at once.

A whole batch of messages stays in the buffer in which it arrived; every later step works with arrays of positions into
it. Numbers in network order are gathered for all positions by one numpy operation. Memory: one batch, and a few
integers per message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from modak.core.errors import ModakError

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

_XID_BYTES = 4
_LONGEST_NAME = 1024


class Wire:
    """A buffer of bytes and the numbers in it; every reader takes an array of positions."""

    def __init__(self, buffer: pa.Buffer) -> None:
        self.buffer = buffer
        self._views: dict[str, npt.NDArray[Any]] = {}
        self.bytes: Bytes = np.frombuffer(buffer, np.uint8) if buffer.size else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)

    def u1(self, at: Places) -> Bytes:
        """One byte at each position."""
        return self.bytes[at]

    def i2(self, at: Places) -> npt.NDArray[np.int16]:
        """A signed number of two bytes at each position."""
        return self._numbers(">i2")[at].astype(np.int16)

    def i4(self, at: Places) -> npt.NDArray[np.int32]:
        """A signed number of four bytes at each position."""
        return self._numbers(">i4")[at].astype(np.int32)

    def u4(self, at: Places) -> Places:
        """An unsigned number of four bytes at each position, wide enough to be added to positions."""
        return self._numbers(">u4")[at].astype(np.int64)

    def i8(self, at: Places) -> Places:
        """A signed number of eight bytes at each position."""
        return self._numbers(">i8")[at].astype(np.int64)

    def block(self, at: Places, width: int) -> Bytes:
        """`width` bytes at each position, one row for each."""
        return np.asarray(self.bytes[at[:, None] + np.arange(width)])

    def text(self, at: int) -> tuple[str, int]:
        """The zero-terminated text at one position, and the position behind it."""
        text, end, _ = self.bytes[at : at + _LONGEST_NAME].tobytes().partition(b"\0")
        if not end:
            raise malformed("a name has no end")
        return text.decode(), at + len(text) + 1

    def _numbers(self, kind: str) -> npt.NDArray[Any]:
        # A view in which every byte begins a number: numpy reads unaligned numbers, and refuses those past the end.
        found = self._views.get(kind)
        if found is None:
            dtype = np.dtype(kind)
            count = max(0, len(self.bytes) - dtype.itemsize + 1)
            found = self._views[kind] = np.ndarray((count,), dtype, self.buffer if count else b"", strides=(1,))
        return found


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages in WAL order: for each its kind and where its body, behind the kind, begins and ends."""

    wire: Wire
    kinds: Bytes
    starts: Places
    ends: Places

    @classmethod
    def of_column(cls, column: pa.Array) -> Messages:
        """The messages of an Arrow binary column, without a copy."""
        wide = np.int64 if pa.types.is_large_binary(column.type) else np.int32
        _, offsets, data = column.buffers()
        edges = np.frombuffer(offsets, wide)[column.offset : column.offset + len(column) + 1].astype(np.int64)
        return cls._cut(Wire(data if data is not None else pa.py_buffer(b"")), edges)

    @classmethod
    def of_parts(cls, parts: Sequence[bytes | memoryview]) -> Messages:
        """Messages that came one by one."""
        edges = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=edges[1:])
        return cls._cut(Wire(pa.py_buffer(b"".join(parts))), edges)

    @classmethod
    def _cut(cls, wire: Wire, edges: Places) -> Messages:
        starts, ends = edges[:-1], edges[1:]
        if np.any(starts == ends):
            raise malformed("a message is empty")
        return cls(wire, wire.u1(starts), starts + 1, ends)

    def __len__(self) -> int:
        return len(self.kinds)

    def pick(self, which: Mask | Places | slice) -> Messages:
        """Some of the messages, over the same buffer."""
        return Messages(self.wire, self.kinds[which], self.starts[which], self.ends[which])

    def without_xid(self) -> Messages:
        """The messages of a stream block, which have a transaction id before the body."""
        return replace(self, starts=self.starts + _XID_BYTES)

    def column(self) -> pa.Array:
        """The messages as an Arrow binary column of their own, for a file."""
        return gathered(self.wire, self.starts - 1, self.ends - self.starts + 1)


def gathered(wire: Wire, starts: Places, lengths: Places, valid: Mask | None = None) -> pa.Array:
    """The pieces of a buffer, given in ascending order, as a binary array.

    The pieces and the gaps between them are one array over the buffer, and Arrow takes every second value of it.
    """
    count = len(starts)
    edges = np.empty(2 * count + 1, np.int32)
    edges[:-1:2] = starts
    edges[1::2] = starts + lengths
    edges[-1] = edges[-2] if count else 0
    loose = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(edges), wire.buffer])
    every_second = np.arange(0, 2 * count, 2, dtype=np.int32)
    return loose.take(pa.array(every_second, mask=None if valid is None else ~valid))


def malformed(what: str) -> ModakError:
    """The refusal of bytes that are not what the protocol says."""
    return ModakError(
        "changes.malformed",
        f"The change stream of Postgres cannot be read: {what}.",
        hint="Nothing was applied. Report it with the server's version; the table can be anchored anew.",
    )
