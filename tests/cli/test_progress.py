"""Progress is told beside the result: over one line in a terminal, now and then elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from modak.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_tells_bytes_rows_rate_and_time_left() -> None:
    moments = iter([0.0, 10.0])
    line = Progress("merging", 4_000, lambda: next(moments)).line(1_000, 50)
    assert line == "merging: 1.0 KB of 4.0 KB, 50 rows, 100 B/s, about 30 s left"


def test_a_terminal_is_written_over_and_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    now = 0.0
    with Progress("merging", clock=lambda: now) as progress:
        progress.show(1, 1)
        assert screen.getvalue() == ""
        now = 1.0
        progress.show(1_000, 5, "db/cpu")
    assert screen.getvalue() == "\r\x1b[2Kmerging db/cpu: 1.0 KB, 5 rows, 1.0 KB/s\r\x1b[2K"


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with Progress("merging", clock=lambda: now) as progress:
        for second in range(40):
            now = float(second)
            progress.show(second, second)
    assert len(capsys.readouterr().err.splitlines()) == 2
