"""Two ways to call the program: in this process, and as the installed command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from modak.cli import logs
from modak.cli.main import app

Worker = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("MODAK_")]:
        monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODAK_HOME", str(tmp_path / "home"))


@pytest.fixture
def modak() -> Callable[..., Result]:
    """Calls `modak-worker` in this process."""

    def call(*args: str, **environ: str) -> Result:
        return CliRunner(env=environ).invoke(app, list(args))

    return call


@pytest.fixture
def worker() -> Worker:
    """Calls the installed `modak-worker` in a process of its own."""

    def call(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program(), *args],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return call


@pytest.fixture
def log_lines(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """What the log has printed so far, a line each."""

    def lines() -> list[str]:
        return capsys.readouterr().err.splitlines()

    return lines


@pytest.fixture
def reset_logs() -> object:
    """Gives the log back as other tests expect it."""
    import logging

    import structlog

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield logs
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def program() -> str:
    """The command that belongs to the interpreter of this run."""
    return str(Path(sys.executable).with_name("modak-worker"))
