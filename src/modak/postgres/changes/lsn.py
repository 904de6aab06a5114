"""Positions in the WAL: numbers here, `16/B374D848` in Postgres."""

from __future__ import annotations

import re

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def read_lsn(text: str) -> int:
    """The number of a position as Postgres writes it."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a position in the WAL")
    return int(match[1], 16) << 32 | int(match[2], 16)


def write_lsn(lsn: int) -> str:
    """A position as Postgres writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
