"""Real worker processes, ended by SIGKILL or put to sleep by SIGSTOP: whoever comes next goes on, nothing is doubled.

Every worker starts a JVM, so the everyday run draws a point by `--randomly-seed` (printed when a test fails) and the
full run takes all. Only the worker that is struck has a Spark session; those before and after it need none.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from modak.catalog import pins
from modak.core.errors import ModakError
from modak.core.states import PartitionState
from modak.postgres.dsn import Dsn
from modak.runtime.opening import open_site
from tests.spark_fixtures import QUICK_JAVA
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.invariants import Invariants, Row
from tests.tables.test_crash_points import (
    LEFTOVER_POINTS,
    LIFE_POINTS,
    REPAIR_POINTS,
    SHORT_LIFE_POINTS,
    TASK_POINTS,
)

pytestmark = [pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0
"""Seconds that a loaded machine may take for a start of Spark and a pass."""
ROWS: set[Row] = {(i, i, f"row {i}") for i in range(251)}

IN_REGISTER = (
    "lake.create_started",
    "lake.create_written",
    "register.before_prepare",
    "register.committed",
    "register.prepared",
    "spill.after_enable",
    "spill.before_enable",
)
IN_UNREGISTER = (
    *SHORT_LIFE_POINTS,
    "purge.after_delete",
    "purge.before_delete",
    "spill.after_disable",
    "spill.before_disable",
    "storage.deleted",
    "storage.deleting",
    "unregister.committed",
)
AT_THE_END = ("lease.after_release", "lease.before_release")
NOT_IN_A_PASS = {*IN_REGISTER, *IN_UNREGISTER, "journal.after_note", "journal.before_note"}
IN_THE_DAEMON = (
    *(point for point in LIFE_POINTS if point not in NOT_IN_A_PASS),
    "lease.after_campaign",
    "lease.after_renew",
    "lease.before_campaign",
    "lease.before_renew",
)
IN_THE_REPAIR = (*REPAIR_POINTS, *LEFTOVER_POINTS)
EVERYWHERE = (*IN_REGISTER, *IN_THE_DAEMON, *TASK_POINTS, *IN_THE_REPAIR, *IN_UNREGISTER, *AT_THE_END)
KILLED = EVERYWHERE
SAMPLE = 1
SLEEPS = (
    "partitions.before_sync",
    "premake.before_attach",
    "seal.before_trigger",
    "export.before_tasks",
    "export.after_tasks",
    "landing.before_prepare",
    "landing.prepared",
    "catalog.before_commit",
    "reclaim.before_detach",
    "reclaim.before_drop",
    "spill.before_widen",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every point; those that were not drawn only to the full run."""
    if "killed_at" in metafunc.fixturenames:
        seed = int(metafunc.config.getoption("randomly_seed", 0))
        drawn = set(random.Random(seed).sample(EVERYWHERE, SAMPLE))
        marks = {point: () if point in drawn else (pytest.mark.full,) for point in EVERYWHERE}
        metafunc.parametrize("killed_at", [pytest.param(point, marks=marks[point]) for point in EVERYWHERE])


