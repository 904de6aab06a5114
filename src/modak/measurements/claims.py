"""Who works on what: locks inside a process, claims across processes and machines.

A claim is an object with an owner in it. It is taken by conditional create, kept by a heartbeat (compare-and-swap), and
given back by swapping it to free; it is never deleted, because a delete cannot be conditional. Whether an owner has
died is judged by the observer's own clock: a claim whose version has not changed for the time to live is expired.
Clocks of different machines are never compared.

A compactor that sleeps through its claim is not believed afterwards: its manifest will have been aborted, and the swap
that would commit it fails.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote, unquote

import structlog

from modak.core.clock import Clock
from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.measurements.layout import Place
from modak.measurements.manifest import MANIFEST_BASE_PATH
from modak.measurements.storetime import store_time
from modak.storage.objects import Meta, Objects

_log = structlog.get_logger()
_BEATS = 4


class LockManager:
    """Locks of this process, by name."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._guard = threading.Lock()

    def acquire_lock(self, key: str) -> bool:
        """Take a lock; false says that it is held."""
        with self._guard:
            if key in self._held:
                return False
            self._held.add(key)
            return True

    def release_lock(self, key: str) -> None:
        """Give a lock back; one that is not held is fine."""
        with self._guard:
            self._held.discard(key)

    def is_locked(self, key: str) -> bool:
        """Whether a lock is held."""
        with self._guard:
            return key in self._held


@dataclass(frozen=True, slots=True)
class ClaimHolder:
    """Who holds a claim, as far as the store tells."""

    path: str
    owner: str | None
    meta: Meta


def claim_path(place: Place) -> str:
    """Where the claim on a window lies; the names in it can be read back."""
    database, measurement = quote(place.database, safe=""), quote(place.measurement, safe="")
    window = place.window
    name = f"{window.level.value}-{window.folder.replace('/', '-')}"
    return f"{MANIFEST_BASE_PATH}/claims/{database}/{measurement}/{name}.json"


def claimed_names(path: str) -> tuple[str, str]:
    """Database and measurement of a claim."""
    database, measurement, _ = path.split("/")[-3:]
    return unquote(database), unquote(measurement)


class Claims:
    """The claims of one compactor."""

    def __init__(self, objects: Objects, owner: str, clock: Clock, ttl_seconds: float) -> None:
        self._objects = objects
        self.owner = owner
        self._clock = clock
        self.ttl_seconds = ttl_seconds
        self._mine: dict[str, Meta] = {}
        self._watched: dict[str, tuple[str, float]] = {}
        self._guard = threading.RLock()
        self._beat = 0

    def acquire(self, path: str) -> bool:
        """Take a claim if it is free or its owner has died."""
        with self._guard:
            if path in self._mine:
                return False
            reach("claim.before_acquire")
            meta = self._objects.create(path, self._body("held"))
            if meta is None:
                meta = self._from_other(path)
            if meta is None:
                return False
            self._mine[path] = meta
            self._watched.pop(path, None)
            reach("claim.acquired")
            return True

    def release(self, path: str) -> None:
        """Give a claim back; one that was lost meanwhile is not ours to give."""
        with self._guard:
            meta = self._mine.pop(path, None)
            if meta is None:
                return
            reach("claim.before_release")
            self._objects.swap(path, self._body("free"), meta)
            reach("claim.released")

    def holds(self, path: str) -> bool:
        """Whether the claim is still ours, by what the last heartbeat saw."""
        with self._guard:
            return path in self._mine

    def heartbeat(self) -> None:
        """Renew every claim; one that somebody else has taken is dropped."""
        with self._guard:
            for path, meta in list(self._mine.items()):
                renewed = self._objects.swap(path, self._body("held"), meta)
                if renewed is None:
                    renewed = self._if_ours(path)
                if renewed is None:
                    _log.warning("measurements.claim_lost", claim=path)
                    del self._mine[path]
                else:
                    self._mine[path] = renewed

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Renew all claims in the background for as long as the block lasts."""
        stop = threading.Event()

        def loop() -> None:
            while not stop.wait(self.ttl_seconds / _BEATS):
                try:
                    self.heartbeat()
                except ModakError as error:
                    _log.warning("measurements.heartbeat_failed", error=str(error))

        beater = threading.Thread(target=loop, daemon=True, name="measurements-heartbeat")
        beater.start()
        try:
            yield
        finally:
            stop.set()
            beater.join()

    def holder(self, path: str) -> ClaimHolder | None:
        """Who holds a claim; `None` where there has never been one."""
        found = self._objects.find(path)
        if found is None:
            return None
        said = _said(found.data)
        return ClaimHolder(path, said.get("owner") if said.get("state") == "held" else None, found.meta)

    def wait_for_dead(self, paths: Iterable[str]) -> list[str]:
        """The claims whose owners have not renewed them for long by the store's time; waits until that is certain."""
        holders = [holder for path in paths if (holder := self.holder(path)) is not None and holder.owner is not None]
        if not holders:
            return []
        now = store_time(self._objects, self.owner)
        dead = [each.path for each in holders if (now - each.meta.modified).total_seconds() >= self.ttl_seconds]
        if dead:
            _log.info("measurements.waiting_for_dead_owners", claims=len(dead), seconds=self.ttl_seconds)
            self._clock.sleep(self.ttl_seconds)
        return dead

    def _from_other(self, path: str) -> Meta | None:
        holder = self.holder(path)
        if holder is None:
            return None
        if holder.owner == self.owner:
            return self._if_ours(path)
        if holder.owner is not None and not self._expired(path, holder.meta):
            return None
        taken = self._objects.swap(path, self._body("held"), holder.meta)
        if taken is not None and holder.owner is not None:
            _log.warning("measurements.claim_taken_over", claim=path, owner=holder.owner)
        return taken if taken is not None else self._if_ours(path)

    def _expired(self, path: str, meta: Meta) -> bool:
        now = self._clock.monotonic()
        etag, since = self._watched.get(path, ("", now))
        if etag != meta.etag:
            since = now
            self._watched[path] = (meta.etag, now)
        return now - since >= self.ttl_seconds

    def _if_ours(self, path: str) -> Meta | None:
        """The version in the store, if we wrote it: the answer to a write can get lost."""
        found = self._objects.find(path)
        said = _said(found.data) if found is not None else {}
        return found.meta if found is not None and said.get("owner") == self.owner and said["state"] == "held" else None

    def _body(self, state: str) -> bytes:
        # The count makes every version differ, also on stores whose etag is a hash of the data.
        self._beat += 1
        return json.dumps({"state": state, "owner": self.owner, "beat": self._beat}).encode()


def _said(data: bytes) -> dict[str, str]:
    try:
        said = json.loads(data)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
