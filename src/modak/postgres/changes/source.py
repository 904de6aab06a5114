"""The changes of a slot, by peeking or by streaming, whichever suits the slot at the moment.

Peeking is faster per change, but reads the WAL since `restart_lsn` anew every time, and stops only between
transactions. So a writer that stays open for long or a large transaction turns the source to streaming, and it turns
back when both are gone. What comes out is the same. Nothing is confirmed to the server by itself: the reader applies
the pieces, commits, and then confirms. Memory: that of `peek.py` or of `stream.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psycopg

from modak.core.errors import ModakError, Refused
from modak.postgres.changes.batch import Changes, Piece
from modak.postgres.changes.lookup import CatalogTypes
from modak.postgres.changes.peek import Feed, Peek
from modak.postgres.changes.publication import find_publications
from modak.postgres.changes.slot import SlotState, advance, evict, slot_held, slot_state, usable_slot
from modak.postgres.changes.stream import ReplicationStream
from modak.postgres.connect import connect

Way = Literal["peek", "stream"]

_LETTING_GO = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stream, and how much memory the source may take."""

    reread_bytes: int = 64 << 20
    peek_messages: int = 500_000
    memory_bytes: int = 64 << 20
    batch_bytes: int = 1 << 20
    ahead_bytes: int = 16 << 20
    """From so much WAL on it is read ahead: the server decodes one part while the one before is read."""


def choose(now: Way, state: SlotState, largest: int, limits: Limits) -> Way:
    """How to read next: `largest` is the row count of the largest transaction in what was read last."""
    if state.reread_bytes > limits.reread_bytes or largest > limits.peek_messages:
        return "stream"
    # Half the limit, so that a slot near it does not change its reader at every turn.
    return "stream" if now == "stream" and state.reread_bytes > limits.reread_bytes // 2 else "peek"


class ChangeSource:
    """Reads a slot. Use it in a `with`; after an error, `reset` and read again from what was committed."""

    def __init__(self, feed: Feed, spool_folder: Path, limits: Limits | None = None) -> None:
        self._feed = feed
        self._folder = spool_folder
        self._limits = limits or Limits()
        self._types = CatalogTypes(self._connection)
        self._stream: ReplicationStream | None = None
        self._marks: Mapping[str, str] = {}
        self._largest = 0
        self._given = False
        self._peek: Peek | None = None
        self.way: Way = "peek"

    def __enter__(self) -> ChangeSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the slot."""
        self.reset()

    @property
    def safe_lsn(self) -> int:
        """How far may be confirmed once everything that was given is committed; 0 is nowhere."""
        now = self._stream or self._peek
        return 0 if now is None else now.safe_lsn

    def reset(self) -> None:
        """Forget what was read and not confirmed; the next read gives it again."""
        peek, self._peek, self._given = self._peek, None, False
        if peek is not None:
            peek.close()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._wait_until_free()

    def read(self, after: int, seconds: float, marks: Mapping[str, str] | None = None) -> Iterator[Piece]:
        """Pieces of transactions that committed after the position `after`, up to what is flushed now.

        Stops when all of that was given or the time is over; whoever has enough may stop earlier, behind a piece that
        leaves no transaction unfinished. `after` is the end LSN of the last transaction that was committed. Before the
        next read, what was given is committed, or dropped by `reset`. `marks` are those of the publications when the
        slot was made; without them, those that the first read finds.
        """
        with self._connection() as conn:
            state = usable_slot(conn, self._feed.slot)
            self._require_publications(conn, marks)
        self.way, self._largest = choose(self.way, state, self._largest, self._limits), 0
        while True:
            try:
                yield from self._pieces(after, state, seconds)
            except ModakError as error:
                given = self._given
                self.reset()
                if error.code != "changes.needs_text" or not self._feed.binary:
                    raise
                self._feed = replace(self._feed, binary=False)
                if given:
                    raise
            else:
                return

    def confirm(self, lsn: int) -> None:
        """Let the server forget the WAL before a position, or before `safe_lsn` if that comes first."""
        lsn = min(lsn, self.safe_lsn)
        if self._stream is not None:
            self._stream.confirm(lsn)
        elif lsn:
            with self._connection() as conn:
                advance(conn, self._feed.slot, lsn)

    def _require_publications(self, conn: psycopg.Connection[Any], marks: Mapping[str, str] | None) -> None:
        """The server gives no changes, and no error, for a table that was not published when they were made."""
        found = {name: each.mark for name, each in find_publications(conn, self._feed.publications).items()}
        known = self._marks = marks or self._marks or found
        lost = [name for name in self._feed.publications if name not in found or found[name] != known.get(name)]
        if lost:
            raise Refused(
                "changes.publication_lost",
                f"The publication {lost[0]} is gone, or it was changed or made anew.",
                hint="Changes made meanwhile may not be in the stream: anchor the tables anew.",
            )

    def _pieces(self, after: int, state: SlotState, seconds: float) -> Iterator[Piece]:
        upto = state.flush_lsn
        if self.way == "peek":
            self.reset()
            limits = self._limits
            self._peek = Peek(
                self._feed,
                self._types,
                upto,
                after,
                limits.peek_messages,
                limits.batch_bytes,
                # A copy would not know of transactions that wait for their second phase.
                ahead=upto - max(after, state.confirmed_lsn or 0) > limits.ahead_bytes and not state.two_phase,
                memory_bytes=limits.memory_bytes,
            )
            pieces = iter(self._peek)
        else:
            if self._stream is None:
                self.reset()
                self._stream = self._opened(after)
            pieces = self._stream.read(upto, seconds)
        for piece in pieces:
            yield self._noted(piece)

    def _opened(self, after: int) -> ReplicationStream:
        limits = self._limits
        try:
            return ReplicationStream(
                self._feed,
                self._types,
                self._folder,
                after=after,
                memory_bytes=limits.memory_bytes,
                batch_bytes=limits.batch_bytes,
            )
        except ModakError as error:
            if error.code != "postgres.busy":
                raise
            with self._connection() as conn:
                state = slot_state(conn, self._feed.slot)
            if state is None or state.active_pid is None:
                raise
            raise slot_held(state.name, state.active_pid) from None

    def _noted(self, piece: Piece) -> Piece:
        self._given = self._given or bool(piece.items)
        headers = [item.header for item in piece.items if isinstance(item, Changes)]
        last = max((header["position"][-1].as_py() for header in headers if header.num_rows), default=-1)
        self._largest = max(self._largest, last + 1)
        return piece

    def _connection(self) -> psycopg.Connection[Any]:
        return connect(self._feed.dsn, autocommit=True, application="modak changes")

    def _wait_until_free(self) -> None:
        """A walsender needs a moment to see that its client has gone."""
        deadline = time.monotonic() + _LETTING_GO
        with self._connection() as conn:
            while (state := slot_state(conn, self._feed.slot)) is not None and state.active_pid is not None:
                if time.monotonic() >= deadline:
                    evict(conn, self._feed.slot)
                    return
                time.sleep(0.02)
