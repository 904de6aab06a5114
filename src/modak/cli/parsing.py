"""Reading flag values that mean more than a string; whatever cannot be read is a `UsageError` and exit code 2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import typer

from modak.core.axis import Axis
from modak.core.errors import UsageError

TableOption = Annotated[
    str, typer.Option("--table", metavar="SCHEMA.TABLE", help="The table; without a schema, public is meant.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]

_COLUMN = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\s",]+))\s*')
_POSITIVE_TIME = Axis.TIMESTAMPTZ


def columns(flag: str, text: str) -> tuple[str, ...]:
    """Column names, comma-separated; unquoted ones fold to lower case as in SQL."""
    names: list[str] = []
    at = 0
    while True:
        match = _COLUMN.match(text, at)
        if match is None:
            break
        names.append(match[1].replace('""', '"') if match[1] is not None else match[2].lower())
        at = match.end()
        if at == len(text):
            return tuple(names)
        if text[at] != ",":
            break
        at += 1
    raise UsageError("usage.columns", f"{flag} {text!r} is not a list of columns.", hint=f"Write {flag} tenant_id,id.")


def column(flag: str, text: str) -> str:
    """One column name."""
    found = columns(flag, text)
    if len(found) != 1:
        raise UsageError("usage.columns", f"{flag} takes one column, not {len(found)}.")
    return found[0]


def check_length(flag: str, text: str | None, *, least: int = 0) -> None:
    """Refuse what can be a length on no axis; which units are allowed is known once the table has been looked at."""
    if text is None:
        return
    try:
        value = _POSITIVE_TIME.span(text)
    except UsageError as error:
        raise UsageError(error.code, f"{flag}: {error.message}", hint=error.hint) from None
    if value < least:
        raise UsageError(error_code(flag), f"{flag} must be at least {least}.")


def pairs(flag: str, entries: Iterable[str]) -> dict[str, str]:
    """`key=value` entries; a key may appear once."""
    found: dict[str, str] = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        key = key.strip()
        if not equals or not key:
            # The entry may hold a secret, so it is not quoted.
            raise UsageError(error_code(flag), f"{flag} takes key=value.", hint=f"For instance {flag} name=value.")
        if key in found:
            raise UsageError(error_code(flag), f"{flag} sets {key!r} twice.")
        found[key] = value.strip()
    return found


def error_code(flag: str) -> str:
    """`--chunk-rows` → `usage.chunk_rows`."""
    return "usage." + flag.lstrip("-").replace("-", "_")
