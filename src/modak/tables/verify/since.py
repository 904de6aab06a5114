"""A tier key as a person writes it. Pure."""

from __future__ import annotations

from datetime import date, datetime

from modak.core.axis import Axis, TierKey
from modak.core.errors import UsageError


def since_key(axis: Axis, text: str) -> TierKey:
    """The axis value of a number, a date or a timestamp (UTC unless it says otherwise)."""
    try:
        if axis is Axis.INTEGER:
            return int(text)
        if axis is Axis.DATE:
            return axis.of(date.fromisoformat(text))
        return axis.of(datetime.fromisoformat(text))
    except ValueError:
        like = {"integer": "1000", "date": "2024-01-31"}.get(str(axis), "2024-01-31T12:00:00")
        raise UsageError(
            "usage.since", f"--since {text!r} is not a tier key of this table.", hint=f"Write it like {like}."
        ) from None
