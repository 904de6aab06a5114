"""Values of the house as JSON: dataclasses, names, moments, enums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """What `json` understands, whatever comes in; NaN and the infinities are null."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type) and type(value).__str__ is object.__str__:
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return _single(value)


def entry(value: Any) -> dict[str, Any]:
    """One JSON object."""
    found: dict[str, Any] = plain(value)
    return found


def entries(value: Any) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    found: list[dict[str, Any]] = plain(value)
    return found


def _single(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, datetime | date) else str(value)
