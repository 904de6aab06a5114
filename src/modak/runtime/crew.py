"""The hands of the leader: a few threads that do what the schedule hands out, item by item.

One thread works on one table at a time. What goes wrong is written down and waits alone; a lost lease, a dead JVM and a
fault of a test end the whole crew, and whoever asks `check` learns of it. Leaving waits a while for what runs: after
that the lease is given away all the same, and the epoch keeps late commits out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psycopg
import structlog

from modak.catalog.fleet import Glance
from modak.core import underway
from modak.core.clock import Clock
from modak.core.errors import ModakError, NotLeader
from modak.core.faults import InjectedFault
from modak.postgres.connect import translate
from modak.runtime.schedule import Item, Schedule
from modak.runtime.tracing import span

log = structlog.get_logger()

FATAL = frozenset({"spark.gateway_lost", "spark.jars_needed"})

Act = Callable[[Item], bool]
"""Does one item; True: there was nothing to do, and will not be until the table changes."""
OnDone = Callable[[Item, float, str], None]
"""Told of every item: how long it took, and the code of its error."""


class Crew:
    """Threads that work on a schedule until they are left."""

    def __init__(self, schedule: Schedule, act: Act, clock: Clock, size: int, on_done: OnDone | None = None) -> None:
        self._schedule = schedule
        self._act = act
        self._clock = clock
        self._on_done = on_done
        self._changed = threading.Condition()
        self._ending = False
        self._broken: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"modak-crew-{at}", daemon=True) for at in range(size)
        ]

    def __enter__(self) -> Crew:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave(0.0)

    def leave(self, patience: float) -> None:
        """Begin nothing more, and wait so long for what runs."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        deadline = self._clock.monotonic() + patience
        for thread in self._threads:
            thread.join(max(deadline - self._clock.monotonic(), 0.0))

    def offer(self, seen: Iterable[Glance], *, publishing: bool = False) -> None:
        """What a round has seen is to be done."""
        with self._changed:
            self._schedule.offer(seen, self._clock.monotonic(), publishing=publishing)
            self._changed.notify_all()

    def drained(self, seconds: float) -> bool:
        """Wait up to so long until all that may begin is done; whether it is."""
        with self._changed:
            if not self._still():
                self._changed.wait(seconds)
            return self._still()

    def _still(self) -> bool:
        return self._broken is not None or self._schedule.drained(self._clock.monotonic())

    def check(self) -> None:
        """Raise what ended the crew, if anything did."""
        if self._broken is not None:
            raise self._broken

    def shown(self) -> Mapping[str, Any]:
        """What runs, waits and fails."""
        with self._changed:
            return self._schedule.shown(self._clock.monotonic())

    def _work(self) -> None:
        while True:
            with self._changed:
                while (item := self._next()) is None:
                    if self._ending or self._broken is not None:
                        return
                    # A pause after a failure ends without anybody telling.
                    self._changed.wait(1.0)
            self._do(item)

    def _next(self) -> Item | None:
        return None if self._ending or self._broken is not None else self._schedule.take(self._clock.monotonic())

    def _do(self, item: Item) -> None:
        began = self._clock.monotonic()
        rests, failure = False, None
        try:
            with span(f"modak.{item.kind}", {"modak.table": str(item.name)}):
                rests = self._act(item)
        except (NotLeader, InjectedFault) as ending:
            self._end(item, ending)
            return
        except Exception as raised:
            failure = translate(raised) if isinstance(raised, psycopg.Error) else raised
        finally:
            # Another thread may take the table up next, and must find what failed here to be a leftover.
            underway.let_go()
        code = "" if failure is None else failure.code if isinstance(failure, ModakError) else "daemon.crashed"
        if failure is not None and code in FATAL:
            self._end(item, failure)
            return
        now = self._clock.monotonic()
        if self._on_done is not None:
            self._on_done(item, now - began, code)
        if failure is not None:
            self._failed(item, failure, code)
            return
        with self._changed:
            self._schedule.ended(item, now, rests=rests)
            self._changed.notify_all()

    def _failed(self, item: Item, error: Exception, code: str) -> None:
        with self._changed:
            pause = self._schedule.failed(item, self._clock.monotonic(), code, error)
            self._changed.notify_all()
        fields = {"table": str(item.name), "kind": item.kind.value, "again_in_seconds": round(pause, 1)}
        if isinstance(error, ModakError):
            log.error("cycle.failed", code=code, error=error.message, hint=error.hint, **fields)
        else:
            log.error("cycle.crashed", code=code, exc_info=error, **fields)

    def _end(self, item: Item, why: BaseException) -> None:
        with self._changed:
            self._schedule.running.pop(item.table_id, None)
            self._broken = self._broken or why
            self._changed.notify_all()
