"""Queries over HTTP: read-only SQL across the seam, with a limit on time, rows, memory and how many run at once.

They run in children with a JVM of their own (`asked.py`), because no limit inside a JVM holds against everything: what
Spark works out while it plans, or within one row, hears no cancellation, and one value can be larger than all memory. A
child that does not answer in time is killed, and one that dies takes nobody along. It stays for the next question and
goes when it was idle, when the server ends, and by itself when this process is gone. Memory: here at most `AT_ONCE`
answers of `MOST_BYTES`, as the JSON that the caller gets; in each child one such answer beside its JVM, whose heap is
`MODAK_QUERY_MEMORY`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from modak.core.errors import ModakError, Refused, UsageError
from modak.tables.site import Site

AT_ONCE = 2
LONGEST_TEXT = 100_000
MOST_BYTES = 64 << 20
START_SECONDS = 180.0
"""A child that is not ready by then is given up; no caller's time counts meanwhile."""
GRACE_SECONDS = 5.0
"""What the gentle end inside the child gets before the child is killed."""
IDLE_SECONDS = 300.0
ROUTES_SECONDS = 5.0
"""How long Postgres may think about an explanation of its own."""
_STDERR = 2


@dataclass(frozen=True, slots=True)
class Question:
    """A statement and its limits; without rows it is to be explained."""

    text: str
    seconds: float
    rows: int | None = None


class Queries:
    """Asks the seam on behalf of callers that are not trusted; answers are JSON."""

    def __init__(self, site: Site, seconds: float, most_rows: int) -> None:
        self._site = site
        self.seconds = seconds
        self.most_rows = most_rows
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._children: set[Child] = set()
        self._idle: dict[Child, threading.Timer] = {}
        self._over = False

    def ask(self, text: str, rows: int | None = None, seconds: float | None = None) -> bytes:
        """The first rows of an answer, every value as text (or null), with the names and types of the columns."""
        limit = min(rows or self.most_rows, self.most_rows)
        return self._admitted(Question(text, min(seconds or self.seconds, self.seconds), limit))

    def explain(self, text: str) -> bytes:
        """Which tier each use of a table reads, by the plan that a query would have; nothing runs."""
        return self._admitted(Question(text, self.seconds))

    @property
    def children(self) -> tuple[Child, ...]:
        """The processes that there are."""
        with self._lock:
            return tuple(self._children)

    def close(self) -> None:
        """End all children; those who wait for an answer are told."""
        with self._lock:
            self._over = True
            idle, running = self._idle, self._children
            self._idle, self._children = {}, set()
        for timer in idle.values():
            timer.cancel()
        for child in running:
            child.kill()

    def _admitted(self, question: Question) -> bytes:
        if "\0" in question.text or not question.text.strip() or len(question.text) > LONGEST_TEXT:
            raise UsageError("sql.wrong", f"A query is text of 1 to {LONGEST_TEXT} characters.")
        if not self._places.acquire(blocking=False):
            raise Refused("api.busy", f"{AT_ONCE} queries run already.", hint="Try again in a moment.", retryable=True)
        try:
            return self._answer(question)
        finally:
            self._places.release()

    def _answer(self, question: Question) -> bytes:
        with self._child() as child:
            try:
                return child.answer(question)
            except ModakError:
                if self._over:
                    raise _ending() from None
                raise

    @contextmanager
    def _child(self) -> Iterator[Child]:
        """One that is idle, or else a new one; it is kept afterwards if it still lives."""
        child = self._taken()
        try:
            yield child
        except ModakError:
            raise
        except BaseException:
            # It may yet answer a question that nobody waits for.
            child.kill()
            raise
        finally:
            self._give_back(child)

    def _taken(self) -> Child:
        with self._lock:
            if self._over:
                raise _ending()
            while self._idle:
                child, timer = self._idle.popitem()
                timer.cancel()
                if child.alive():
                    return child
                self._children.discard(child)
                child.kill()
            child = Child(self._site)
            self._children.add(child)
            return child

    def _give_back(self, child: Child) -> None:
        with self._lock:
            if child.alive() and not self._over:
                timer = threading.Timer(IDLE_SECONDS, self._retire, (child,))
                timer.daemon = True
                self._idle[child] = timer
                timer.start()
                return
            self._children.discard(child)
        child.kill()

    def _retire(self, child: Child) -> None:
        with self._lock:
            if self._idle.get(child) is not threading.current_thread():
                return
            del self._idle[child]
            self._children.discard(child)
        child.kill()


class Child:
    """A process that answers questions, one at a time."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._jvm: int | None = None
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "modak.runtime.web.asked", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                start_new_session=True,
                env=_environment(),
            )

    @property
    def pids(self) -> tuple[int, ...]:
        """The process, and its JVM once that is known."""
        return (self._process.pid, *([self._jvm] if self._jvm else []))

    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def answer(self, question: Question) -> bytes:
        """What it says to a question, or the error that it found; one that is too slow or too large is gone then."""
        if self._jvm is None:
            # The settings hold secrets: they travel through the pipe and stand nowhere.
            opening = (self._site.settings, self._site.dsn)
            self._jvm = int(self._said(opening, START_SECONDS, late=_not_started(), gone=_not_started()))
        limit = question.seconds + GRACE_SECONDS + (ROUTES_SECONDS if question.rows is None else 0)
        return bytes(self._said(question, limit, late=too_long(question.seconds), gone=out_of_memory()))

    def kill(self) -> None:
        """End it with its JVM and all that they have started, now."""
        if self.alive():
            for group in reversed(self.pids):
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        self._process.wait()

    def _said(self, question: object, seconds: float, *, late: ModakError, gone: ModakError) -> Any:
        with _killing(self, seconds) as killed:
            try:
                self._pipe.send(question)
                told = self._pipe.recv()
            except (EOFError, OSError):
                self.kill()
                raise (late if killed.is_set() else gone) from None
        if isinstance(told, Exception):
            raise told
        return told


@contextmanager
def _killing(child: Child, seconds: float) -> Iterator[threading.Event]:
    """Kill the child if the block takes longer; the event says whether that has happened."""
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        child.kill()

    watch = threading.Timer(seconds, kill)
    watch.daemon = True
    watch.start()
    try:
        yield killed
    finally:
        watch.cancel()
        # A kill that has just begun ends before anybody asks whether the child lives.
        watch.join()


def _environment() -> dict[str, str]:
    """What a child needs of our environment: no setting of ours, because the pipe brings them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MODAK_")}


def too_long(seconds: float) -> ModakError:
    """The error for a query whose time is over."""
    return ModakError(
        "sql.timeout",
        f"The query took longer than {seconds:g} seconds.",
        hint="Ask for less, or raise MODAK_QUERY_TIMEOUT_SECONDS.",
    )


def out_of_memory() -> ModakError:
    """The error for a query that its JVM had no room for."""
    return ModakError(
        "sql.too_large",
        "The query needs more memory than it may have.",
        hint="Ask for less, or raise MODAK_QUERY_MEMORY.",
    )


def _not_started() -> ModakError:
    return ModakError(
        "spark.start_failed",
        "The process for queries did not start.",
        hint="The worker's log has its last words; often it is too little memory (MODAK_QUERY_MEMORY).",
        retryable=True,
    )


def _ending() -> ModakError:
    return Refused("api.busy", "The worker ends and takes no queries.", hint="Ask another worker.", retryable=True)
