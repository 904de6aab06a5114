"""The store's own time: what it says when something is written now. Times of one clock can be compared."""

from __future__ import annotations

from datetime import datetime
from secrets import token_hex

from modak.measurements.manifest import MANIFEST_BASE_PATH
from modak.storage.objects import Objects


def store_time(objects: Objects, owner: str) -> datetime:
    """Write a probe and see when the store says that this was."""
    path = f"{MANIFEST_BASE_PATH}/clock/{owner}.json"
    written = objects.put(path, token_hex(8).encode())
    found = objects.head(path)
    objects.delete([path])
    return found.modified if found is not None else written.modified
