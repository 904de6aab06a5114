"""Modak keeps the cold half of a Postgres database in an open lake.

`modak.read(spark, "public.events")` and `modak.snapshot(spark)` read across heap and lake (`runtime/reading.py`);
`modak.update`, `modak.upsert` and `modak.delete` correct single rows wherever they are (`runtime/correcting.py`);
`modak.load` sends a batch to a running daemon (`runtime/loading.py`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "read": "reading",
    "read_lake": "reading",
    "snapshot": "reading",
    "update": "correcting",
    "upsert": "correcting",
    "delete": "correcting",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    # Found by name when first used: importing modak stays light, and every room may ask for its version.
    if name in _PUBLIC:
        return getattr(import_module(f"modak.runtime.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
