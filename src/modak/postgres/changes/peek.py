"""Changes by peeking: the server decodes what a slot has, and gives it as an Arrow stream without moving the slot.

The fastest way out for a table whose transactions are small. Rules (they were learnt by losing a row): the upper end L
is the flush position from *before* the peek; the slot may afterwards move to L if everything before L was given, else
to the end of the last transaction given, and never further. Memory: one batch of messages here; on the server the
result goes to a temporary file when it is large. The server decodes everything before it sends the first message; where
that is much, `ahead` has it decoded slice by slice, from a copy of the slot, while the slice before is read here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, LiteralString

import pyarrow as pa
import structlog
from psycopg import sql

from modak.core.errors import ModakError
from modak.postgres.arrow import UNEXPLAINED, asked_again, stream
from modak.postgres.changes.ahead import ReadAhead, copy_name
from modak.postgres.changes.batch import Piece
from modak.postgres.changes.lsn import write_lsn
from modak.postgres.changes.pgoutput import Decoder
from modak.postgres.changes.relation import TypeLookup
from modak.postgres.changes.slot import checked_name, slot_held, usable_slot
from modak.postgres.changes.wire import Messages
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn

log = structlog.get_logger()

_FUNCTIONS: dict[str, LiteralString] = {
    "peek": "pg_logical_slot_peek_binary_changes",
    "get": "pg_logical_slot_get_binary_changes",
}


@dataclass(frozen=True, slots=True)
class Feed:
    """What is read: a slot, its publications, and whether values come in binary form where they have one."""

    dsn: Dsn
    slot: str
    publications: tuple[str, ...]
    binary: bool = True


@dataclass(slots=True)
class Peek:
    """One peek. Iterate over its pieces; then `safe_lsn` says how far the slot may move once they are applied."""

    feed: Feed
    types: TypeLookup
    upto: int
    after: int = 0
    most: int = 500_000
    batch_bytes: int = 1 << 20
    ahead: bool = False
    memory_bytes: int = 64 << 20
    """What may wait here when it reads ahead."""
    messages: int = 0
    _ended: bool = False
    _frontier: int = 0
    _reading: ReadAhead | None = None

    def __iter__(self) -> Iterator[Piece]:
        decoder = Decoder(self.types, self.after)
        for column in self._columns():
            self.messages += len(column)
            piece = decoder.feed(Messages.of_column(column))
            self._frontier = max(self._frontier, piece.frontier or 0)
            yield piece
        self._ended = True

    def close(self) -> None:
        """Let go of what is read ahead."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()

    @property
    def exhausted(self) -> bool:
        """Whether everything before `upto` was given; the server stops only between transactions."""
        return self._ended and self.messages < self.most

    @property
    def safe_lsn(self) -> int:
        """How far the slot may move, once all pieces are applied; 0 is nowhere."""
        return self.upto if self.exhausted else min(self.upto, self._frontier)

    def _columns(self) -> Iterator[pa.Array]:
        try:
            self._reading = self._read_ahead() if self.ahead else None
            if self._reading is not None:
                yield from self._reading
                return
            query = self._query("peek", self.feed.slot, self.most)
            with stream(self.feed.dsn, query, batch_bytes=self.batch_bytes) as batches:
                for batch in batches:
                    yield batch.column(0)
        except ModakError as error:
            raise self._explained(error) from None
        finally:
            self.close()

    def _read_ahead(self) -> ReadAhead | None:
        slot, copy = checked_name(self.feed.slot), checked_name(copy_name(self.feed.slot))
        copying = sql.SQL("SELECT lsn::text FROM pg_catalog.pg_copy_logical_replication_slot({}, {}, true)").format(
            slot, copy
        )

        def part(messages: int) -> str:
            return self._query("get", copy, messages)

        try:
            return ReadAhead(self.feed.dsn, copying.as_string(), part, self.most, self.batch_bytes, self.memory_bytes)
        except ModakError as error:
            # No slot is free, or the copy of a session that has just ended is still there: it goes without.
            log.info("changes.not_ahead", slot=self.feed.slot, because=error.message)
            return None

    def _explained(self, error: ModakError) -> ModakError:
        """What is the matter with the slot, if it is the slot: the stream brings text only."""
        with connect(self.feed.dsn, autocommit=True, application="modak changes") as conn:
            state = usable_slot(conn, self.feed.slot)
        if error.code == UNEXPLAINED:
            error = asked_again(self.feed.dsn, self._query("peek", self.feed.slot, self.most))
        return error if state.active_pid is None else slot_held(state.name, state.active_pid)

    def _query(self, how: Literal["peek", "get"], slot: str, most: int) -> str:
        options = {
            "proto_version": "1",
            "publication_names": publication_names(self.feed.publications),
            "binary": "true" if self.feed.binary else "false",
        }
        return (
            sql.SQL("SELECT data FROM pg_catalog.{}({}, {}::pg_lsn, {}, {})")
            .format(
                sql.SQL(_FUNCTIONS[how]),
                checked_name(slot),
                write_lsn(self.upto),
                most,
                sql.SQL(", ").join(sql.Literal(word) for pair in options.items() for word in pair),
            )
            .as_string()
        )


def publication_names(names: Sequence[str]) -> str:
    """The list of publications as the option of pgoutput wants it."""
    return ",".join(sql.Identifier(name).as_string() for name in names)
