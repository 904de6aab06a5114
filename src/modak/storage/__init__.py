"""Files of the lake: list, size, read and delete, on a local folder or an object store."""

from modak.storage.store import Entry, Store
from modak.storage.uri import local_path, normal

__all__ = ["Entry", "Store", "local_path", "normal"]
