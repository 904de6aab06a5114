"""The daemon: campaign, repair, then round after round over all tables; the stores and other services beside them.

A round looks at every table in one query and offers what is due to a crew of a few threads. A table that fails backs
off alone and says why; the others go on. Losing the lease sends the process back to campaigning. Losing Postgres is
waited out. Losing the JVM ends the process, so that its supervisor starts a whole one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping

import psycopg
import structlog

from modak.catalog import pins
from modak.catalog.fleet import glance
from modak.core.errors import ModakError, NotLeader
from modak.postgres.connect import translate
from modak.runtime import loads, metrics, mirrors, publishing, withdrawing, working
from modak.runtime.crew import FATAL, Crew
from modak.runtime.leader import Leader
from modak.runtime.maintaining import serving as maintaining
from modak.runtime.pulse import Pulse
from modak.runtime.schedule import Item, Kind, Schedule
from modak.runtime.stores import serving
from modak.tables.fold.run import fold
from modak.tables.repair import repair
from modak.tables.retention.run import retain
from modak.tables.site import Site
from modak.tables.tiering.run import TieringReport, tier

log = structlog.get_logger()

OnReport = Callable[[TieringReport], None]
OnEvent = Callable[[str, Mapping[str, object]], None]

FIRST_PAUSE_SECONDS = 0.2
"""After the first failure to reach Postgres; the pause doubles up to the campaign interval."""


def run(site: Site, *, stop: threading.Event, on_event: OnEvent | None = None, pulse: Pulse | None = None) -> None:
    """Host the daemon until `stop` is set."""
    pulse = pulse or Pulse(site.clock)
    settings = site.settings.leader
    _warm(site, pulse)
    failures = 0
    while not stop.is_set():
        pulse.became("standby")
        working.forget()
        try:
            leader = Leader.campaign(site, settings.campaign_interval_seconds, stop, pulse.beat, pulse.holder)
            failures = 0
            pulse.became("leading", leader.epoch.number)
            with (
                leader,
                serving(site, leader),
                mirrors.serving(site, leader),
                loads.serving(site, leader),
                withdrawing.serving(site, leader),
                maintaining(site, leader),
            ):
                _lead(site, leader, stop, on_event, pulse)
        except NotLeader:
            failures = 0
            log.debug("leader.standby")
        except (ModakError, psycopg.Error) as raised:
            error = translate(raised) if isinstance(raised, psycopg.Error) else raised
            if error.code in FATAL or not error.retryable:
                raise error from raised
            log.warning("daemon.waiting", code=error.code, because=error.message)
            stop.wait(_pause(failures, settings.campaign_interval_seconds))
            failures += 1
    pulse.became("stopping")


def _lead(site: Site, leader: Leader, stop: threading.Event, on_event: OnEvent | None, pulse: Pulse) -> None:
    settings = site.settings.tiering
    schedule = Schedule(settings.cycle_interval_seconds)

    def act(item: Item) -> bool:
        return perform(site, leader, item, on_event)

    crew = Crew(schedule, act, site.clock, settings.concurrent_tables, metrics.worked)
    pulse.doing = crew.shown
    repaired, failures = False, 0
    since: float | None = None
    try:
        with crew:
            while not stop.is_set() and not leader.lost:
                pulse.beat()
                try:
                    if not repaired:
                        repair(site, leader.epoch)
                        repaired = True
                    since = _round(site, leader, crew, stop, pulse, since)
                    failures = 0
                except NotLeader:
                    break
                except (ModakError, psycopg.Error) as raised:
                    error = translate(raised) if isinstance(raised, psycopg.Error) else raised
                    if error.code in FATAL:
                        raise error from raised
                    log.error("cycle.failed", code=error.code, error=error.message, hint=error.hint)
                    stop.wait(_pause(failures, settings.cycle_interval_seconds))
                    failures += 1
            # What runs may end; then the lease goes, whatever still runs: its epoch keeps it from changing anything.
            # One that has lost the lease may be the only one left, so it waits less before it campaigns again.
            lease = site.settings.leader.lease_seconds
            patience = lease if stop.is_set() else lease / 2
            leader.leave_within(patience)
            crew.leave(patience)
    finally:
        pulse.doing = dict


def _round(
    site: Site, leader: Leader, crew: Crew, stop: threading.Event, pulse: Pulse, since: float | None = None
) -> float | None:
    """Look, offer, and wait until it is time for the next look; ends early when the lead is lost or all must end.

    What it leaves undone is part of the next one: `since` is when that began, and so is what is returned.
    """
    began = site.clock.monotonic()
    since = began if since is None else since
    pulse.last_cycle = site.clock.now().timestamp()
    look(site, crew)
    until = began + site.settings.tiering.cycle_interval_seconds
    drained = False
    while not stop.is_set() and not leader.lost:
        crew.check()
        rest = until - site.clock.monotonic()
        if not drained and (drained := crew.drained(min(max(rest, 0.0), 0.5))):
            pulse.cycle_seconds = site.clock.monotonic() - since
            metrics.cycled(pulse.cycle_seconds)
        if rest <= 0:
            break
        pulse.beat()
        if drained:
            stop.wait(min(rest, 0.5))
    crew.check()
    return None if drained else since


def look(site: Site, crew: Crew) -> None:
    """See what is due, and have it done."""
    site.follow_profiles()
    uri = site.settings.lake.catalog_uri
    try:
        with site.connect(autocommit=True) as conn:
            metrics.PINS.inc(pins.sweep(conn))
            seen = glance(conn, uri)
    except psycopg.Error as error:
        raise translate(error) from error
    crew.offer(seen, publishing=uri is not None)


def cycle(
    site: Site,
    leader: Leader,
    schedule: Schedule,
    stop: threading.Event,
    on_event: OnEvent | None = None,
) -> None:
    """One round over all tables, done when all of it is done."""
    with Crew(schedule, lambda item: perform(site, leader, item, on_event), site.clock, 1) as crew:
        look(site, crew)
        while not stop.is_set() and not leader.lost and not crew.drained(0.5):
            continue
        crew.leave(site.settings.leader.lease_seconds)
        crew.check()


def perform(site: Site, leader: Leader, item: Item, on_event: OnEvent | None = None) -> bool:
    """Do one item; True: nothing was to be done."""
    if leader.lost:
        raise NotLeader("lease.lost", "The lease is lost.", retryable=True)
    event: tuple[str, dict[str, object]] | None = None
    rests = True
    match item.kind:
        case Kind.TIER:
            report = tier(site, leader.epoch, item.name)
            rests = not report.changed and not report.deferred
            if report.changed:
                event = ("pass", {"rows": report.rows, "dropped": len(report.dropped)})
        case Kind.FOLD:
            folded = fold(site, leader.epoch, item.name)
            rests = not folded.changed
            if folded.changed:
                event = ("fold", {"rows": folded.rows, "left": folded.left})
        case Kind.RETAIN:
            retained = retain(site, leader.epoch, item.name)
            rests = retained.moved_to is None
        case Kind.PUBLISH:
            publishing.publish(site, item.name)
    if event is not None and on_event is not None:
        on_event(event[0], {"table": str(item.name), **event[1]})
    return rests


def _pause(failures: int, longest: float) -> float:
    """Longer from failure to failure, and never the same for two workers."""
    return min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures, 20), longest) * random.uniform(0.5, 1.0)  # noqa: S311


def _warm(site: Site, pulse: Pulse) -> None:
    """The first job of a session is three times slower; better now than in the first pass."""
    from modak.spark.session import gateway_of, warm

    gateway = gateway_of(site.spark)
    pulse.jvm_alive = gateway.alive
    warm(site.spark)
