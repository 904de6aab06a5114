"""Landing a batch beside the reading of the next: one lasting thread per pump, and one batch at a time.

The thread is made when a pump first has more to read than it can land at once, and stays: every new one would leave a
connection to the JVM behind. What it met is raised where its result is asked for, so an error stops the turn as if it
had happened there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from modak.catalog.records import TableState


@dataclass(frozen=True, slots=True)
class Landing:
    """A batch that has landed: the state afterwards, the end of its last transaction, and how long it took."""

    state: TableState
    frontier: int
    seconds: float


class Lander:
    """Lands batches in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[Landing] | None = None

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way."""
        return self._under_way is not None and not self._under_way.done()

    def begin(self, land: Callable[[], Landing]) -> None:
        """Let the thread land a batch; the one before has been asked for."""
        assert self._under_way is None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._under_way = self._pool.submit(land)

    def finish(self) -> Landing | None:
        """Wait for the batch that is on its way and give what it has become, or raise what it met."""
        future, self._under_way = self._under_way, None
        return None if future is None else future.result()

    def abandon(self) -> None:
        """Wait until nothing is on its way, whatever it becomes: nobody cuts a commit in two."""
        future, self._under_way = self._under_way, None
        if future is not None:
            future.exception()

    def close(self) -> None:
        """End the thread; a later batch makes a new one."""
        self.abandon()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
