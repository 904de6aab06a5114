"""Lake maintenance beside the tables' own work, for as long as this process leads.

One thread claims forced passes and runs the scheduled ones, table after table; another looks at lake health, whether or
not maintenance is on. A long rewrite holds up neither tiering nor the pump: they commit in between, and the rewrite
takes what they changed along. A table whose pass cannot run waits alone, longer from failure to failure. Both threads
stop after the step that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, LiteralString

import structlog

from modak.catalog import operators
from modak.catalog.records import TableRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import ModakError, NotLeader
from modak.core.faults import InjectedFault
from modak.core.names import TableName
from modak.runtime import working
from modak.runtime.leader import Leader
from modak.tables.maintenance import erasures, freeing, health, requests
from modak.tables.maintenance.erase import erase_rows
from modak.tables.maintenance.run import MaintenanceReport, maintain
from modak.tables.maintenance.settling import beside
from modak.tables.site import Site
from modak.tables.tidy import finish_expiries
from modak.tables.upkeep import release_tags

log = structlog.get_logger()

POLL_SECONDS = 1.0
"""How often requests are looked for."""
FIRST_WAIT_SECONDS = 10.0
LONGEST_WAIT_SECONDS = 300.0
"""A table whose pass cannot run is tried again after so long; the pause doubles from the first to the longest."""
ERASING_SECONDS = 60.0
"""How often a table is looked at whose erased rows some reader still holds."""
FREEING_SECONDS = 60.0
"""How soon a table is looked at again whose freed files could not be deleted."""
_JOIN_SECONDS = 120.0
_LAST: LiteralString = "SELECT table_id, maintained_at FROM modak.lake_stats WHERE maintained_at IS NOT NULL"


@contextmanager
def serving(site: Site, leader: Leader) -> Iterator[None]:
    """Maintain and watch every table while the block runs."""
    stop = threading.Event()

    def stopping() -> bool:
        return stop.is_set() or leader.ending

    threads = [
        threading.Thread(
            target=_loop, args=("maintenance", Maintainer(site, leader, stopping).turn, POLL_SECONDS, stop)
        ),
        threading.Thread(target=_loop, args=("health", Watcher(site, leader).turn, _health_seconds(site), stop)),
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            patience = leader.patience()
            thread.join(_JOIN_SECONDS if patience is None else patience)


def _health_seconds(site: Site) -> float:
    return float(site.settings.maintenance.lake_stats_interval_seconds)


def _loop(name: str, turn: Callable[[], None], seconds: float, stop: threading.Event) -> None:
    threading.current_thread().name = f"modak-{name}"
    while not stop.is_set():
        try:
            turn()
        except NotLeader:
            return
        except ModakError as error:
            log.error(f"{name}.failed", code=error.code, error=error.message, hint=error.hint)
            if error.code == "spark.gateway_lost":
                return
        except Exception:
            log.exception(f"{name}.crashed")
        stop.wait(seconds)


class Watcher:
    """Health of every lake."""

    def __init__(self, site: Site, leader: Leader) -> None:
        self._site = site
        self._leader = leader

    def turn(self) -> None:
        """One look at everything."""
        writer = self._site.writer(self._leader.epoch)
        with working.doing("health"):
            health.collect_all(self._site, writer)


class Maintainer:
    """What is asked for first, then what is due; whoever asks meanwhile waits for one pass and not for all of them."""

    def __init__(self, site: Site, leader: Leader, stopping: Callable[[], bool]) -> None:
        self._site = site
        self._leader = leader
        self._stopping = stopping
        self._failures: dict[TableName, int] = {}
        self._again: dict[TableName, float] = {}
        self._looked: dict[TableName, float] = {}
        self._later: dict[TableName, float] = {}

    def turn(self) -> None:
        """Claim what is asked for, and run what is due."""
        self._asked()
        passed = set[TableName]()
        for name in self._freeing():
            if self._stopping():
                return
            self._free(name)
            passed |= self._asked()
        for name in [*self._erasing(), *(record.name for record in self._due())]:
            passed |= self._asked()
            if self._stopping():
                return
            if name not in passed:
                self._pass(name)

    def _asked(self) -> set[TableName]:
        """Do what is asked for; the tables that had a pass."""
        passed = set[TableName]()
        while not self._stopping() and erasures.asked_for(self._site):
            asked = erasures.claim(self._site.writer(self._leader.epoch))
            if asked is None:
                break
            erase(self._site, self._leader, asked, self._stopping)
        while not self._stopping() and requests.waiting(self._site):
            claimed = requests.claim(self._site.writer(self._leader.epoch))
            if claimed is None:
                break
            answer(self._site, self._leader, claimed, self._stopping)
            passed.add(claimed.table)
        return passed

    def _pass(self, name: TableName) -> None:
        """One scheduled pass; what keeps it from running is told, and holds up nobody else."""
        try:
            run(self._site, self._leader, name, self._stopping)
        except (NotLeader, InjectedFault):
            raise
        except Exception as raised:
            if isinstance(raised, ModakError) and raised.code == "spark.gateway_lost":
                raise
            times = min(self._failures.get(name, 0), 20)
            pause = min(FIRST_WAIT_SECONDS * 2.0**times, LONGEST_WAIT_SECONDS)
            self._failures[name] = working.failed("maintenance", str(name), raised, pause)
            self._again[name] = self._site.clock.monotonic() + pause
            fields = {"table": str(name), "again_in_seconds": round(pause)}
            if isinstance(raised, ModakError):
                log.error("maintenance.failed", code=raised.code, error=raised.message, hint=raised.hint, **fields)
            else:
                log.error("maintenance.crashed", code="maintenance.crashed", exc_info=raised, **fields)
        else:
            self._failures.pop(name, None)
            self._again.pop(name, None)
            working.well("maintenance", str(name))

    def _freeing(self) -> list[TableName]:
        """Tables whose trims, or passes that were cut short, have left files to delete, whatever their policy says."""
        now = self._site.clock.monotonic()
        return [name for name in freeing.waiting(self._site) if self._later.get(name, now) <= now]

    def _free(self, name: TableName) -> None:
        writer, later = self._site.writer(self._leader.epoch), 1
        try:
            with working.doing("maintenance", str(name)):
                later = finish_expiries(self._site, writer, name)
        except (NotLeader, InjectedFault):
            raise
        except Exception as raised:
            if isinstance(raised, ModakError) and raised.code == "spark.gateway_lost":
                raise
            log.exception("expiry.crashed", table=str(name))
        self._later.pop(name, None)
        if later:
            self._later[name] = self._site.clock.monotonic() + FREEING_SECONDS

    def _erasing(self) -> list[TableName]:
        """Tables with snapshots that go as soon as their readers do, each now and then."""
        now = self._site.clock.monotonic()
        ready = [
            name
            for name in erasures.waiting(self._site)
            if now - self._looked.get(name, float("-inf")) >= ERASING_SECONDS and self._again.get(name, now) <= now
        ]
        self._looked.update(dict.fromkeys(ready, now))
        return ready

    def _due(self) -> list[TableRecord]:
        interval = timedelta(seconds=self._site.settings.maintenance.interval_seconds)
        with self._site.connect(autocommit=True) as conn:
            last = dict(conn.execute(_LAST).fetchall())
            held = operators.pauses(conn)
        now, patient = self._site.clock.now(), self._site.clock.monotonic()
        # A table that never had a pass is counted from its registration: leads may be shorter than the interval.
        return [
            record
            for record in self._site.reader.tables()
            if record.table_id not in held
            and self._again.get(record.name, patient) <= patient
            and now - last.get(record.table_id, record.created_at) >= interval
        ]


def run(
    site: Site,
    leader: Leader,
    name: TableName,
    stopping: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Mapping[str, Any]], None] | None = None,
    engine: str | None = None,
) -> MaintenanceReport:
    """One pass over a table, with what belongs around it."""
    writer = site.writer(leader.epoch)
    with working.doing("maintenance", str(name)):
        report = maintain(site, leader.epoch, name, on_progress=on_progress, stopping=stopping, engine=engine)
    _release(site, writer, name)
    record = site.reader.table(name)
    if record is not None:
        health.maintained(writer, record.table_id)
    return report


def erase(site: Site, leader: Leader, asked: erasures.Asked, stopping: Callable[[], bool] = lambda: False) -> None:
    """Execute an erasure and tell whoever waits for it."""
    writer = site.writer(leader.epoch)
    log.info("erase.asked", table=str(asked.table), erasure=asked.erasure_id)
    try:
        done = erase_rows(
            site,
            leader.epoch,
            asked.table,
            asked.condition,
            settle=beside(stopping),
            erasure_id=asked.erasure_id,
            stopping=stopping,
        )
    except (NotLeader, InjectedFault):
        raise
    except ModakError as error:
        erasures.answer(writer, asked.erasure_id, {}, f"{error.code}: {error.message}")
        if error.code == "spark.gateway_lost":
            raise
        log.warning("erase.failed", table=str(asked.table), erasure=asked.erasure_id, code=error.code)
    except Exception as crash:
        # Whoever waits must not wait for ever.
        erasures.answer(writer, asked.erasure_id, {}, f"erase.crashed: {type(crash).__name__}")
        raise
    else:
        erasures.answer(writer, asked.erasure_id, asdict(done), None)


def _release(site: Site, writer: CatalogWriter, name: TableName) -> None:
    """Stale tags go; a neighbour that is just doing the same is welcome to it."""
    try:
        release_tags(site, writer, name)
    except NotLeader:
        raise
    except ModakError as error:
        log.info("maintenance.tags_later", table=str(name), because=error.code)


def answer(
    site: Site,
    leader: Leader,
    claimed: requests.Claimed,
    stopping: Callable[[], bool] = lambda: False,
    engine: str | None = None,
) -> MaintenanceReport | None:
    """Run a forced pass and tell whoever waits for it."""
    writer = site.writer(leader.epoch)
    log.info("maintenance.requested", table=str(claimed.table), request=claimed.request_id)
    try:
        report = run(
            site,
            leader,
            claimed.table,
            stopping,
            lambda progress: requests.tell(writer, claimed.request_id, progress),
            engine,
        )
    except (NotLeader, InjectedFault):
        raise
    except ModakError as error:
        requests.finish(writer, claimed.request_id, {}, f"{error.code}: {error.message}", None)
        if error.code == "spark.gateway_lost":
            raise
        return None
    except Exception as crash:
        # Whoever waits must not wait for ever.
        requests.finish(writer, claimed.request_id, {}, f"maintenance.crashed: {type(crash).__name__}", None)
        raise
    failed = "; ".join(f"{one.name}: {one.error}" for one in report.failed)
    requests.finish(writer, claimed.request_id, report.plain(), failed or None, report.op_id)
    return report