class Worker:
    """A process of `tests.support.worker` in a session of its own, with its log in a file."""

    def __init__(self, environ: dict[str, str], log: Path, *arguments: str) -> None:
        self.log = log
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MODAK_")}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.worker", *arguments],
                cwd=ROOT,
                env={**clean, **environ},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> list[dict[str, Any]]:
        """The events of its log; what the JVM prints in between is no event."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def events(self) -> set[str]:
        return {entry["event"] for entry in self.said()}

    def dies(self) -> None:
        """Wait until SIGKILL has struck, and its JVM has noticed."""
        assert self.process.wait(PATIENCE) == -signal.SIGKILL, self.log.read_text()
        until(lambda: not self.family(), "the JVM of a killed worker lives on")

    def ends(self) -> int:
        return self.process.wait(PATIENCE)

    def terminate(self) -> None:
        """Ask for a clean end, and get it."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0, self.log.read_text()

    def asleep(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def family(self) -> list[int]:
        """Everything that it started and that still runs."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                if os.getsid(process.pid) == self.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except ProcessLookupError:
                continue
        return found

    def clear_away(self) -> None:
        """At the end of a test: nothing that this one started may stay, whatever failed."""
        for pid in {self.pid, *self.family()} if self.process.poll() is None else self.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)


class Place:
    """A database with `public.events` in it, a warehouse, and the workers that were started on them."""

    def __init__(self, dsn: Dsn, warehouse: str, home: Path, environ: dict[str, str]) -> None:
        self.truth = Invariants(dsn, warehouse)
        self.home = home
        self.environ = environ
        self.workers: list[Worker] = []

    def start(self, *arguments: str) -> Worker:
        log = self.home / f"worker-{len(self.workers)}.log"
        self.workers.append(Worker(self.environ, log, *arguments))
        return self.workers[-1]

    def tiered(self, t: int = 200) -> bool:
        """Whether all below `t` is in the lake and out of the heap, and nothing is under way."""
        try:
            state = self.truth.state
        except ModakError:
            return False
        waiting = any(part.state is not PartitionState.HOT for part in state.living())
        here = state.cutline.t == t and not waiting and not state.unfinished
        return here and self.truth.sql("SELECT upper_bound FROM modak.spills") == [(t,)]

    def until_tiered(self, t: int = 200) -> None:
        until(lambda: self.tiered(t), "the table is not tiered", self.workers)

    def clear_away(self) -> None:
        for worker in self.workers:
            worker.clear_away()


def until(holds: Callable[[], bool], otherwise: str, workers: list[Worker] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            logs = "\n\n".join(worker.log.read_text()[-6000:] for worker in workers or [])
            raise AssertionError(f"{otherwise}\n{logs}")
        time.sleep(0.2)


@pytest.fixture
def place(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> Iterator[Place]:
    home = tmp_path / "home"
    environ = {
        "MODAK_PG_URL": fresh_database.safe(),
        "MODAK_PG_PASSWORD": fresh_database.password,
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(home),
        "MODAK_CYCLE_INTERVAL_SECONDS": "0.2",
        "MODAK_PREMAKE_PARTITIONS": "1",
        "MODAK_LEASE_SECONDS": "2",
        "MODAK_CAMPAIGN_INTERVAL_SECONDS": "1",
        **{f"MODAK_SPARK_CONF_{name}": value for name, value in QUICK_JAVA.items()},
    }
    with open_site(settings_for(fresh_database, warehouse, home)) as site:
        Events.create(site)
    made = Place(fresh_database, warehouse, tmp_path, environ)
    yield made
    made.clear_away()


def test_after_a_kill_anywhere_the_next_worker_goes_on(
    place: Place, killed_at: str, request: pytest.FixtureRequest
) -> None:
    print(f"the points were drawn with --randomly-seed={request.config.getoption('randomly_seed', 0)}")
    if killed_at in IN_UNREGISTER:
        _kill_while_leaving(place, killed_at)
        return
    _kill(place, killed_at)
    left = {op.op_id for op in place.truth.reader.unfinished_ops()}
    after = place.start("daemon", "--register", "--light")
    until(lambda: "leader.acquired" in after.events(), "nobody leads", place.workers)
    place.until_tiered()
    after.terminate()
    assert left <= {entry["op"] for entry in after.said() if entry["event"] == "repair.cleaned"}
    place.truth.check(ROWS)


def _kill(place: Place, point: str) -> None:
    if point in IN_REGISTER:
        place.start("register", "--kill", point).dies()
    elif point in IN_THE_REPAIR:
        landed = point in LEFTOVER_POINTS
        first = "landing.committed" if landed else "landing.prepared"
        place.start("daemon", "--register", "--light", "--kill", first).dies()
        if landed:
            (op,) = place.truth.reader.unfinished_ops()
            Path(op.folders[0].removeprefix("file://"), "00000-00000-again.parquet").write_bytes(b"rows")
        place.start("repair", "--kill", point).dies()
    elif point in AT_THE_END:
        worker = place.start("daemon", "--register", "--kill", point)
        place.until_tiered()
        worker.process.send_signal(signal.SIGTERM)
        worker.dies()
    else:
        # A task is a part of the process that is struck only where it runs in it.
        light = ("--light",) if point in TASK_POINTS else ()
        place.start("daemon", "--register", "--kill", point, *light).dies()


def _kill_while_leaving(place: Place, point: str) -> None:
    assert place.start("register").ends() == 0
    if point in SHORT_LIFE_POINTS:
        # Only a partition that is tiered and still in the heap carries a trigger.
        pins.begin(place.truth.dsn, place.truth.name)
        daemon = place.start("daemon", "--light")
        until(lambda: place.truth.state.cutline.t == 200, "the table is not tiered", place.workers)
        daemon.terminate()
    place.start("unregister", "--kill", point).dies()
    if place.truth.reader.tables():
        assert place.start("unregister").ends() == 0
    else:
        assert place.start("repair").ends() == 0
    place.truth.check_gone()


@pytest.mark.parametrize(
    "sleep", [pytest.param(point, marks=() if point == "landing.prepared" else (pytest.mark.full,)) for point in SLEEPS]
)
def test_a_leader_that_sleeps_through_its_lease_changes_nothing_and_may_lead_again(place: Place, sleep: str) -> None:
    first = place.start("daemon", "--register", "--stop", sleep)
    until(lambda: "leader.acquired" in first.events(), "nobody leads", place.workers)
    second = place.start("daemon", "--light")
    until(first.asleep, "the first worker does not come to its point", place.workers)
    place.until_tiered()
    first.process.send_signal(signal.SIGCONT)
    until(
        lambda: bool({"lease.lost", "leader.lost"} & first.events()),
        "the first leads for ever",
        place.workers,
    )
    snapshot = place.truth.state.cutline.snapshot_id
    # Long enough for the first to come to the end of what it was doing; it then stands by.
    time.sleep(3)
    place.truth.check(ROWS)
    assert place.truth.state.cutline.snapshot_id == snapshot

    place.truth.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    second.process.kill()
    second.dies()
    place.until_tiered(300)
    first.terminate()
    place.truth.check(ROWS | {(350, 350, "new")})
    ((epoch,),) = place.truth.sql("SELECT epoch FROM modak.leader")
    assert epoch >= 3
