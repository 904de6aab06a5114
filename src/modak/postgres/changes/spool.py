"""Transactions that wait for their end, in memory up to a limit and then on disk.

A streamed transaction arrives while it still runs and can be as large as the disk of the server. Its messages are kept
as they came; when all waiting transactions together pass the limit, the largest goes to a file of Arrow batches in a
private folder. What a crash left in that folder is removed by the next one who opens it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.postgres.changes.wire import Messages

_SCHEMA = pa.schema([pa.field("message", pa.binary(), nullable=False)])
_KEPT = np.zeros(256, bool)
_KEPT[np.frombuffer(b"IUDTRY", np.uint8)] = True
_ANNOUNCED = np.frombuffer(b"RY", np.uint8)


@dataclass(slots=True)
class Spool:
    """The messages of one waiting transaction. `streamed` ones carry the id of their sub-transaction."""

    path: Path
    streamed: bool
    bytes: int = 0
    _aborted: set[int] = field(default_factory=set)
    _batches: list[pa.RecordBatch] = field(default_factory=list)
    _file: Any = None
    _writer: Any = None
    _on_disk: bool = False

    def add(self, messages: Messages) -> None:
        """Keep a block of messages; those that change no row and announce nothing are let go."""
        column = messages.pick(_KEPT[messages.kinds]).column()
        if len(column):
            self._batches.append(pa.RecordBatch.from_arrays([column], schema=_SCHEMA))
            self.bytes += column.nbytes

    def abort(self, xid: int) -> None:
        """Drop what a sub-transaction did. Its announcements stay: the server does not repeat them."""
        self._aborted.add(xid)

    def to_disk(self) -> None:
        """Move what is in memory into the file."""
        reach("spool.writing")
        with _disk():
            if self._writer is None:
                self._file = pa.OSFile(str(self.path), "wb")
                self._writer = pa.ipc.new_stream(self._file, _SCHEMA)
                self._on_disk = True
            for batch in self._batches:
                self._writer.write_batch(batch)
        reach("spool.written")
        self._batches, self.bytes = [], 0

    def messages(self) -> Iterator[Messages]:
        """The messages in their order, block by block; nothing can be added afterwards."""
        self._seal()
        if self._on_disk:
            with _disk(), pa.OSFile(str(self.path), "rb") as source, pa.ipc.open_stream(source) as reader:
                for batch in reader:
                    yield self._lasting(batch)
        for batch in self._batches:
            yield self._lasting(batch)

    def discard(self) -> None:
        """Forget the transaction."""
        self._batches, self.bytes = [], 0
        self._seal()
        if self._on_disk:
            reach("spool.removing")
            self.path.unlink(missing_ok=True)
            reach("spool.removed")

    def _seal(self) -> None:
        if self._writer is not None:
            with _disk():
                self._writer.close()
                self._file.close()
            self._writer = None

    def _lasting(self, batch: pa.RecordBatch) -> Messages:
        messages = Messages.of_column(batch.column(0))
        if not self.streamed:
            return messages
        if self._aborted:
            gone = np.isin(messages.wire.u4(messages.starts), list(self._aborted))
            messages = messages.pick(~gone | np.isin(messages.kinds, _ANNOUNCED))
        return messages.without_xid()


@dataclass(slots=True)
class Spools:
    """All waiting transactions of a session, in a folder of their own; `close` removes it."""

    folder: Path
    memory_bytes: int = 64 << 20
    _open: dict[str, Spool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._remove()
        with _disk():
            self.folder.mkdir(mode=0o700, parents=True)

    def open(self, key: str, *, streamed: bool) -> Spool:
        """The spool of a transaction, new or known."""
        spool = self._open.get(key)
        if spool is None:
            number = max((int(each.path.stem) for each in self._open.values()), default=0) + 1
            spool = self._open[key] = Spool(self.folder / f"{number}.arrows", streamed)
        return spool

    def known(self, key: str) -> Spool | None:
        """The spool of a transaction, if it has one."""
        return self._open.get(key)

    def rename(self, key: str, new: str) -> None:
        """Know a transaction by another key."""
        self._open[new] = self._open.pop(key)

    def discard(self, key: str) -> None:
        """Forget a transaction, if it is known."""
        spool = self._open.pop(key, None)
        if spool is not None:
            spool.discard()

    def settle(self) -> None:
        """Move the largest transactions to disk until what is left in memory keeps to the limit."""
        while sum(spool.bytes for spool in self._open.values()) > self.memory_bytes:
            max(self._open.values(), key=lambda spool: spool.bytes).to_disk()

    def close(self) -> None:
        """Forget everything, on disk too."""
        for key in list(self._open):
            self.discard(key)
        self._remove()

    def _remove(self) -> None:
        reach("spool.clearing")
        shutil.rmtree(self.folder, ignore_errors=True)
        reach("spool.cleared")


@contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModakError(
            "changes.spool",
            f"A large transaction cannot be kept on disk: {error.strerror or error}.",
            hint="Free space where MODAK_HOME is; the transaction is read again.",
            retryable=True,
        ) from error
