"""From settings to a site: the embedded server where no other Postgres is named, and a catalog of our version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modak.catalog import migrate
from modak.config import Settings
from modak.core.clock import Clock, SystemClock
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.tables.site import Site


@contextmanager
def open_site(settings: Settings, *, clock: Clock | None = None) -> Iterator[Site]:
    """Find or start Postgres, bring the catalog up to date, and hand out the site."""
    dsn = _dsn(settings)
    with connect(dsn) as conn:
        migrate.migrate(conn)
    site = Site(settings, dsn, clock or SystemClock())
    try:
        yield site
    finally:
        site.close()


def _dsn(settings: Settings) -> Dsn:
    given = settings.postgres
    if given.url is not None:
        return Dsn.parse(given.url, given.user, given.password.get_secret_value())
    from modak.postgres.embedded import embedded

    server = embedded(settings.home.path)
    server.start()
    return server.dsn()
