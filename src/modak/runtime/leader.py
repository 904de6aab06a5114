"""Leading: one process holds the lease and renews it while it works.

Renewal runs in a thread of its own, so a long export does not cost the lead. Losing the lease stops nothing by force:
every commit checks the epoch in its own transaction, and the loop looks at `lost` between steps. A worker that is to
end begins nothing new and lets the lease go on time, whatever still runs.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import structlog

from modak.catalog.lease import Epoch, Lease
from modak.core.errors import ModakError, NotLeader
from modak.tables.site import Site

log = structlog.get_logger()

_LAST_SECONDS = 1.0
"""What a thread of ours may take to notice that the lease was let go."""


class Leader:
    """The lease, held and renewed until it is left or lost."""

    def __init__(self, lease: Lease, epoch: Epoch, renew_seconds: float) -> None:
        self.epoch = epoch
        self._lease = lease
        self._pause = renew_seconds
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._turn = threading.Lock()
        self._leaves_at: float | None = None
        self._let_go_later: threading.Timer | None = None
        self._renewer = threading.Thread(target=self._renew, name="modak-lease", daemon=True)

    @classmethod
    def campaign(
        cls,
        site: Site,
        wait_seconds: float,
        stop: threading.Event | None = None,
        waits: Callable[[], None] = lambda: None,
        holder: str | None = None,
    ) -> Leader:
        """Take the lease, waiting for it up to `wait_seconds`; raises `NotLeader` when somebody else keeps it.

        `waits` is called again and again meanwhile; `holder` is who will be said to lead.
        """
        settings = site.settings.leader
        lease = Lease(site.dsn, holder or holder_name(), settings.lease_seconds, site.clock)

        def stopped() -> bool:
            waits()
            return stop is not None and stop.is_set()

        deadline = site.clock.monotonic() + wait_seconds
        while True:
            try:
                epoch = lease.campaign()
            except ModakError:
                lease.close()
                raise
            if epoch is not None:
                log.info("leader.acquired", epoch=epoch.number)
                return cls(lease, epoch, settings.lease_seconds / 3)
            if site.clock.monotonic() >= deadline or stopped():
                lease.close()
                raise NotLeader(
                    "lease.held",
                    "Another worker leads this database.",
                    hint="It does the same work by itself each cycle; stop it, or wait for it to end.",
                    retryable=True,
                )
            pause = min(settings.campaign_interval_seconds, max(deadline - site.clock.monotonic(), 0.05))
            lease.wait(pause, stopped)

    @property
    def lost(self) -> bool:
        """Whether the lease is gone, or has run out by our own clock; nothing that we do now would be accepted."""
        return self._lost.is_set() or self._lease.epoch is None

    def resign(self) -> None:
        """Stop leading: whoever looks at `lost` between steps ends its work."""
        self._lost.set()

    @property
    def ending(self) -> bool:
        """Whether nothing new may begin: the lease is gone, or will be let go."""
        return self._leaves_at is not None or self.lost

    def leave_within(self, seconds: float) -> None:
        """Begin nothing new, and let the lease go after so long at the latest; what comes later is refused."""
        if self._leaves_at is not None:
            return
        self._leaves_at = time.monotonic() + seconds
        self._let_go_later = threading.Timer(seconds, self._let_go)
        self._let_go_later.daemon = True
        self._let_go_later.start()

    def patience(self) -> float | None:
        """How long to wait at the end for work of ours: until the lease is let go, or else for as long as it takes."""
        return None if self._leaves_at is None else max(self._leaves_at + _LAST_SECONDS - time.monotonic(), 0.0)

    def __enter__(self) -> Leader:
        self._renewer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._renewer.join(timeout=10)
        if self._let_go_later is not None:
            self._let_go_later.cancel()
        self._let_go()

    def _let_go(self) -> None:
        with self._turn:
            gone = self.lost
            if self._lease.epoch is None and not self._lost.is_set():
                # Work has seen by the clock that it is over before the renewal could.
                log.warning("leader.lost", epoch=self.epoch.number)
            self._lost.set()
            try:
                if gone:
                    self._lease.close()
                else:
                    self._lease.release()
            except ModakError as trouble:
                log.info("leader.release_failed", because=trouble.code)

    def _renew(self) -> None:
        while not self._ended.wait(self._pause):
            try:
                with self._turn:
                    held = not self._lost.is_set() and self._lease.renew()
            except ModakError as error:
                # Postgres may be away for a moment; the lease decides by the clock whether that was too long.
                log.warning("leader.renewal_failed", because=error.code)
                held = self._lease.epoch is not None
            if not held:
                if self._leaves_at is not None:
                    return
                log.warning("leader.lost", epoch=self.epoch.number)
                self._lost.set()
                return


def holder_name() -> str:
    """Who leads, readable for an operator and different for every process."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
