"""A process for tests that end it the hard way: `python -m tests.measurements.compactor ROOT TEMP --do cycle`.

It runs one cycle, recovery, export, end of an export or look of the watcher with small waits; jobs run inside it, or in
children of it with `--children`. Keys of a bucket and the address of a Postgres come in the environment.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from modak.core import faults
from modak.core.clock import SystemClock
from modak.core.faults import Fault
from modak.measurements.cluster import PostgresBridge
from modak.measurements.discover import Source
from modak.measurements.exporting import drop, export
from modak.measurements.manager import Manager
from modak.measurements.recovery import Recovery
from modak.measurements.retention import Retention
from modak.measurements.runners import ProcessRunner
from modak.measurements.state import Patience
from modak.measurements.watcher import CompletionWatcher, CompletionWatcherConfig
from modak.postgres.dsn import Dsn
from modak.storage.objects import Objects
from tests.measurements.support import manager

PATIENCE = Patience(timedelta(0), 0.5, timedelta(seconds=30), timedelta(0))
PROPS, DSN = "COMPACTOR_PROPS", "COMPACTOR_DSN"
ROOT = Path(__file__).parents[2]


def run(*options: str, root: Path, objects: Objects | None = None, dsn: Dsn | None = None) -> int:
    """Start one, wait for its end; the exit code, -9 if it was killed."""
    return start(*options, root=root, objects=objects, dsn=dsn).wait(timeout=120)


def start(*options: str, root: Path, objects: Objects | None = None, dsn: Dsn | None = None) -> subprocess.Popen[bytes]:
    """Start one on the store `root/store`, or on another."""
    where = objects.root if objects is not None else str(root / "store")
    environ = {**os.environ, PROPS: json.dumps(dict(objects._props) if objects is not None else {})}
    if dsn is not None:
        environ[DSN] = base64.b64encode(pickle.dumps(dsn)).decode()
    command = [sys.executable, "-m", "tests.measurements.compactor", where, str(root / "temp"), *options]
    return subprocess.Popen(command, cwd=ROOT, env=environ)


def watch(folder: Path) -> None:
    """Look at the completions once, as the leader."""
    from modak.catalog.lease import Lease

    dsn: Dsn = pickle.loads(base64.b64decode(os.environ[DSN]))
    lease = Lease(dsn, f"watcher-{os.getpid()}", 5.0)
    deadline = time.monotonic() + 60
    # Whoever was killed here before us leads for a while yet.
    while lease.campaign() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    bridge = PostgresBridge(dsn, "node", lambda: lease.campaign() if lease.epoch is None else lease.epoch)
    watcher = CompletionWatcher(CompletionWatcherConfig(folder, bridge, apply_timeout=30))
    # On a slow machine the lease may lapse between two files; what was kept is told at the next look.
    while watcher.stats()["pending"] and time.monotonic() < deadline:
        watcher.poll()
    lease.release()


def act(what: str, compactor: Manager, pending: Path) -> None:
    """Do one thing."""
    match what:
        case "recover":
            Recovery(compactor.state, compactor.claim_level).recover()
        case "export":
            export(compactor.state, Source("db", "cpu"), timedelta(0))
        case "drop":
            drop(compactor.state, Source("db", "cpu"))
        case "watch":
            watch(pending)
        case _:
            compactor.run_compaction_cycle()


def main() -> None:
    """Do what was asked for, and the fault on the way."""
    parser = argparse.ArgumentParser(prog="tests.measurements.compactor")
    parser.add_argument("root")
    parser.add_argument("temp")
    parser.add_argument("--do", default="cycle")
    parser.add_argument("--kill")
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--children", action="store_true")
    parser.add_argument("--claim-seconds", type=float, default=PATIENCE.claim_ttl_seconds)
    parser.add_argument("--keep-hours", type=int)
    given = parser.parse_args()
    props = json.loads(os.environ.get(PROPS, "{}"))
    more: dict[str, Any] = {"runner": ProcessRunner(2)} if given.children else {}
    if given.keep_hours is not None:
        more["retention"] = Retention({"*": timedelta(hours=given.keep_hours)})
    temp = Path(given.temp)
    pending = temp / ".completion" / "pending"
    compactor = manager(
        Objects.of(given.root, props),
        temp,
        clock=SystemClock(),
        patience=replace(PATIENCE, claim_ttl_seconds=given.claim_seconds),
        completion_dir=pending,
        storage_props=props,
        export_kept=timedelta(0),
        **more,
    )
    if given.kill:
        faults.arm(Fault(given.kill, "kill", given.after))
    act(given.do, compactor, pending)


if __name__ == "__main__":
    main()
