"""Readers make themselves known, so that no file goes away under them.

A reader registers before it lists and renews while it reads. Inputs of a committed job stay for as long as somebody may
have listed them before the commit. Whether a lease is alive is judged by the store's own time: of the lease's last
renewal and of a probe that the asker writes.
"""

from __future__ import annotations

import json
import threading
from datetime import datetime, timedelta
from secrets import token_hex

import structlog

from modak.core.clock import Clock
from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.measurements.manifest import MANIFEST_BASE_PATH
from modak.measurements.storetime import store_time
from modak.storage.objects import Objects

READERS = f"{MANIFEST_BASE_PATH}/readers"
LEASE_TTL = timedelta(minutes=5)
SKEW = timedelta(minutes=5)
"""How far the clocks of readers and compactors may differ."""
_log = structlog.get_logger()


class Lease:
    """A reader's promise to be there; renewed in the background until it is released."""

    def __init__(self, objects: Objects, clock: Clock, ttl: timedelta = LEASE_TTL) -> None:
        self._objects = objects
        self._path = f"{READERS}/{clock.now():%Y%m%dt%H%M%S}-{token_hex(6)}.json"
        self._since = clock.now()
        self._beat = 0
        self._stop = threading.Event()
        reach("lease.before_register")
        self._renew()
        reach("lease.registered")
        self._thread = threading.Thread(target=self._loop, args=(ttl / 4,), daemon=True, name="measurements-reader")
        self._thread.start()

    def release(self) -> None:
        """Let go; doing it twice is fine."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        try:
            self._objects.delete([self._path])
        except ModakError as error:
            _log.warning("measurements.lease_left", lease=self._path, error=str(error))

    def _loop(self, pause: timedelta) -> None:
        while not self._stop.wait(pause.total_seconds()):
            try:
                self._renew()
            except ModakError as error:
                _log.warning("measurements.lease_not_renewed", lease=self._path, error=str(error))

    def _renew(self) -> None:
        self._beat += 1
        self._objects.put(self._path, json.dumps({"since": self._since.isoformat(), "beat": self._beat}).encode())


class Readers:
    """Who reads now."""

    def __init__(self, objects: Objects, owner: str, ttl: timedelta = LEASE_TTL, skew: timedelta = SKEW) -> None:
        self._objects = objects
        self._owner = owner
        self._ttl = ttl
        self._skew = skew

    def since(self) -> datetime | None:
        """When the longest reader that is alive began; dead ones are removed. `None` if nobody reads."""
        leases = list(self._objects.list(READERS))
        if not leases:
            return None
        now = store_time(self._objects, self._owner)
        oldest: datetime | None = None
        for lease in leases:
            if now - lease.modified >= self._ttl:
                self._objects.delete([lease.path])
                continue
            begun = self._begun(lease.path) or lease.modified - self._ttl
            oldest = begun if oldest is None else min(oldest, begun)
        return oldest

    def block(self, committed: datetime) -> bool:
        """Whether somebody may have listed the store before a commit."""
        since = self.since()
        return since is not None and since - self._skew <= committed

    def _begun(self, path: str) -> datetime | None:
        found = self._objects.find(path)
        try:
            return datetime.fromisoformat(json.loads(found.data)["since"]) if found is not None else None
        except (ValueError, KeyError, TypeError):
            return None
