"""Everything that compaction keeps in a store besides data, in one hand."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex

from modak.core.clock import Clock, SystemClock
from modak.measurements.aside import Aside
from modak.measurements.claims import Claims
from modak.measurements.discover import Source
from modak.measurements.exports import Exports
from modak.measurements.leases import LEASE_TTL, SKEW, Lease, Readers
from modak.measurements.manifest import Held
from modak.measurements.manifests import ManifestManager, Unreadable
from modak.measurements.visible import Account
from modak.measurements.windows import Window
from modak.storage.objects import Objects

GRACE = timedelta(minutes=15)
"""How long inputs outlive the commit, and manifests the last delete: longer than anybody takes to list the store."""
CLAIM_TTL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long others are waited for."""

    grace: timedelta = GRACE
    claim_ttl_seconds: float = CLAIM_TTL_SECONDS
    lease_ttl: timedelta = LEASE_TTL
    skew: timedelta = SKEW


class State:
    """The state of one store, as one compactor or reader sees it."""

    def __init__(self, objects: Objects, clock: Clock | None = None, patience: Patience | None = None) -> None:
        self.objects = objects
        self.clock = clock or SystemClock()
        self.patience = patience or Patience()
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"
        self.manifests = ManifestManager(objects, self.clock)
        self.claims = Claims(objects, self.owner, self.clock, self.patience.claim_ttl_seconds)
        self.readers = Readers(objects, self.owner, self.patience.lease_ttl, self.patience.skew)
        self.aside = Aside(objects)
        self.exports = Exports(objects)

    def lease(self) -> Lease:
        """Make a reader known; to be done before it lists anything."""
        return Lease(self.objects, self.clock, self.patience.lease_ttl)

    def account(self, source: Source, window: Window | None = None) -> Account:
        """What manifests say now about the files of a measurement or window; to be read after the files were listed."""
        known = list(self.manifests.of(source, window))
        return Account.of(
            (each.manifest for each in known if isinstance(each, Held)),
            tuple(each.path for each in known if isinstance(each, Unreadable)),
        )
