"""From a lake value back to Postgres' text of it: the other direction of `parse`, for single rows.

An update of a cold row takes the old image out of the lake and hands it to Postgres again. One row at a time; nothing
here is for volume.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from modak.lake.decode import INT32_MAX, INT64_MAX
from modak.lake.types import MappedColumn

_DAY = 86_400_000_000
_SPECIAL = frozenset('{}",\\')


def render_text(mapped: MappedColumn, value: pa.Scalar) -> str | None:
    """The text that Postgres reads as the value of a column; None is NULL."""
    return _text(value, mapped.column.type)


def _text(value: Any, kind: str) -> str | None:
    if not value.is_valid:
        return None
    if kind.startswith("list<"):
        return "{" + ",".join(_element(each, kind[5:-1]) for each in value.values) + "}"
    if kind in {"date", "timestamp", "timestamptz"}:
        return _moment(value, kind)
    return _plain(value.as_py(), kind)


def _plain(value: Any, kind: str) -> str:
    if kind == "boolean":
        return "t" if value else "f"
    if kind == "binary":
        return "\\x" + bytes(value).hex()
    if kind in {"float", "double"}:
        return _float(np.float32(value) if kind == "float" else np.float64(value))
    return f"{value:f}" if kind.startswith("decimal") else str(value)


def _element(value: Any, kind: str) -> str:
    text = _text(value, kind)
    if text is None:
        return "NULL"
    plain = text and text.upper() != "NULL" and not _SPECIAL & set(text) and not any(map(str.isspace, text))
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _float(value: Any) -> str:
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    # The shortest digits that read back as the same number.
    return str(value)


def _moment(value: Any, kind: str) -> str:
    days_only = kind == "date"
    raw = value.cast(pa.int32() if days_only else pa.int64()).as_py()
    limit = INT32_MAX if days_only else INT64_MAX
    if abs(raw) == limit:
        return "infinity" if raw > 0 else "-infinity"
    days, micros = (raw, 0) if days_only else divmod(raw, _DAY)
    year, month, day = (int(part) for part in str(np.datetime64(days, "D")).rsplit("-", 2))
    # The year before 1 is 1 BC.
    text = f"{year if year > 0 else 1 - year:04d}-{month:02d}-{day:02d}"
    if not days_only:
        seconds, part = divmod(micros, 1_000_000)
        text += f" {seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{part:06d}"
        text += "+00" if kind == "timestamptz" else ""
    return text if year > 0 else f"{text} BC"
