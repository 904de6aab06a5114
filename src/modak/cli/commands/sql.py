"""`sql` and `shell`: registered tables across heap and lake, asked in Spark SQL."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from modak.cli.output import on_terminal
from modak.core.errors import ModakError, UsageError


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Spark SQL that reads; - takes it from stdin.")],
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="table, csv, json (a line per row) or parquet.")
    ] = "table",
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write there, not to stdout.")] = None,
) -> None:
    """Query registered tables, heap and lake as one.

    Tables go by their own names, public.events or just events in schema public. All of them are read at one moment, and
    only the columns and rows that the query needs.
    """
    from modak.cli.answers import FORMATS
    from modak.cli.place import opened

    if format_ not in FORMATS:
        raise UsageError("usage.format", f"There is no format {format_!r}.", hint=f"Known: {', '.join(FORMATS)}.")
    if format_ == "parquet" and output is None:
        raise UsageError("usage.output", "Parquet goes into a file.", hint="Add --output answer.parquet.")
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError("usage.output", f"There is no folder {str(output.parent)!r}.")
    text = sys.stdin.read() if query == "-" else query
    if not text.strip():
        raise UsageError("usage.query", "There is no query.", hint='modak-worker sql "select count(*) from events"')
    with opened(log_level=_level()) as site:
        from modak.cli.answers import deliver
        from modak.tables.seam.mentions import wrong
        from modak.tables.seam.query import query as ask

        _quieten()
        try:
            with ask(site, site.spark, text) as frame:
                deliver(frame, format_, output.absolute() if output else None)
        except (ModakError, OSError):
            raise
        except Exception as error:
            raise wrong(error) from None


def _level() -> str:
    """Somebody at a terminal is told that Spark starts; a script wants its rows and nothing else."""
    return "info" if on_terminal(sys.stderr) else "warning"


def _quieten() -> None:
    """Spark's Python side prints every failed statement once more, as JSON; the command tells it in its own words."""
    import logging

    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def shell() -> None:
    """Ask queries in a conversation.

    Statements end with a semicolon, \\? lists the other commands. Every query sees its tables at one moment. From a
    pipe it runs a script and stops at the first error.
    """
    from modak.cli.place import opened

    with opened(log_level=_level()) as site:
        from modak.cli.shell import Shell, remember

        _quieten()
        interactive = sys.stdin.isatty()
        if interactive:
            remember(site.settings.home.path / "shell_history")
        raise typer.Exit(Shell(site, interactive=interactive).run())
