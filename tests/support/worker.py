"""A worker process for tests that end it the hard way: `python -m tests.support.worker daemon --kill landing.prepared`.

It takes its settings from the environment as the real one does, writes its log as JSON lines to standard output, and
dies by SIGKILL (or stops by SIGSTOP) at the named fault point. SIGTERM ends it cleanly. With `--light` it does without
a Spark session, as small tables can: for workers that a test needs before or after the one that is struck. With
`--later` it is in danger only from SIGUSR1 on, so that a worker can catch up with what another has left before.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from functools import partial

import structlog

from modak import config
from modak.core import faults
from modak.core.faults import Fault
from modak.core.names import TableName
from modak.postgres.changes.source import Limits
from modak.runtime import daemon
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.amend import update, upsert
from modak.tables.fold import plan as fold_plan
from modak.tables.foreign import accept
from modak.tables.maintenance.erase import erase_rows
from modak.tables.mirror import chunks
from modak.tables.mirror.convert import convert
from modak.tables.mirror.pump import plan as pump_plan
from modak.tables.mirror.pump import run as pump_run
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.registration.unregister import unregister
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tiering import export

TABLE = TableName("public", "events")


def main() -> None:
    """Do one thing, and meet the fault on the way."""
    arguments = _arguments()
    if arguments.light:
        daemon._warm = lambda *_: None
    else:
        # Even a small table moves through Spark tasks here: they are to be killed too.
        export.DRIVER_BYTES = 0
    if arguments.large_folds:
        fold_plan.DRIVER_ROWS = 0
    if arguments.large_batches:
        pump_plan.DRIVER_ROWS = 0
    if arguments.streaming:
        pump_run.BATCH_BYTES = 1 << 14
        pump_run.Limits = partial(Limits, reread_bytes=-1, memory_bytes=1 << 12)  # type: ignore[misc,assignment]
    # And every chunk of a copy is a commit.
    chunks.TASK_BYTES = chunks.TASKS_PER_COMMIT = 1
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with open_site(config.load(os.environ)) as site:
        if arguments.register:
            register(site, RegisterRequest(TABLE, ("id",), "ts"))
        if arguments.kill and arguments.later:
            signal.signal(signal.SIGUSR1, lambda _number, _frame: _arm_now(arguments.kill))
        elif arguments.kill:
            faults.arm(Fault(arguments.kill, "kill"))
        if arguments.stop:
            faults.watch(_Stopper(arguments.stop))
        ACTS[arguments.act](site)


def _arm_now(point: str) -> None:
    faults.arm(Fault(point, "kill"))
    # Not by the log: a signal may come while the same thread holds its lock.
    os.write(sys.stdout.fileno(), b'{"event": "worker.armed"}\n')


class _Stopper:
    """Stops the process the first time that it is at a point; SIGCONT lets it go on as if nothing had been."""

    def __init__(self, point: str) -> None:
        self._point: str | None = point

    def __call__(self, reached: str) -> None:
        if reached == self._point:
            self._point = None
            os.kill(os.getpid(), signal.SIGSTOP)


def _daemon(site: Site) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    daemon.run(site, stop=stop)


def _erase(site: Site) -> None:
    with Leader.campaign(site, 60) as leader:
        erase_rows(site, leader.epoch, TABLE, "id = 5 OR id = 220")


def _repair(site: Site) -> None:
    with Leader.campaign(site, 60) as leader:
        repair(site, leader.epoch)


ACTS = {
    "accept": lambda site: accept(site, TABLE),
    "daemon": _daemon,
    "erase": _erase,
    "repair": _repair,
    "register": lambda site: register(site, RegisterRequest(TABLE, ("id",), "ts")),
    "keep": lambda site: register(site, RegisterRequest(TABLE, ("id",), "ts", keep_heap=True)),
    "mirror": lambda site: register(site, RegisterRequest(TABLE, ("id",), "ts", mode="mirrored", chunk_rows=50)),
    "retain": lambda site: register(site, RegisterRequest(TABLE, ("id",), "ts", mode="mirrored", heap_retention="100")),
    "to-mirrored": lambda site: convert(site, TABLE, "mirrored"),
    "to-tiered": lambda site: convert(site, TABLE, "tiered"),
    "unregister": lambda site: unregister(site, TABLE, drop_lake=True),
    "update": lambda site: update(site, TABLE, {"id": 5, "ts": 5}, {"body": "corrected"}),
    "upsert": lambda site: upsert(site, TABLE, {"id": 5, "ts": 5, "body": "corrected"}),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.support.worker")
    parser.add_argument("act", choices=sorted(ACTS))
    parser.add_argument("--register", action="store_true", help="register the table first, out of danger")
    parser.add_argument("--light", action="store_true", help="without a Spark session")
    parser.add_argument("--large-folds", action="store_true", help="fold few corrections as if they were many")
    parser.add_argument("--large-batches", action="store_true", help="pump few changes as if they were many")
    parser.add_argument("--streaming", action="store_true", help="read every slot by a stream, with little memory")
    parser.add_argument("--kill", metavar="POINT", help="die there by SIGKILL")
    parser.add_argument("--later", action="store_true", help="not before SIGUSR1 has come")
    parser.add_argument("--stop", metavar="POINT", help="stop there by SIGSTOP, once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
