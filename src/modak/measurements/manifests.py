"""Manifests in the store: written, listed, moved on by compare-and-swap.

Manifests lie in `_compaction_state/{tier}/{database}/{partition with _}_{job id}.json`, next to the folders of claims,
readers, set-aside files, exports and history, which no tier can be named after. The name tells the window, so of the
many manifests that a busy store has, only those are read that can speak of the files in question.

Memory: one manifest at a time; whoever gathers them holds those of one window or one measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import structlog

from modak.core.clock import Clock, SystemClock
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.measurements.discover import Source
from modak.measurements.manifest import MANIFEST_BASE_PATH, Held, Manifest, ManifestStatus
from modak.measurements.windows import Level, Window, window_at
from modak.storage.objects import Objects

RESERVED = frozenset({"claims", "readers", "aside", "history", "clock", "exports"})
_OF_OURS = re.compile(r"(.+)_\d{8}t\d{9}-[0-9a-f]{8}\.json")
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A manifest that says nothing; the partition in its name is left alone until somebody has looked."""

    path: str


class ManifestManager:
    """Reads and writes the manifests of a store."""

    def __init__(self, storage_backend: Objects, clock: Clock | None = None) -> None:
        self.storage_backend = storage_backend
        self.clock = clock or SystemClock()
        self._told: set[str] = set()

    @staticmethod
    def generate_manifest_path(tier: str, database: str, partition_path: str, job_id: str) -> str:
        """Where the manifest of a job lies."""
        return f"{MANIFEST_BASE_PATH}/{tier}/{database}/{partition_path.replace('/', '_')}_{job_id}.json"

    def path_of(self, manifest: Manifest) -> str:
        """Where this manifest lies."""
        return self.generate_manifest_path(manifest.tier, manifest.database, manifest.partition_path, manifest.job_id)

    def write_manifest(self, manifest: Manifest) -> str:
        """Write the manifest of a new job; its path."""
        return self.begin(manifest).meta.path

    def begin(self, manifest: Manifest) -> Held:
        """Write the manifest of a new job, and hold on to the version."""
        path = self.path_of(manifest)
        reach("manifest.before_begin")
        meta = self.storage_backend.create(path, manifest.to_json())
        if meta is None:
            # The answer to our own write may have been lost on its way.
            held = self._read(path)
            if held.manifest != manifest:
                raise Conflict("measurements.job_exists", f"There is a job {manifest.job_id} already.", retryable=False)
            meta = held.meta
        reach("manifest.begun")
        return Held(manifest, meta)

    def move(self, held: Held, status: ManifestStatus, **changes: Any) -> Held | None:
        """Take a manifest one step further; `None` says that somebody else has moved it meanwhile."""
        wanted = held.manifest.moved(status, self.clock.now(), **changes)
        reach("manifest.before_move")
        meta = self.storage_backend.swap(held.meta.path, wanted.to_json(), held.meta)
        if meta is None:
            found = self.storage_backend.find(held.meta.path)
            if found is None or found.data != wanted.to_json():
                return None
            meta = found.meta
        reach("manifest.moved")
        return Held(wanted, meta)

    def read_manifest(self, manifest_path: str) -> Manifest:
        """The manifest at a path."""
        return self._read(manifest_path).manifest

    def _read(self, path: str) -> Held:
        stored = self.storage_backend.get(path)
        return Held(Manifest.from_json(stored.data), stored.meta)

    def delete_manifest(self, manifest_path: str) -> None:
        """Take a manifest away; one that is gone already is fine."""
        reach("manifest.before_delete")
        self.storage_backend.delete([manifest_path])
        reach("manifest.deleted")

    def list_manifests(self, database: str | None = None) -> list[str]:
        """The paths of all manifests, or of those of one database; a listing that fails is an error, never "none"."""
        return list(self._paths(database))

    def _folders(self) -> Iterator[str]:
        for folder in self.storage_backend.folders(MANIFEST_BASE_PATH):
            if folder.rpartition("/")[2] not in RESERVED:
                yield folder

    def _paths(self, database: str | None) -> Iterator[str]:
        for folder in self._folders():
            prefix = folder if database is None else f"{folder}/{database}"
            for meta in self.storage_backend.list(prefix):
                if meta.path.endswith(".json"):
                    yield meta.path

    def _paths_of(self, source: Source, window: Window | None) -> Iterator[str]:
        """The paths of the manifests that can speak of a measurement, or of one window of it."""
        stem = f"{source.folder.replace('/', '_')}_"
        start = stem if window is None else stem + window.widened(Level.MONTH).folder.replace("/", "_")
        for folder in self._folders():
            prefix = f"{folder}/{source.database}"
            for meta in self.storage_backend.list(prefix, after=f"{prefix}/{start}"):
                name = meta.path.removeprefix(f"{prefix}/")
                if not name.startswith(start):
                    break
                if concerns(meta.path, source, window):
                    yield meta.path

    def held(self, database: str | None = None) -> Iterator[Held | Unreadable]:
        """All manifests with their versions; one that vanishes meanwhile is passed over."""
        return (each for path in self._paths(database) if (each := self.hold(path)) is not None)

    def of(self, source: Source, window: Window | None = None) -> Iterator[Held | Unreadable]:
        """As `held`, of those alone that can speak of a measurement, or of one window of it."""
        return (each for path in self._paths_of(source, window) if (each := self.hold(path)) is not None)

    def hold(self, path: str) -> Held | Unreadable | None:
        """The manifest at a path with its version, `None` if there is none any more."""
        try:
            return self._read(path)
        except ModakError as error:
            if error.code == "measurements.manifest_unreadable":
                if path not in self._told:
                    self._told.add(path)
                    _log.warning("measurements.manifest_unreadable", manifest=path)
                return Unreadable(path)
            if error.code != "storage.not_found":
                raise
            return None

    def get_files_in_manifests(self) -> set[str]:
        """Every file that a manifest speaks of, as input or output; read anew at every call."""
        live = (each.manifest for each in self.held() if isinstance(each, Held))
        return {path for manifest in live if manifest.status is not ManifestStatus.ABORTED for path in manifest.files}

    def is_file_in_manifest(self, file_path: str) -> bool:
        """Whether a manifest speaks of a file."""
        return file_path in self.get_files_in_manifests()

    def recover_orphaned_manifests(self) -> int:
        """Bring every job that was interrupted to its end; how many there were."""
        from modak.measurements.recovery import Recovery
        from modak.measurements.state import State

        return Recovery(State(self.storage_backend, self.clock)).recover().recovered


def concerns(path: str, source: Source, window: Window | None = None) -> bool:
    """Whether a manifest can speak of a measurement, or of one window of it, by its path; in doubt it does."""
    stem = f"{source.folder.replace('/', '_')}_"
    name = path.rpartition("/")[2]
    if not name.startswith(stem):
        return False
    match = _OF_OURS.fullmatch(name.removeprefix(stem))
    if match is None:
        return True
    other = window_at(match[1].replace("_", "/"))
    # Where no window stands behind the name, it is the beginning of a longer one.
    return other is not None and (window is None or other in window or window in other)
