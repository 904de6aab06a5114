"""The daemon: campaign, repair, then the same pass over every table, cycle after cycle.

A table that fails backs off alone and says why; the others go on. Losing the lease sends the process back to
campaigning. Losing the JVM ends the process, so that its supervisor starts a whole one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psycopg
import structlog

from modak.catalog.records import TableRecord
from modak.core.errors import ModakError, NotLeader
from modak.core.faults import InjectedFault
from modak.core.names import TableName
from modak.postgres.connect import translate
from modak.runtime.leader import Leader
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tiering.run import TieringReport, tier

log = structlog.get_logger()

LONGEST_BACKOFF_SECONDS = 300.0
FATAL = frozenset({"spark.gateway_lost"})

OnReport = Callable[[TieringReport], None]
OnEvent = Callable[[str, Mapping[str, object]], None]


@dataclass
class _Patience:
    """Tables that failed wait longer each time, up to a limit."""

    until: dict[TableName, float] = field(default_factory=dict)
    failures: dict[TableName, int] = field(default_factory=dict)

    def waits(self, name: TableName, now: float) -> bool:
        return now < self.until.get(name, 0.0)

    def failed(self, name: TableName, now: float, base: float) -> float:
        count = self.failures.get(name, 0)
        self.failures[name] = count + 1
        pause = min(base * 2.0 ** min(count, 20), LONGEST_BACKOFF_SECONDS)
        self.until[name] = now + pause
        return pause

    def worked(self, name: TableName) -> None:
        self.until.pop(name, None)
        self.failures.pop(name, None)


def run(site: Site, *, stop: threading.Event, on_event: OnEvent | None = None) -> None:
    """Host the daemon until `stop` is set."""
    settings = site.settings
    _warm(site)
    while not stop.is_set():
        try:
            leader = Leader.campaign(site, settings.leader.campaign_interval_seconds, stop)
        except NotLeader:
            log.debug("leader.standby")
            continue
        except ModakError as error:
            if error.code in FATAL or not error.retryable:
                raise
            log.warning("daemon.waiting", code=error.code, because=error.message)
            stop.wait(settings.leader.campaign_interval_seconds)
            continue
        with leader:
            _lead(site, leader, stop, on_event)


def _lead(site: Site, leader: Leader, stop: threading.Event, on_event: OnEvent | None) -> None:
    patience = _Patience()
    repaired = False
    while not stop.is_set() and not leader.lost:
        try:
            if not repaired:
                repair(site, leader.epoch)
                repaired = True
            cycle(site, leader, patience, stop, on_event)
        except NotLeader:
            return
        except ModakError as error:
            if error.code in FATAL:
                raise
            log.error("cycle.failed", code=error.code, error=error.message, hint=error.hint)
        stop.wait(site.settings.tiering.cycle_interval_seconds)


def cycle(
    site: Site,
    leader: Leader,
    patience: _Patience,
    stop: threading.Event,
    on_event: OnEvent | None = None,
) -> None:
    """One round over all tables."""
    for record in site.reader.tables():
        if stop.is_set() or leader.lost:
            return
        if record.mode == "tiered" and not patience.waits(record.name, site.clock.monotonic()):
            _pass(site, leader, record, patience, on_event)


def _pass(site: Site, leader: Leader, record: TableRecord, patience: _Patience, on_event: OnEvent | None) -> None:
    try:
        report = tier(site, leader.epoch, record.name)
    except NotLeader:
        raise
    except (ModakError, psycopg.Error) as raised:
        error = translate(raised) if isinstance(raised, psycopg.Error) else raised
        if error.code in FATAL:
            raise error from raised
        pause = patience.failed(record.name, site.clock.monotonic(), site.settings.tiering.cycle_interval_seconds)
        log.error(
            "cycle.failed",
            table=str(record.name),
            code=error.code,
            error=error.message,
            hint=error.hint,
            again_in_seconds=round(pause, 1),
        )
        return
    except InjectedFault:
        raise
    except Exception:
        pause = patience.failed(record.name, site.clock.monotonic(), site.settings.tiering.cycle_interval_seconds)
        log.exception("cycle.crashed", table=str(record.name), again_in_seconds=round(pause, 1))
        return
    patience.worked(record.name)
    if on_event is not None and report.changed:
        on_event("pass", {"table": str(record.name), "rows": report.rows, "dropped": len(report.dropped)})


def _warm(site: Site) -> None:
    """The first job of a session is three times slower; better now than in the first pass."""
    from modak.spark.session import warm

    warm(site.spark)
