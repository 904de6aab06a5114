"""Work that no crew does: pumps, maintenance, health, staged loads, stores. It says here what it is at.

`top`, `/metrics`, the console and traces so know of every piece of work of this process, whoever does it. Memory: an
entry for each piece that runs, and one for each that waits after a failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from modak.core.errors import ModakError
from modak.runtime import metrics
from modak.runtime.tracing import span

_MOST = 50
"""Entries of each kind that are shown."""


@dataclass(frozen=True, slots=True)
class _Wait:
    code: str
    message: str
    hint: str
    times: int
    until: float | None
    """None: whoever drives the work knows when it comes again."""


_lock = threading.Lock()
_running: dict[object, tuple[str, str, float]] = {}
_failing: dict[tuple[str, str], _Wait] = {}
_watched: dict[str, tuple[Callable[[], bool], Callable[[], BaseException | None]]] = {}


@contextmanager
def doing(kind: str, table: str = "") -> Iterator[None]:
    """One piece of work: shown while it runs, timed, traced."""
    mine, began = object(), time.monotonic()
    with _lock:
        _running[mine] = (kind, table, began)
    try:
        with span(f"modak.{kind}", {"modak.table": table} if table else None):
            yield
    finally:
        with _lock:
            del _running[mine]
        metrics.WORK.labels(kind).observe(time.monotonic() - began)


@contextmanager
def watched(kind: str, runs: Callable[[], bool], failed: Callable[[], BaseException | None]) -> Iterator[None]:
    """Work that somebody else drives: shown while the block lasts, whenever it runs or its last turn failed."""
    with _lock:
        _watched[kind] = (runs, failed)
    try:
        yield
    finally:
        with _lock:
            del _watched[kind]


def failed(kind: str, table: str, error: BaseException, pause: float) -> int:
    """The work failed and waits so many seconds; returns how often that has happened in a row."""
    with _lock:
        before = _failing.get((kind, table))
        times = before.times + 1 if before else 1
        _failing[kind, table] = _wait(kind, error, times, time.monotonic() + pause)
    return times


def _wait(kind: str, error: BaseException, times: int, until: float | None) -> _Wait:
    if isinstance(error, ModakError):
        return _Wait(error.code, error.message, error.hint, times, until)
    told = f"{type(error).__name__}: {error}"
    return _Wait(f"{kind}.crashed", told, "This is a fault in Modak; the log has the details.", times, until)


def well(kind: str, table: str = "") -> None:
    """The work has succeeded, or there is none any more."""
    with _lock:
        _failing.pop((kind, table), None)


def forget() -> None:
    """Nobody does this work here any more, so nothing of it fails here."""
    with _lock:
        _failing.clear()


def shown() -> dict[str, Any]:
    """What runs and what waits after a failure, as a crew shows it."""
    now = time.monotonic()
    with _lock:
        running, failing = list(_running.values())[:_MOST], list(_failing.items())[:_MOST]
        counts = {"running": len(_running), "failing": len(_failing)}
        watched = list(_watched.items())
    others = [kind for kind, (runs, _) in watched if runs()]
    broken = [((kind, ""), _wait(kind, why, 1, None)) for kind, (_, failed) in watched if (why := failed())]
    return {
        "counts": {"running": counts["running"] + len(others), "failing": counts["failing"] + len(broken)},
        "running": [
            *({"table": table, "kind": kind, "seconds": round(now - since, 1)} for kind, table, since in running),
            *({"table": "", "kind": kind, "seconds": None} for kind in others),
        ],
        "failing": [
            {
                "table": table,
                "kind": kind,
                "code": each.code,
                "message": each.message,
                "hint": each.hint,
                "times": each.times,
                "again_in_seconds": None if each.until is None else round(max(each.until - now, 0.0), 1),
            }
            for (kind, table), each in [*failing, *broken]
        ],
    }
