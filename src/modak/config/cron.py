"""Five-field cron texts, checked where they are read: a bad schedule is refused at start, not missed at night."""

from __future__ import annotations

import re

from modak.config.kinds import Kind
from modak.config.pairs import Malformed

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 7, _DAYS),
)
_PART = re.compile(r"(?:(?P<all>\*)|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?", re.ASCII)


def read_cron(text: str) -> str:
    """Check a schedule such as `5 * * * *` and return it with single blanks."""
    fields = text.lower().split()
    if len(fields) != len(_FIELDS):
        raise Malformed
    for field, (name, least, most, words) in zip(fields, _FIELDS, strict=True):
        for part in field.split(","):
            if not _fits(part, least, most, words):
                raise Malformed(f"the {name} is not understood")
    return " ".join(fields)


def _fits(part: str, least: int, most: int, words: tuple[str, ...]) -> bool:
    match = _PART.fullmatch(part)
    if match is None or (match["step"] is not None and not 1 <= int(match["step"]) <= most):
        return False
    if match["all"]:
        return True
    first = _number(match["first"], least, words)
    last = _number(match["last"], least, words) if match["last"] else first
    return first is not None and last is not None and least <= first <= last <= most


def _number(text: str, least: int, words: tuple[str, ...]) -> int | None:
    if text in words:
        return words.index(text) + least
    return int(text) if text.isdecimal() else None


CRON = Kind("a five-field cron schedule such as 5 * * * *", read_cron)
