"""Puts streamed and prepared transactions in the order of their commits, and hands everything to the decoder.

Plain transactions come whole, one after the other, and pass through. A streamed one comes in blocks between others and
lasts if it commits; a prepared one comes whole and lasts if it is committed later. Both wait in a spool. Memory: what
the spools keep, and one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from modak.postgres.changes.batch import Piece
from modak.postgres.changes.pgoutput import EPOCH, Decoder, Transaction
from modak.postgres.changes.spool import Spool, Spools
from modak.postgres.changes.wire import Messages, malformed

_ORDERING = np.zeros(256, bool)
_ORDERING[np.frombuffer(b"SEcAbPKrp", np.uint8)] = True


class _Body:
    """The fields of one message, read one after the other."""

    def __init__(self, messages: Messages, at: int) -> None:
        self._bytes = messages.wire.bytes[int(messages.starts[at]) : int(messages.ends[at])].tobytes()
        self._at = 0

    def number(self, width: int) -> int:
        if self._at + width > len(self._bytes):
            raise malformed("a message ends too early")
        self._at += width
        return int.from_bytes(self._bytes[self._at - width : self._at], "big")

    def text(self) -> str:
        return self._bytes[self._at :].partition(b"\0")[0].decode()


@dataclass(slots=True)
class Transactions:
    """The decoder of a session that may send transactions in any order; only the spools touch a disk."""

    decoder: Decoder
    spools: Spools
    _block: Spool | None = None
    """Where messages go while the block of a streamed or prepared transaction is open."""
    _prepared: dict[str, int] = field(default_factory=dict)

    @property
    def held_lsn(self) -> int | None:
        """Where the oldest prepared transaction that waits was prepared: the slot must not move past it."""
        return min(self._prepared.values(), default=None)

    def feed(self, messages: Messages) -> Iterator[Piece]:
        """Decode the next messages; pieces come in the order of commits."""
        begin = 0
        for at in np.flatnonzero(_ORDERING[messages.kinds]).tolist():
            yield from self._between(messages, begin, at)
            yield from _STEPS[chr(messages.kinds[at])](self, _Body(messages, at))
            begin = at + 1
        yield from self._between(messages, begin, len(messages))
        self.spools.settle()

    def _between(self, messages: Messages, begin: int, end: int) -> Iterator[Piece]:
        if begin == end:
            return
        some = messages.pick(slice(begin, end))
        if self._block is None:
            yield self.decoder.feed(some)
            return
        self._block.add(some)
        if not self._block.streamed:
            # What a prepared transaction announces holds for others at once; a streamed one speaks for itself. Nobody
            # can alter a table while either has changed it, so the two never disagree.
            self.decoder.announce(some)

    def _stream_start(self, body: _Body) -> Iterator[Piece]:
        self._block = self.spools.open(_stream_key(body.number(4)), streamed=True)
        return iter(())

    def _block_end(self, _: _Body) -> Iterator[Piece]:
        self._block = None
        return iter(())

    def _stream_abort(self, body: _Body) -> Iterator[Piece]:
        xid, sub = body.number(4), body.number(4)
        if xid == sub:
            self.spools.discard(_stream_key(xid))
        else:
            spool = self.spools.known(_stream_key(xid))
            if spool is not None:
                spool.abort(sub)
        return iter(())

    def _stream_commit(self, body: _Body) -> Iterator[Piece]:
        xid, _ = body.number(4), body.number(1)
        commit_lsn, end_lsn, time = (body.number(8) for _ in range(3))
        return self._replay(_stream_key(xid), Transaction(commit_lsn, end_lsn, _signed(time) + EPOCH, xid))

    def _begin_prepare(self, body: _Body) -> Iterator[Piece]:
        prepare_lsn, _, _, xid = body.number(8), body.number(8), body.number(8), body.number(4)
        key = _prepared_key(xid, body.text())
        self._prepared[key] = prepare_lsn
        self._block = self.spools.open(key, streamed=False)
        return iter(())

    def _stream_prepare(self, body: _Body) -> Iterator[Piece]:
        _, prepare_lsn, _, _, xid = body.number(1), body.number(8), body.number(8), body.number(8), body.number(4)
        key = _prepared_key(xid, body.text())
        self._prepared[key] = prepare_lsn
        self.spools.open(_stream_key(xid), streamed=True)
        self.spools.rename(_stream_key(xid), key)
        return iter(())

    def _commit_prepared(self, body: _Body) -> Iterator[Piece]:
        _, commit_lsn, end_lsn, time, xid = (body.number(width) for width in (1, 8, 8, 8, 4))
        key = _prepared_key(xid, body.text())
        if self._prepared.pop(key, None) is None:
            raise malformed("a prepared transaction is committed that was never sent")
        return self._replay(key, Transaction(commit_lsn, end_lsn, _signed(time) + EPOCH, xid))

    def _rollback_prepared(self, body: _Body) -> Iterator[Piece]:
        *_, xid = (body.number(width) for width in (1, 8, 8, 8, 8, 4))
        key = _prepared_key(xid, body.text())
        self._prepared.pop(key, None)
        self.spools.discard(key)
        return iter(())

    def _replay(self, key: str, transaction: Transaction) -> Iterator[Piece]:
        spool = self.spools.known(key)
        if spool is not None:
            for messages in spool.messages():
                yield self.decoder.feed(messages, within=transaction)
            self.spools.discard(key)
        yield self.decoder.finish(transaction)


def _stream_key(xid: int) -> str:
    return f"stream {xid}"


def _prepared_key(xid: int, gid: str) -> str:
    return f"prepared {xid} {gid}"


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


_STEPS: dict[str, Callable[[Transactions, _Body], Iterator[Piece]]] = {
    "S": Transactions._stream_start,
    "E": Transactions._block_end,
    "A": Transactions._stream_abort,
    "c": Transactions._stream_commit,
    "b": Transactions._begin_prepare,
    "P": Transactions._block_end,
    "p": Transactions._stream_prepare,
    "K": Transactions._commit_prepared,
    "r": Transactions._rollback_prepared,
}
