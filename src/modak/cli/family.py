"""The shape of `modak-worker`: how commands are grouped, how help looks, what an exit code means.

Help is drawn in panels in a terminal and in plain lines in a pipe; examples keep their line breaks in both.
`Family.main` is the one border between exceptions and exit codes, for the installed program and for tests alike.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from modak.cli import errors
from modak.cli.output import ReaderGone, on_terminal
from modak.core.errors import ModakError

PROGRAM = "modak-worker"

TABLES = "Tables"
WATCH = "Look and run"
LAKE = "Lake"
HOUSE = "This installation"


def examples(*lines: str) -> str:
    """The examples of a command, as its epilog."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


class Leaf(TyperCommand):
    """A command."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = _mode()
        _without_types_of_switches(self.get_params(ctx))
        super().format_help(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _verbatim(self.epilog, formatter)


class Branch(TyperGroup):
    """A group of commands, listed under the headings of its panels."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.rich_markup_mode = _mode()
        _without_types_of_switches(self.get_params(ctx))
        super().format_help(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _verbatim(self.epilog, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                heading = panel if isinstance(panel, str) else "Commands"
                panels.setdefault(heading, []).append((name, command.get_short_help_str(90)))
        width = max((len(name) for rows in panels.values() for name, _ in rows), default=0)
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])


class Family(Branch):
    """The program itself."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command line; ends in SystemExit with 0, 1, 2 or 130."""
        given = list(sys.argv[1:] if args is None else args)
        extra = {"prog_name": PROGRAM} | extra | {"standalone_mode": False}
        errors.set_debug(False)
        try:
            result = super().main(with_default(given), **extra)
            code = result if isinstance(result, int) else 0
            sys.stdout.flush()
        except (ReaderGone, BrokenPipeError):
            _silence_stdout()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except Exception as error:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.flush()
            code = errors.report(error)
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            # Typer takes any broken pipe for a closed terminal and ends silently; this one was a connection of ours.
            raise ModakError(
                "cli.connection_closed",
                "The other end of a connection was closed in mid-work.",
                hint="Run the command again; the next start repairs what was left half done.",
                retryable=True,
            ) from error


def with_default(args: Sequence[str]) -> list[str]:
    """The arguments with `run` put in where no command is named."""
    for at, argument in enumerate(args):
        if argument == "--debug":
            continue
        if argument.startswith("-") and argument not in ("--help", "-h", "--version"):
            return [*args[:at], "run", *args[at:]]
        return list(args)
    return [*args, "run"]


def _mode() -> Any:
    return "rich" if on_terminal() else None


def _without_types_of_switches(params: Iterable[Any]) -> None:
    """A switch takes no value; the panels would show `<bool>` beside it."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.display_type_rich = lambda ctx: None


def _verbatim(epilog: str | None, formatter: Any) -> None:
    if epilog:
        formatter.write_paragraph()
        formatter.write(epilog + "\n")


def _silence_stdout() -> None:
    # The interpreter flushes stdout once more when it ends, and would complain about the pipe.
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
