"""Waiting until a mirror has come to a place in the WAL: what was committed before it is then in the lake."""

from __future__ import annotations

import structlog

from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.postgres.changes.lsn import read_lsn
from modak.tables.site import Site

log = structlog.get_logger()

PAUSE_SECONDS = 0.2


def wait_for(site: Site, name: TableName, position: int, patience_seconds: float) -> None:
    """Return when F has passed the position; a mirror that does not come in time is an error."""
    deadline = site.clock.monotonic() + patience_seconds
    told = False
    while True:
        frontier = site.reader.state(name).cutline.frontier
        if frontier is not None and read_lsn(frontier) >= position:
            return
        if site.clock.monotonic() >= deadline:
            raise ModakError(
                "mirror.behind",
                f"The mirror of {name} has not come to the present within {patience_seconds:g} seconds.",
                hint="Is the daemon (modak-worker run) up? What modak-worker status says about the table helps.",
                retryable=True,
            )
        if not told:
            log.info("mirror.waiting", table=str(name), frontier=frontier)
            told = True
        site.clock.sleep(PAUSE_SECONDS)
