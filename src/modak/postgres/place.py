"""Which Postgres the settings mean: the one they name, or else the embedded server, which is started if need be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modak.postgres.dsn import Dsn

if TYPE_CHECKING:
    from modak.config import Settings


def dsn_of(settings: Settings) -> Dsn:
    """The address of the default database, running."""
    given = settings.postgres
    if given.url is not None:
        return Dsn.parse(given.url, given.user, given.password.get_secret_value())
    from modak.postgres.embedded import embedded

    server = embedded(settings.home.path)
    server.start()
    return server.dsn()
