"""Entity stores and measurement stores, served beside the tables for as long as this process leads.

Entities are flushed and compacted on their intervals, in threads of their own: a long compaction holds up no table.
The registry is read anew at every turn, so that attributes can be added while the daemon runs.
Measurements follow their schedules; what their jobs did is handed over to the catalog under the leader's epoch. All of
it stops when the lead ends, after the step that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from modak.catalog.lease import Epoch
from modak.config import Settings
from modak.core.errors import ModakError
from modak.runtime import storemetrics, working
from modak.runtime.leader import Leader, holder_name
from modak.runtime.schedule import LONGEST_BACKOFF_SECONDS
from modak.tables.site import Site

if TYPE_CHECKING:
    from modak.entities.compaction import CompactionReport
    from modak.entities.flushing import FlushReport
    from modak.measurements.manager import Manager
    from modak.measurements.scheduler import Scheduler
    from modak.measurements.watcher import CompletionWatcher

log = structlog.get_logger()

_REST_PER_LOOK = 20.0
"""A survey of a store lists all of it: at most one part in so many of the time goes into looking."""


@dataclass(frozen=True, slots=True)
class Compacting:
    """The compaction of measurements in this process, for those who are asked about it."""

    manager: Manager
    scheduler: Scheduler
    watcher: CompletionWatcher


@contextmanager
def serving(site: Site, leader: Leader) -> Iterator[None]:
    """Serve the stores that the settings enable while the block runs."""
    with ExitStack() as stack:
        stack.callback(storemetrics.forget)
        if site.settings.entities.enabled:
            stack.enter_context(_entities(site, leader))
        if site.settings.measurements.enabled:
            stack.enter_context(_measurements(site, leader))
        yield


@contextmanager
def _entities(site: Site, leader: Leader) -> Iterator[None]:
    from modak.entities.compaction import compact
    from modak.entities.config import from_settings
    from modak.entities.flushing import flush
    from modak.entities.health import status
    from modak.entities.reconciling import collect
    from modak.entities.store import EntityStore

    chosen = site.settings.entities
    dsn = site.dsn if chosen.pg_host is None else None
    # The store itself is opened at every turn: how often turns come must not wait for a registry that can be read.
    compaction_interval = from_settings(chosen)[1].run_interval

    def opened() -> EntityStore:
        return EntityStore.open(site.settings, dsn, spark=lambda: site.spark, clock=site.clock)

    def drain() -> None:
        reports = flush(opened())
        storemetrics.flushed(reports)
        _tell("entities-flush", chosen.flush_interval_seconds, reports)

    def tidy() -> None:
        store = opened()
        reports = compact(store)
        storemetrics.compacted(reports)
        _tell("entities-compact", compaction_interval, reports)
        storemetrics.collected(collect(store))

    def look() -> None:
        storemetrics.entities_are(status(opened()))

    looks = site.settings.maintenance.lake_stats_interval_seconds
    with (
        Repeating("entities-flush", chosen.flush_interval_seconds, drain, leader.patience),
        Repeating("entities-compact", compaction_interval, tidy, leader.patience),
        Repeating("entities-health", looks, look, leader.patience),
    ):
        yield


def _tell(kind: str, pause: float, reports: Iterable[FlushReport | CompactionReport]) -> None:
    """A schema that fails is shown, though the others went well."""
    for each in reports:
        if each.error is not None:
            working.failed(kind, f"schema {each.schema_id}", each.error, pause)
        else:
            working.well(kind, f"schema {each.schema_id}")


@contextmanager
def _measurements(site: Site, leader: Leader) -> Iterator[None]:
    from modak.measurements.cluster import LeaderGate, PostgresBridge
    from modak.measurements.opening import open_manager, open_state, runner_of, schedules_of
    from modak.measurements.scheduler import Scheduler, SchedulerConfig
    from modak.measurements.watcher import CompletionWatcher, CompletionWatcherConfig

    def epoch() -> Epoch | None:
        return None if leader.lost else leader.epoch

    settings = site.settings
    schedules = schedules_of(settings)
    if not schedules:
        log.warning("measurements.no_tier", because="every tier is switched off")
        yield
        return
    folder = completion_folder(settings)
    manager = open_manager(settings, open_state(settings, site.clock), runner_of(settings), folder)
    manager.cleanup_orphaned_temp_dirs()
    manager.cleanup_orphaned_completion_manifests(timedelta(0))
    config = SchedulerConfig(manager, tuple(schedules), schedules=schedules, cluster_gate=LeaderGate(epoch))
    scheduler = Scheduler(config)
    watcher = CompletionWatcher(CompletionWatcherConfig(folder, PostgresBridge(site.dsn, holder_name(), epoch)))
    watcher.start()
    scheduler.start()
    served = site.services["measurements"] = Compacting(manager, scheduler, watcher)
    storemetrics.compacting(served)
    try:
        with (
            working.watched("measurements", manager.is_cycle_running, lambda: scheduler.last_failure),
            _surveying(site, leader, manager),
        ):
            yield
    finally:
        storemetrics.compacting(None)
        site.services.pop("measurements", None)
        scheduler.stop(leader.patience())
        watcher.stop()


@contextmanager
def _surveying(site: Site, leader: Leader, manager: Manager) -> Iterator[None]:
    """Look at the whole store now and then; a large one less often, so that looking stays a small part of the work."""
    from modak.measurements import survey

    policies = [tier.policy for tier in manager.tiers]
    rests_until = 0.0

    def look() -> None:
        nonlocal rests_until
        began = site.clock.monotonic()
        if began < rests_until:
            return
        storemetrics.measurements_are(survey.status(manager.state, policies), site.clock.now())
        ended = site.clock.monotonic()
        rests_until = ended + _REST_PER_LOOK * (ended - began)

    seconds = site.settings.maintenance.lake_stats_interval_seconds
    with Repeating("measurements-health", seconds, look, leader.patience):
        yield


def completion_folder(settings: Settings) -> Path:
    """Where the jobs of this machine tell what they did."""
    return settings.measurements.temp_directory / ".completion" / "pending"


class Repeating:
    """One thing done again and again in a thread of its own; after a failure it waits longer, and says so."""

    def __init__(
        self,
        name: str,
        seconds: float,
        act: Callable[[], object],
        patience: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._act = act
        self._patience = patience
        self._failures = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"modak-{name}", daemon=True)

    def __enter__(self) -> Repeating:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._patience())

    def _loop(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            pause = self._seconds
            try:
                with working.doing(self._name):
                    self._act()
                working.well(self._name)
                self._failures = 0
            except ModakError as error:
                pause = self._failed(error)
                log.error(
                    "stores.failed",
                    task=self._name,
                    code=error.code,
                    error=error.message,
                    hint=error.hint,
                    again_in_seconds=round(pause, 1),
                )
            except Exception as crash:
                pause = self._failed(crash)
                code = f"{self._name}.crashed"
                log.exception("stores.crashed", task=self._name, code=code, again_in_seconds=round(pause, 1))

    def _failed(self, error: Exception) -> float:
        """How long it waits now: twice as long from failure to failure."""
        self._failures += 1
        longest = max(self._seconds, LONGEST_BACKOFF_SECONDS)
        pause = min(self._seconds * 2.0 ** min(self._failures - 1, 20), longest)
        working.failed(self._name, "", error, pause)
        return pause
