"""Files that cannot be merged, remembered by version, so that they do not count again at every cycle.

One small object per file, named after the hashes of path and etag: whether a file is known is told by a listing alone.
A file that is replaced has another etag and gets another chance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

from modak.core.faults import reach
from modak.measurements.discover import Source
from modak.measurements.manifest import MANIFEST_BASE_PATH
from modak.storage.objects import Meta, Objects


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that was left uncompacted, and why."""

    path: str
    etag: str
    reason: str


class Aside:
    """The files of a store that were set aside."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def remember(self, source: Source, files: Iterable[SetAside]) -> None:
        """Keep files in mind."""
        for file in files:
            body = json.dumps({"path": file.path, "etag": file.etag, "reason": file.reason}).encode()
            reach("aside.before_remember")
            self._objects.put(f"{_folder(source)}/{_key(file.path, file.etag)}.json", body)
            reach("aside.remembered")

    def known(self, source: Source) -> Known:
        """What has been set aside of a measurement."""
        names = (meta.path.rpartition("/")[2] for meta in self._objects.list(_folder(source)))
        return Known(frozenset(name.removesuffix(".json") for name in names))

    def all(self, source: Source | None = None) -> Iterator[SetAside]:
        """Every file that was set aside, with the reason."""
        for meta in self._objects.list(_folder(source) if source else f"{MANIFEST_BASE_PATH}/aside"):
            found = self._objects.find(meta.path)
            if found is not None:
                said = json.loads(found.data)
                yield SetAside(said["path"], said["etag"], said["reason"])


@dataclass(frozen=True, slots=True)
class Known:
    """Versions of files that were set aside."""

    keys: frozenset[str]

    def __contains__(self, meta: object) -> bool:
        return bool(self.keys) and isinstance(meta, Meta) and _key(meta.path, meta.etag) in self.keys


def _folder(source: Source) -> str:
    return f"{MANIFEST_BASE_PATH}/aside/{quote(source.database, safe='')}/{quote(source.measurement, safe='')}"


def _key(path: str, etag: str) -> str:
    return hashlib.sha256(f"{path}\0{etag}".encode()).hexdigest()[:32]
