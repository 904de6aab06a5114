"""How far long work is: bytes, rows, rate and time left, beside the result and never in it.

A terminal shows one line that is written over; elsewhere a line comes every now and then, so that a log tells it too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from modak.cli.output import count, duration, note, on_terminal, size

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 15.0
_CLEAR = "\r\x1b[2K"


class Progress:
    """Progress of one command; `total` are the bytes to be done, as far as they are known."""

    def __init__(self, verb: str, total: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb = verb
        self._total = total
        self._clock = clock
        self._begun = clock()
        self._terminal = on_terminal(sys.stderr)
        self._shown = self._begun
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()

    def show(self, done: int, rows: int, what: str = "") -> None:
        """Tell how many bytes and rows are done by now, if it is time for that."""
        now = self._clock()
        if now - self._shown < (_TERMINAL_SECONDS if self._terminal else _LOG_SECONDS):
            return
        self._shown = now
        line = self.line(done, rows, what)
        if self._terminal:
            sys.stderr.write(f"{_CLEAR}{line}")
            sys.stderr.flush()
            self._open = True
        else:
            note(line)

    def line(self, done: int, rows: int, what: str = "") -> str:
        """What there is to tell."""
        seconds = max(self._clock() - self._begun, 0.001)
        of = f" of {size(self._total)}" if self._total else ""
        left = (self._total - done) / (done / seconds) if self._total and 0 < done < self._total else None
        rest = f", about {duration(left)} left" if left is not None else ""
        about = f" {what}" if what else ""
        return f"{self._verb}{about}: {size(done)}{of}, {count(rows, 'row')}, {size(done / seconds)}/s{rest}"

    def clear(self) -> None:
        """Take the line away, so that a result can stand in its place."""
        if self._open:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._open = False
