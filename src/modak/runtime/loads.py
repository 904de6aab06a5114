"""Staged loads, adopted beside the tables for as long as this process leads.

In a thread of its own, with a site of its own: a long tiering holds up no adoption. It stops when the lead ends, after
the commit that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import structlog

from modak.catalog import loads
from modak.core.errors import ModakError, NotLeader
from modak.core.names import TableName
from modak.postgres.connect import translate
from modak.runtime import working
from modak.runtime.leader import Leader
from modak.runtime.stores import Repeating
from modak.tables.load.adopt import adopt, sweep
from modak.tables.site import Site

log = structlog.get_logger()


@contextmanager
def serving(site: Site, leader: Leader) -> Iterator[None]:
    """Adopt staged loads while the block runs."""
    own = Site(site.settings, site.dsn, site.clock)
    if "spark" in vars(site):
        own.__dict__["spark"] = site.spark
    try:
        seconds = site.settings.tiering.cycle_interval_seconds
        with Repeating("loads", seconds, lambda: adopt_all(own, leader), leader.patience):
            yield
    finally:
        own.close()


def adopt_all(site: Site, leader: Leader) -> int:
    """One round: every table with staged labels, then the folders that are left over; returns adopted labels."""
    if leader.ending:
        return 0
    site.follow_profiles()
    done = 0
    try:
        with site.connect(autocommit=True) as conn:
            names = [TableName(schema, name) for schema, name in loads.waiting(conn)]
        for name in names:
            try:
                with working.doing("adopt", str(name)):
                    done += adopt(site, leader.epoch, name).labels
                working.well("adopt", str(name))
            except NotLeader:
                return done
            except ModakError as error:
                log.error("load.adoption_failed", table=str(name), code=error.code, error=error.message)
                working.failed("adopt", str(name), error, site.settings.tiering.cycle_interval_seconds)
        sweep(site)
    except psycopg.Error as error:
        raise translate(error) from error
    return done
