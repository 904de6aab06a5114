"""How a command speaks: tables and colour in a terminal, plain lines in a pipe, JSON for scripts.

Results go to stdout, what happens on the way goes to stderr, so that a pipe carries results only. Rich is imported only
when there is a terminal to draw on. `NO_COLOR` takes the colour away and leaves the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from enum import Enum
from typing import IO, Any

import typer

_ACRONYM_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def on_terminal(stream: IO[str] | None = None) -> bool:
    """Whether a person is likely to be looking at the stream."""
    stream = stream if stream is not None else sys.stdout
    return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"


def colourful(stream: IO[str] | None = None) -> bool:
    """Whether the stream may carry colour."""
    return on_terminal(stream) and not os.environ.get("NO_COLOR")


class ReaderGone(Exception):
    """Whoever read our stdout has stopped reading; there is nobody left to tell anything."""


def say(text: str = "") -> None:
    """One line of the result."""
    try:
        typer.echo(text)
    except BrokenPipeError as error:
        raise ReaderGone from error


def note(text: str) -> None:
    """One line about what happens, outside of the result."""
    with contextlib.suppress(BrokenPipeError):
        typer.echo(text, err=True)


def dump(value: object) -> None:
    """The result as JSON, for scripts."""
    say(json.dumps(value, indent=2, default=_plain, ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: frozenset[str] = frozenset()) -> None:
    """Rows under headings; `right` names the columns of numbers."""
    lines = [tuple(row) for row in rows]
    if on_terminal():
        _draw(columns, lines, right)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *lines, strict=True)]
    for line in (tuple(name.lower() for name in columns), *lines):
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        )
        say("  ".join(cells).rstrip())


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the terminal is wide enough for the table; a pipe always is."""
    if not on_terminal():
        return True
    widths = (max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True))
    return sum(width + 3 for width in widths) <= typer.get_terminal_size().columns


def fields(pairs: Mapping[str, str]) -> None:
    """Names and values, one pair per line."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        say(f"{paint(name.ljust(width), 'dim')}  {value}".rstrip())


def paint(text: str, style: str, stream: IO[str] | None = None) -> str:
    """The text in a style, where colour is wanted."""
    if not colourful(stream):
        return text
    dim, bold = style == "dim", style == "bold"
    return typer.style(text, fg=None if dim or bold else style, dim=dim or None, bold=bold or None)


def size(count: float) -> str:
    """Bytes for people: `61.3 MB`."""
    for unit in _ACRONYM_UNITS:
        if abs(count) < 1000 or unit == _ACRONYM_UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def number(count: float) -> str:
    """A count for people: `1,000,000`."""
    return f"{count:,.0f}"


def count(amount: int, noun: str) -> str:
    """So many of something: `1 row`, `1,200 rows`."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def duration(seconds: float) -> str:
    """A span of time for people: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def record(value: Any) -> dict[str, Any]:
    """A frozen dataclass as a JSON object."""
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _plain(value: object) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)


def _draw(columns: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(_escape(cell) for cell in row))
    Console().print(grid)


def _escape(cell: str) -> str:
    from rich.markup import escape

    return escape(cell)
