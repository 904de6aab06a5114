"""Cycles at set times. Cron is UTC; a tick that is missed while a cycle runs is made up for once, not for every time.

Tiers that are due together run in one cycle, the narrowest first, so that hours are drained before their day.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import structlog

from modak.core.clock import Clock, SystemClock
from modak.core.errors import ModakError, UsageError
from modak.core.faults import InjectedFault
from modak.measurements.cluster import ClusterGate, CompactionRoleGated
from modak.measurements.manager import CycleAlreadyRunning, Manager

_log = structlog.get_logger()
_LONGEST_NAP = 30.0
DEFAULT_SCHEDULE = "5 * * * *"


@dataclass(frozen=True)
class SchedulerConfig:
    """Which tiers of a manager run when. `schedules` gives a tier its own time; the others follow `schedule`."""

    manager: Manager
    tier_names: tuple[str, ...]
    schedule: str = DEFAULT_SCHEDULE
    schedules: Mapping[str, str] = field(default_factory=dict)
    enabled: bool = True
    cluster_gate: ClusterGate | None = None
    clock: Clock | None = None


class Scheduler:
    """Starts cycles when they are due."""

    def __init__(self, config: SchedulerConfig) -> None:
        enabled = {tier.get_tier_name() for tier in config.manager.tiers if tier.is_enabled()}
        if not config.tier_names:
            raise UsageError("measurements.schedule", "The scheduler needs at least one tier.")
        for name in config.tier_names:
            if name not in enabled:
                raise UsageError("measurements.schedule", f"The tier {name!r} is unknown or switched off.")
        self._schedules = {name: config.schedules.get(name, config.schedule) for name in config.tier_names}
        for text in self._schedules.values():
            # More than five fields would be seconds or years, which people do not mean.
            if len(text.split()) != 5 or not _cron().is_valid(text):
                raise UsageError(
                    "measurements.schedule", f"{text!r} is no schedule.", hint='Write five fields, such as "5 * * * *".'
                )
        self._manager = config.manager
        self._enabled = config.enabled
        self._gate = config.cluster_gate
        self._clock = config.clock or SystemClock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._due: dict[str, datetime] = {}
        self.last_failure: Exception | None = None
        """What ended the last cycle that was due, if it did not end well."""

    def start(self) -> None:
        """Begin to wait for the next time; a node that is gated, or a scheduler switched off, stays idle."""
        if self.is_running() or not self._enabled:
            return
        if self._gated():
            assert self._gate is not None
            _log.info("measurements.scheduler_gated", role=self._gate.role())
            return
        self._stop.clear()
        now = self._clock.now()
        self._due = {name: self._next(name, now) for name in self._schedules}
        self._thread = threading.Thread(target=self._loop, daemon=True, name="measurements-scheduler")
        self._thread.start()

    def stop(self, patience: float | None = None) -> None:
        """Wait for the cycle that runs, no longer than given, then end; doing it twice is fine."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(patience)
            self._thread = None

    def trigger_now(self, database: str | None = None) -> int:
        """Run a cycle now; its id."""
        if self._gated():
            assert self._gate is not None
            raise CompactionRoleGated(self._gate.role())
        names = list(self._schedules)
        if database is not None:
            return self._manager.run_compaction_cycle_for_database(database, names)
        return self._manager.run_compaction_cycle_for_tiers(names)

    def is_running(self) -> bool:
        """Whether the scheduler waits for its next time or runs a cycle."""
        return self._thread is not None and self._thread.is_alive()

    def status(self) -> dict[str, Any]:
        """What is due when."""
        return {
            "enabled": self._enabled,
            "running": self.is_running(),
            "gated": self._gated(),
            "schedules": dict(self._schedules),
            "next_runs": {name: due.isoformat() for name, due in self._due.items()} if self.is_running() else {},
            "cycle_running": self._manager.is_cycle_running(),
            "cycle_id": self._manager.get_current_cycle_id(),
            "last_error": "" if self.last_failure is None else _told(self.last_failure),
        }

    def tick(self) -> int | None:
        """Run what is due; the id of the cycle, `None` if nothing was."""
        now = self._clock.now()
        due = [name for name, at in self._due.items() if at <= now]
        if not due:
            return None
        # However many times were missed, the next one is in the future.
        self._due.update({name: self._next(name, now) for name in due})
        if self._gated():
            return None
        try:
            done = self._manager.run_compaction_cycle_for_tiers(due)
            self.last_failure = None
            return done
        except CycleAlreadyRunning:
            # Somebody has started one by hand; ours comes right after it.
            self._due.update(dict.fromkeys(due, now))
            return None
        except InjectedFault:
            raise
        except ModakError as error:
            self.last_failure = error
            _log.error("measurements.cycle_failed", code=error.code, error=error.message, hint=error.hint)
            return None
        except Exception as crash:
            # The next time comes all the same; a scheduler that has died would be missed by nobody.
            self.last_failure = crash
            _log.exception("measurements.cycle_failed", code="measurements.crashed")
            return None

    def _loop(self) -> None:
        while not self._stop.is_set():
            self.tick()
            soonest = min(self._due.values())
            nap = (soonest - self._clock.now()).total_seconds()
            self._stop.wait(min(max(nap, 1.0), _LONGEST_NAP))

    def _next(self, name: str, after: datetime) -> datetime:
        found: datetime = _cron()(self._schedules[name], after.astimezone(UTC)).get_next(datetime)
        return found

    def _gated(self) -> bool:
        return self._gate is not None and not self._gate.can_compact()


def _told(error: Exception) -> str:
    return error.message if isinstance(error, ModakError) else f"{type(error).__name__}: {error}"


def _cron() -> Any:
    from croniter import croniter  # type: ignore[import-untyped]

    return croniter
