"""`config`, `stop` and `version`: what belongs to this installation and to no table."""

from __future__ import annotations

from modak.cli.output import dump, paint, say
from modak.cli.output import table as grid
from modak.cli.parsing import JsonOption


def config(json: JsonOption = False) -> None:
    """Print every setting and where it comes from.

    Secrets are masked.
    """
    from modak.config import explain

    rows = explain()
    if json:
        dump(
            [
                {
                    "name": row.name,
                    "value": row.value_for_display,
                    "source": row.source,
                    "secret": row.secret,
                    "help": row.help,
                    "concern": row.concern,
                }
                for row in rows
            ]
        )
        return
    grid(
        ("Setting", "Value", "From"),
        [(row.name, _shown(row.value_for_display), row.source) for row in rows],
    )


def stop() -> None:
    """Stop the embedded Postgres; the data stays.

    The next command that needs it starts it again.
    """
    from modak.cli.quick import structlog_without_rich

    structlog_without_rich()
    from modak.cli import logs
    from modak.cli.errors import debugging
    from modak.cli.place import settings
    from modak.postgres.embedded import embedded

    chosen = settings()
    logs.configure(chosen.log.format, level="debug" if debugging() else "warning")
    if chosen.postgres.url is not None:
        say("MODAK_PG_URL is set: that server is not ours to stop.")
        return
    server = embedded(chosen.home.path)
    if not server.running():
        say("The embedded Postgres is not running.")
        return
    server.stop()
    say(f"{paint('stopped', 'green')} the embedded Postgres of {chosen.home.path}")


def version() -> None:
    """Print the version."""
    from modak import __version__

    say(f"modak-worker {__version__}")


def _shown(value: object) -> str:
    return "–" if value is None or value == "" else str(value)
