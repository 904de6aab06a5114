"""Tables that are no longer registered leave the foreign catalog of `MODAK_CATALOG_URI`; their files stay.

Unregistering files the withdrawal in its own transaction, so it is never forgotten. The command tries at once; while
the catalog is away, the leader tries again and again. A name that was registered anew is left to its publication; one
under which the catalog shows a table that lies elsewhere is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from modak.catalog import publications
from modak.catalog.publications import Withdrawal
from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.runtime.leader import Leader
from modak.runtime.publishing import ForeignCatalog, foreign_catalog
from modak.runtime.stores import Repeating
from modak.tables.site import Site

log = structlog.get_logger()


@contextmanager
def serving(site: Site, leader: Leader) -> Iterator[None]:
    """Take out what waits, while the block runs."""
    if site.settings.lake.catalog_uri is None:
        yield
        return
    seconds = site.settings.tiering.cycle_interval_seconds
    with Repeating("withdraw", seconds, lambda: withdraw_all(site), leader.patience):
        yield


def withdraw_all(site: Site) -> int:
    """Take every table that waits out of the catalog; one that cannot be taken out holds up no other."""
    foreign = foreign_catalog(site)
    if foreign is None:
        return 0
    with site.connect(autocommit=True) as conn:
        waiting = publications.waiting(conn, foreign.uri)
    failure: ModakError | None = None
    for entry in waiting:
        try:
            _withdraw(site, foreign, entry)
        except ModakError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return len(waiting)


def _withdraw(site: Site, foreign: ForeignCatalog, entry: Withdrawal) -> None:
    levels, table = entry.lake.namespace, entry.lake.name
    with publications.turn(site.dsn, entry.lake) as conn:
        if publications.is_registered(conn, entry.lake):
            log.info("publish.registered_again", lake=str(entry.lake))
        else:
            prefix = foreign.prefix()
            shown = foreign.shows(prefix, levels, table)
            if shown and not shown.startswith(entry.location.rstrip("/") + "/"):
                log.warning("publish.left_alone", lake=str(entry.lake), location=entry.location)
            else:
                reach("publish.before_withdrawal")
                foreign.forget(prefix, levels, table)
                reach("publish.after_withdrawal")
                log.info("publish.withdrawn", lake=str(entry.lake))
        publications.withdrawn(conn, foreign.uri, entry)
