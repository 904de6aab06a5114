"""Crash points have names.

`reach("tiering.files_written")` stands before and after every external effect and does nothing in production. A test
arms one point with an action (raise, kill the process, or call something) and walks all of them. The armed fault
travels into Spark tasks with the work (`spark.distribute`), so points inside tasks are reachable too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Action = Literal["raise", "kill"]


class InjectedFault(Exception):
    """Raised at an armed point; deliberately not a `ModakError`, because nothing may handle it kindly."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at which point, the `after`-th time it is reached (0 = the first)."""

    point: str
    action: Action = "raise"
    after: int = 0


_armed: Fault | None = None
_passed = 0
_watcher: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Mark that a flow is at a named point. A no-op unless a test armed it."""
    global _passed
    if _watcher is not None:
        _watcher(point)
    if _armed is None or _armed.point != point:
        return
    _passed += 1
    if _passed <= _armed.after:
        return
    if _armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise InjectedFault(point)


def arm(fault: Fault | None) -> None:
    """Arm one point, or none."""
    global _armed, _passed
    _armed = fault
    _passed = 0


def armed() -> Fault | None:
    """What is armed now, so that it can travel with the work into a task."""
    return _armed


def watch(watcher: Callable[[str], None] | None) -> None:
    """Call `watcher` at every point: tests use it to act, pause or record in mid-flow."""
    global _watcher
    _watcher = watcher
