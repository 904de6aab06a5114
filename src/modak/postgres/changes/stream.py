"""Changes by streaming replication: one connection on which the server sends what it decodes, as it decodes it.

For tables with large transactions or with writers that stay open for long, where every peek would read the same WAL
again. The server sends large transactions while they run; those wait in spools until they commit. Memory: one batch of
messages, and what the spools may keep.
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq, sql

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.postgres.changes.batch import Piece
from modak.postgres.changes.lsn import write_lsn
from modak.postgres.changes.peek import Feed, publication_names
from modak.postgres.changes.pgoutput import EPOCH, Decoder
from modak.postgres.changes.relation import TypeLookup
from modak.postgres.changes.slot import checked_name, replication_connection
from modak.postgres.changes.spool import Spools
from modak.postgres.changes.transactions import Transactions
from modak.postgres.changes.wire import Messages
from modak.postgres.connect import by_state, translate

_DATA, _KEEPALIVE = ord("w"), ord("k")
_DATA_HEADER = 25
_POSITION = struct.Struct(">xQ8xB")
_STATUS = struct.Struct(">cQQQqB")
_STATUS_SECONDS = 10.0
_LINGER = 0.01
_PROTOCOLS = ((160_000, 4), (150_000, 3), (140_000, 2))


class ReplicationStream:
    """An open stream of a slot. Nobody else can read from the slot until it is closed."""

    def __init__(
        self,
        feed: Feed,
        types: TypeLookup,
        spool_folder: Path,
        *,
        after: int = 0,
        memory_bytes: int = 64 << 20,
        batch_bytes: int = 1 << 20,
    ) -> None:
        self._feed = feed
        self._batch_bytes = batch_bytes
        self._confirmed = 0
        self._safe = 0
        self._said = 0.0
        self._pieces: Iterator[Piece] = iter(())
        with ExitStack() as stack:
            conn = stack.enter_context(replication_connection(feed.dsn))
            self._conn: pq.abc.PGconn = conn.pgconn
            self._start(conn)
            # Whoever has the slot has the folder: what lies there is of a session that is over.
            spools = Spools(spool_folder, memory_bytes)
            stack.callback(spools.close)
            self._transactions = Transactions(Decoder(types, after), spools)
            self._held = stack.pop_all()

    def __enter__(self) -> ReplicationStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and forget what waits; it comes again in the next session."""
        self._held.close()

    @property
    def safe_lsn(self) -> int:
        """How far the slot may move once all pieces given so far are applied; 0 is nowhere."""
        held = self._transactions.held_lsn
        return self._safe if held is None else min(self._safe, held)

    def read(self, upto: int, seconds: float) -> Iterator[Piece]:
        """Pieces until everything that committed before `upto` was given, or the time is over."""
        deadline = time.monotonic() + seconds
        self._say(ask=True)
        while True:
            for piece in self._pieces:
                self._given(piece)
                yield piece
            if self._safe >= upto or time.monotonic() >= deadline:
                return
            self._pieces = self._receive(deadline)

    def confirm(self, lsn: int) -> None:
        """Tell the server that everything before a position is safe; never further than `safe_lsn`."""
        self._confirmed = max(self._confirmed, min(lsn, self.safe_lsn))
        reach("stream.confirming")
        self._say()
        reach("stream.confirmed")

    def _given(self, piece: Piece) -> None:
        if piece.frontier is not None:
            self._safe = max(self._safe, piece.frontier)

    def _start(self, conn: psycopg.Connection[Any]) -> None:
        protocol = next((number for version, number in _PROTOCOLS if conn.info.server_version >= version), 1)
        options = {
            "proto_version": str(protocol),
            "publication_names": publication_names(self._feed.publications),
            "binary": "true" if self._feed.binary else "false",
            **({"streaming": "on"} if protocol > 1 else {}),
        }
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} ({})").format(
            sql.Identifier(checked_name(self._feed.slot)),
            sql.SQL(write_lsn(0)),
            sql.SQL(", ").join(
                sql.SQL("{} {}").format(sql.Identifier(key), sql.Literal(value)) for key, value in options.items()
            ),
        )
        result = self._conn.exec_(command.as_bytes(conn))
        if result.status != pq.ExecStatus.COPY_BOTH:
            state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"XX000").decode()
            said = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"no answer").decode()
            raise by_state(state, said)

    def _receive(self, deadline: float) -> Iterator[Piece]:
        """What has arrived, decoded; waits for the first message until the deadline."""
        parts: list[memoryview] = []
        size, idle, get = 0, 0, self._conn.get_copy_data
        try:
            while size < self._batch_bytes:
                count, data = get(1)
                if count == 0:
                    # The server sends every message by itself; decoding pays for many at once.
                    if not self._wait(min(deadline, time.monotonic() + _LINGER) if parts else deadline):
                        break
                    continue
                if count < 0:
                    raise self._ended()
                if data[0] == _DATA:
                    parts.append(data[_DATA_HEADER:])
                    size += count
                elif data[0] == _KEEPALIVE:
                    idle, answer = _POSITION.unpack(data)
                    if answer:
                        self._say()
                    break
        except psycopg.Error as error:
            raise translate(error) from error
        return self._decoded(parts, idle)

    def _decoded(self, parts: list[memoryview], idle: int) -> Iterator[Piece]:
        if parts:
            yield from self._transactions.feed(Messages.of_parts(parts))
        # A keepalive says how far the server has read: everything that committed before has been sent by then.
        if idle and not self._transactions.decoder.unfinished:
            self._safe = max(self._safe, idle)

    def _wait(self, deadline: float) -> bool:
        """Wait until there is something to read; False when the time is over."""
        while True:
            left = deadline - time.monotonic()
            if time.monotonic() - self._said >= _STATUS_SECONDS:
                self._say(ask=True)
            if self._ready(select.POLLIN, max(0.0, min(left, _STATUS_SECONDS))):
                self._conn.consume_input()
                return True
            if left <= 0:
                return False

    def _ready(self, event: int, seconds: float) -> bool:
        # Not select(), which knows only the first thousand files of a process.
        poll = select.poll()
        poll.register(self._conn.socket, event)
        return bool(poll.poll(seconds * 1000))

    def _say(self, *, ask: bool = False) -> None:
        now = time.time_ns() // 1000 - EPOCH
        status = _STATUS.pack(b"r", self._confirmed, self._confirmed, self._confirmed, now, ask)
        try:
            self._conn.put_copy_data(status)
            while self._conn.flush():
                self._ready(select.POLLOUT, _STATUS_SECONDS)
        except psycopg.Error as error:
            raise translate(error) from error
        self._said = time.monotonic()

    def _ended(self) -> ModakError:
        result = self._conn.get_result()
        state = result and result.error_field(pq.DiagnosticField.SQLSTATE)
        said = result and result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY)
        return by_state((state or b"08006").decode(), (said or b"the server ended the stream").decode())
