"""A newcomer's first two minutes: `run --demo` on a machine that has nothing yet, Ctrl-C, and once more."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from modak.postgres.embedded import EmbeddedServer
from tests.cli.conftest import Worker, program


@pytest.fixture
def home() -> Iterator[Path]:
    """A fresh home that the account of the embedded server can reach."""
    folder = Path(tempfile.mkdtemp(prefix="modak-newcomer-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        EmbeddedServer(folder).destroy()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_demo_shows_the_life_of_a_table_ends_on_ctrl_c_and_resumes(
    worker: Worker, home: Path, tmp_path: Path
) -> None:
    first = _run_until(r"(?s)reclaim\.dropped.*last operation.*tier done", home, tmp_path / "first")
    for step in (
        "spark.starting",
        "tiering.sealed",
        "tiering.exported",
        "tiering.committed",
        "tiering.advanced",
        "reclaim.dropped",
    ):
        assert step in first
    to_try = _commands_after("Try next", first)
    assert len(to_try) == 3
    assert f"PGPASSFILE={home}/pgpass psql postgresql://postgres@127.0.0.1:" in first
    assert f"file://{home}/warehouse" in first

    (row,) = json.loads(worker("status", "--json", MODAK_HOME=str(home)).stdout)["tables"]
    assert (row["partitions"]["dropped"], row["problems"]) == (7, [])
    assert 0 < row["lake_rows"] < 1_000_000
    shown = {command.partition("modak-worker ")[2].split()[0]: _as_typed(command) for command in to_try}
    assert shown.keys() == {"status", "tier", "sql"}
    assert "public.events" in shown["status"]
    assert "public.events" in shown["tier"]
    # Heap and lake as one: the answer has a line per kind of event, with its name, rows and amount.
    assert sum(int(line.split()[1]) for line in shown["sql"].splitlines()[1:]) == 1_000_000

    second = _run_until(r"leader\.acquired", home, tmp_path / "second")
    assert "is here already" in second
    assert "tiering.sealed" not in second

    assert worker("stop", MODAK_HOME=str(home)).stdout.startswith("stopped")


def _commands_after(heading: str, shown: str) -> list[str]:
    """The block of lines below a heading, up to the next empty one."""
    lines = shown[shown.index(heading) :].splitlines()[1:]
    return [line.strip() for line in takewhile(str.strip, lines)]


def _as_typed(command: str) -> str:
    """What a command prints that somebody copies from the screen into a shell."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_until(pattern: str, home: Path, log: Path) -> str:
    """Start the demo, wait for a text, press Ctrl-C; the end must be clean."""
    with log.open("w") as sink:
        process = subprocess.Popen(
            [program(), "run", "--demo"],
            env={**os.environ, "MODAK_HOME": str(home), "MODAK_CYCLE_INTERVAL_SECONDS": "1"},
            stdout=sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 240
            while not re.search(pattern, log.read_text()):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        finally:
            if process.poll() is None:
                process.kill()
    shown = log.read_text()
    assert "Stopped." in shown
    assert "Traceback" not in shown
    return shown
