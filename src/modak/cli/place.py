"""Opening the world for one command: settings, the log, the database. Heavy rooms are imported here and not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from modak.cli.errors import debugging

if TYPE_CHECKING:
    from modak.config import Settings
    from modak.tables.site import Site


def settings() -> Settings:
    """The settings of this process; a typo in a variable's name ends the command here."""
    from modak.config import load

    return load()


@contextmanager
def opened(*, log_level: str = "warning") -> Iterator[Site]:
    """A site for one command. Only its warnings reach the terminal, because the command itself says what it did."""
    chosen = settings()

    from modak.cli.quick import structlog_without_rich

    structlog_without_rich()
    from modak.cli import logs
    from modak.runtime.opening import open_site

    logs.configure(chosen.log.format, level="debug" if debugging() else log_level)
    say_if_it_starts(chosen)
    with open_site(chosen) as site:
        yield site


def say_if_it_starts(chosen: Settings) -> None:
    """Tell that a server of our own has to be started, which takes a few seconds for the first command of a home."""
    if chosen.postgres.url is not None:
        return
    from modak.cli.output import note
    from modak.postgres.embedded import embedded

    if not embedded(chosen.home.path).running():
        note(f"Starting the embedded Postgres of {chosen.home.path} …")
