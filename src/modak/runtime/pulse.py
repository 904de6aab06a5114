"""What this process says of itself: its role, what it does, when it last heard of Postgres.

The daemon's loops write here; the health endpoints, `/metrics` and the heartbeat row in `modak.workers` (from which
`modak-worker top` and the API learn of all other processes) read. Memory: a few values and the items that run.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from modak import __version__
from modak.catalog import operators
from modak.core.clock import Clock, SystemClock
from modak.core.errors import ModakError
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime import working
from modak.runtime.leader import holder_name

log = structlog.get_logger()

Role = Literal["starting", "standby", "leading", "stopping"]

STUCK_SECONDS = 300.0
"""A loop that has not come round for so long hangs; nothing that it waits for takes longer."""


@dataclass(frozen=True, slots=True)
class Health:
    """One answer to a probe."""

    good: bool
    reasons: tuple[str, ...] = ()


@dataclass
class Pulse:
    """The state of one process; every field may be read at any time."""

    clock: Clock = field(default_factory=SystemClock)
    interval_seconds: float = 2.0
    address: str | None = None
    holder: str = field(default_factory=holder_name)
    role: Role = "starting"
    epoch: int | None = None
    last_cycle: float | None = None
    """When the last round over the tables began, in seconds since 1970."""
    cycle_seconds: float = 0.0
    doing: Callable[[], Mapping[str, Any]] = field(default=dict)
    jvm_alive: Callable[[], bool] = field(default=lambda: True)

    def __post_init__(self) -> None:
        now = self.clock.monotonic()
        self._started = now
        self._beat = now
        self._contact: float | None = None
        self._trouble = "postgres.not_asked_yet"
        self._ended = threading.Event()

    def beat(self) -> None:
        """The daemon's main loop came round."""
        self._beat = self.clock.monotonic()

    def became(self, role: Role, epoch: int | None = None) -> None:
        """The process has another role now."""
        self.role, self.epoch = role, epoch
        self.beat()

    def heard(self) -> None:
        """Postgres has answered."""
        self._contact = self.clock.monotonic()
        self._trouble = ""

    def missed(self, code: str) -> None:
        """Postgres has not answered, or not well."""
        self._trouble = code

    def live(self) -> Health:
        """Whether this process can go on; if not, only a restart helps."""
        reasons = []
        if self.clock.monotonic() - self._beat > STUCK_SECONDS:
            reasons.append("daemon.stuck")
        if not self.jvm_alive():
            reasons.append("spark.gateway_lost")
        return Health(not reasons, tuple(reasons))

    def ready(self) -> Health:
        """Whether this process does its part now: it knows its role, and Postgres answers."""
        reasons = list(self.live().reasons)
        if self.role in ("starting", "stopping"):
            reasons.append(f"daemon.{self.role}")
        silent = self._contact is None or self.clock.monotonic() - self._contact > 3 * self.interval_seconds + 5
        if self._trouble or silent:
            reasons.append(self._trouble or "postgres.silent")
        return Health(not reasons, tuple(reasons))

    @contextmanager
    def beating(self, dsn: Dsn) -> Iterator[None]:
        """Keep the row of this process in `modak.workers` fresh while the block runs, and take it away at the end."""
        thread = threading.Thread(target=self._write, args=(dsn,), name="modak-pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(timeout=10)

    def _write(self, dsn: Dsn) -> None:
        conn = None
        while not self._ended.is_set():
            try:
                if conn is None or conn.closed:
                    conn = connect(dsn, application="modak pulse")
                operators.beat(conn, self._row())
                self.heard()
            except Exception as error:
                self.missed(error.code if isinstance(error, ModakError) else "postgres.connection_lost")
                if conn is not None:
                    conn.close()
                conn = None
            self._ended.wait(self.interval_seconds)
        try:
            with conn or connect(dsn, application="modak pulse") as last:
                operators.leave(last, self.holder)
        except Exception:
            log.debug("pulse.not_taken_away", holder=self.holder)

    def shown(self) -> dict[str, Any]:
        """What runs, waits and fails here, whoever does it."""
        crew, others = self.doing(), working.shown()
        counts = crew.get("counts", {})
        return {
            **crew,
            **{key: [*crew.get(key, ()), *others[key]] for key in ("running", "failing")},
            # The lists end somewhere, their numbers do not.
            "counts": {key: counts.get(key, 0) + found for key, found in others["counts"].items()},
        }

    def _row(self) -> dict[str, Any]:
        return {
            "holder": self.holder,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
            "role": self.role,
            "epoch": self.epoch,
            "address": self.address,
            "age": self.clock.monotonic() - self._started,
            "doing": {**self.shown(), "cycle_seconds": round(self.cycle_seconds, 3), "last_cycle": self.last_cycle},
        }
