"""Runs a piece of Python in a process of its own, for what would end or change the session of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

_HEAD = """\
import json, os, signal, sys, threading, time
from pathlib import Path
from modak.spark import session
from modak.spark.distribute import distribute
from modak.spark.gateway import open_gateway
from tests.spark_fixtures import Chosen, Options

home = Path(sys.argv[1])
"""


def spawn(body: str, home: Path, cwd: Path, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `body` with `home` and the names of the Spark room at hand."""
    return subprocess.Popen(
        [sys.executable, "-c", _HEAD + textwrap.dedent(body), str(home)],
        cwd=cwd,
        env={**(os.environ if environ is None else environ), "PYTHONPATH": f"{REPOSITORY}/src:{REPOSITORY}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What the process said, once it has ended well."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out, err


def ends(pid: int, seconds: float = 20) -> bool:
    """Whether a process goes away in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False
