"""Trying again what may pass by itself: throttling, failing servers, lost connections, bodies that end too early.

The client below retries single requests; this retries what it gives up on or cannot see (an answer that breaks off in
the middle). The pause doubles up to a limit and a random part of it is left out, so that many tasks that met the same
trouble do not come back together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Container
from typing import TypeVar

from modak.core.errors import ModakError

Value = TypeVar("Value")

TRIES = 5
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


def patiently(
    work: Callable[[], Value], *, sleep: Callable[[float], None] = time.sleep, only: Container[str] | None = None
) -> Value:
    """Do it, again after a `ModakError` that another try may help (of some codes); for work that may be done twice."""
    for attempt in range(1, TRIES + 1):
        try:
            return work()
        except ModakError as error:
            if not error.retryable or attempt == TRIES or (only is not None and error.code not in only):
                raise
            sleep(pause(attempt))
    raise AssertionError("unreachable")


def pause(attempt: int) -> float:
    """Seconds to wait after a failed attempt (from 1): half of it fixed, half of it chance."""
    longest = min(FIRST_PAUSE * 2.0 ** (attempt - 1), LONGEST_PAUSE)
    return longest / 2 + random.uniform(0, longest / 2)  # noqa: S311
