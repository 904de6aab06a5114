"""From settings to a site: the embedded server where no other Postgres is named, and a catalog of our version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modak.catalog import migrate
from modak.config import Settings
from modak.core.clock import Clock, SystemClock
from modak.postgres.place import dsn_of
from modak.tables.site import Site


@contextmanager
def open_site(settings: Settings, *, clock: Clock | None = None) -> Iterator[Site]:
    """Find or start Postgres, bring the catalog up to date, and hand out the site."""
    site = Site(settings, dsn_of(settings), clock or SystemClock())
    try:
        with site.connect() as conn:
            migrate.migrate(conn)
        yield site
    finally:
        site.close()
