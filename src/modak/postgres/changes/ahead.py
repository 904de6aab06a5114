"""Reading ahead of a slot that is far behind: the server decodes the next slice while this one is decoded here.

A peek gives nothing before it has decoded everything, and a second one would decode it all again. So a temporary copy
of the slot, which ends with its session, is moved along slice by slice by a thread; the slot itself stays where it is
until its reader confirms. Slices end between transactions, each begins with a new announcement of its tables. Memory:
a queue of batches up to a limit.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa

from modak.postgres.arrow import ArrowSession
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn

SLICE_MESSAGES = 100_000
"""Messages of the first slices. Each slice reads over the WAL of those before it, so later ones are larger."""
_LOOK_SECONDS = 0.2
_CLOSING_SECONDS = 10.0


class ReadAhead:
    """The messages of a copied slot as Arrow columns. Iterate once; then, or when it is enough, `close`."""

    def __init__(
        self, dsn: Dsn, copying: str, slice_of: Callable[[int], str], most: int, batch_bytes: int, memory_bytes: int
    ) -> None:
        """Run `copying`, then fetch what `slice_of(messages)` selects, again and again, until it gives less than that
        or `most` messages were given."""
        self._dsn = dsn
        self._slice_of = slice_of
        self._most = most
        self._batch_bytes = batch_bytes
        self._found: queue.Queue[pa.Array | BaseException | None] = queue.Queue(max(2, memory_bytes // batch_bytes))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._session: ArrowSession | None = ArrowSession(dsn)
        try:
            (self._pid,) = self._session.values("SELECT pg_catalog.pg_backend_pid()")
            self._session.values(copying)
        except BaseException:
            self._session.close()
            raise
        self._thread = threading.Thread(target=self._fetch, args=(self._session,), name="modak-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[pa.Array]:
        while (found := self._found.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found

    def close(self) -> None:
        """Stop reading; the copy goes with its session."""
        self._stop.set()
        with self._lock:
            if self._session is not None and self._thread.is_alive():
                self._cancel()
        self._thread.join(_CLOSING_SECONDS)

    def _cancel(self) -> None:
        with contextlib.suppress(Exception), connect(self._dsn, autocommit=True, application="modak changes") as conn:
            conn.execute("SELECT pg_catalog.pg_cancel_backend(%s)", (self._pid,))

    def _fetch(self, session: ArrowSession) -> None:
        end: BaseException | None = None
        try:
            given, wanted, last = 0, SLICE_MESSAGES, SLICE_MESSAGES
            while last >= wanted and given < self._most and not self._stop.is_set():
                wanted, last = max(SLICE_MESSAGES, 2 * given), 0
                for batch in session.batches(self._slice_of(wanted), self._batch_bytes):
                    last += len(batch)
                    self._give(batch.column(0))
                    if self._stop.is_set():
                        break
                given += last
        except BaseException as error:
            end = error
        finally:
            with self._lock:
                self._session = None
            session.close()
            self._give(end)

    def _give(self, found: pa.Array | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._found.put(found, timeout=_LOOK_SECONDS)
                return
            except queue.Full:
                continue


def copy_name(slot: str) -> str:
    """The name of the copy of a slot."""
    return f"{slot[:57]}_ahead"
