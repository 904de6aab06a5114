"""The manifest of a schema: which files are the store, as a value, and the ways in which it may change.

Every change is a pure function from one manifest to the next; `manifests.py` swaps them. The order of versions of a
row is the order in which their files were listed (`seq`), because no clock can be trusted with it. A path in `removed`
is on its way out and can never be listed again, so whoever was thought dead cannot publish it after all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from modak.core.errors import Conflict, ModakError
from modak.entities.registry import Attribute

REMEMBERED_OPS = 32
"""How many of the latest writers a manifest names, so that one whose answer was lost finds itself."""
BASE, DELTA = "base", "delta"


@dataclass(frozen=True, slots=True)
class StoredAttribute:
    """An attribute as a file has it."""

    id: int
    type: str
    binding: str = ""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One Parquet file of a schema, base or delta."""

    path: str
    min_row_id: str = ""
    max_row_id: str = ""
    min_time_slot: int = 0
    max_time_slot: int = 0
    size_bytes: int = 0
    level: str = ""
    row_count: int = 0
    checksum: str = ""
    seq: int = 0
    tombstones: int = 0
    attributes: Mapping[str, StoredAttribute] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The entry as the manifest holds it; what is empty is left out."""
        told: dict[str, Any] = {"path": self.path}
        for name in _PLAIN:
            if getattr(self, name):
                told[name] = getattr(self, name)
        if self.attributes:
            told["attributes"] = {
                name: [stored.id, stored.type, stored.binding] for name, stored in sorted(self.attributes.items())
            }
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> ManifestEntry:
        """Read an entry, also one of a writer that knows fewer fields."""
        attributes = {
            name: StoredAttribute(int(each[0]), str(each[1]), str(each[2]))
            for name, each in told.get("attributes", {}).items()
        }
        plain = {name: told[name] for name in _PLAIN if name in told}
        return cls(path=str(told["path"]), attributes=attributes, **plain)


_PLAIN = (
    "min_row_id",
    "max_row_id",
    "min_time_slot",
    "max_time_slot",
    "size_bytes",
    "level",
    "row_count",
    "checksum",
    "seq",
    "tombstones",
)


@dataclass(frozen=True, slots=True)
class Removed:
    """A file that is not part of the store any more, and since when, in epoch milliseconds."""

    path: str
    removed_at: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a schema. `last_flush_seq` moves whenever rows came from Postgres or must come from there again."""

    schema_id: int
    base: tuple[ManifestEntry, ...] = ()
    delta: tuple[ManifestEntry, ...] = ()
    version: int = 0
    last_flush_seq: int = 0
    removed: tuple[Removed, ...] = ()
    ops: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[ManifestEntry, ...]:
        """Base and delta files."""
        return (*self.base, *self.delta)

    @property
    def paths(self) -> frozenset[str]:
        """The paths that are listed."""
        return frozenset(entry.path for entry in self.entries)

    @property
    def base_rows(self) -> int:
        """Rows of all base files."""
        return sum(entry.row_count for entry in self.base)

    @property
    def delta_rows(self) -> int:
        """Rows of all delta files, tombstones among them."""
        return sum(entry.row_count for entry in self.delta)

    def to_bytes(self) -> bytes:
        """The manifest as its object holds it."""
        told: dict[str, Any] = {"schema_id": self.schema_id}
        for level in (BASE, DELTA):
            entries: Sequence[ManifestEntry] = getattr(self, level)
            if entries:
                told[level] = [entry.to_json() for entry in entries]
        told |= {"version": self.version, "last_flush_seq": self.last_flush_seq}
        if self.removed:
            told["removed"] = [{"path": each.path, "removed_at": each.removed_at} for each in self.removed]
        told["ops"] = list(self.ops)
        return json.dumps(told, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, schema_id: int, path: str) -> Manifest:
        """Read a manifest; one that is damaged, or stamped for another schema, is refused."""
        try:
            told = json.loads(data)
            manifest = cls(
                schema_id=int(told["schema_id"]),
                base=tuple(map(ManifestEntry.from_json, told.get(BASE, ()))),
                delta=tuple(map(ManifestEntry.from_json, told.get(DELTA, ()))),
                version=int(told.get("version", 0)),
                last_flush_seq=int(told.get("last_flush_seq", 0)),
                removed=tuple(Removed(str(each["path"]), int(each["removed_at"])) for each in told.get("removed", ())),
                ops=tuple(map(str, told.get("ops", ()))),
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ModakError(
                "entities.manifest_damaged",
                f"The manifest {path} cannot be read.",
                hint="Restore it from the store's own versions, or begin anew with modak-worker entities init.",
            ) from error
        if manifest.schema_id != schema_id:
            raise ModakError(
                "entities.manifest_foreign",
                f"The manifest {path} is that of schema {manifest.schema_id}, not of {schema_id}.",
                hint="Check MODAK_ENTITIES_MANIFEST_TEMPLATE; nothing was changed.",
            )
        return manifest

    def next(self, op_id: str) -> Manifest:
        """The same files in the next version, signed by whoever writes it."""
        return replace(self, version=self.version + 1, ops=(*self.ops, op_id)[-REMEMBERED_OPS:])


def listing_deltas(manifest: Manifest, entries: Iterable[ManifestEntry]) -> Manifest:
    """The manifest with the files of a flush, which are newer than everything that is listed."""
    seq = manifest.version + 1
    added = tuple(replace(entry, seq=seq, level=DELTA) for entry in entries)
    _refuse_given_up(manifest, added)
    return replace(manifest, delta=(*manifest.delta, *added), last_flush_seq=seq)


def replacing_base(manifest: Manifest, entries: Iterable[ManifestEntry], now: int) -> Manifest:
    """The manifest after an init: the new files are the store, all others leave it."""
    seq = manifest.version + 1
    added = tuple(replace(entry, seq=seq, level=BASE) for entry in entries)
    _refuse_given_up(manifest, added)
    gone = tuple(Removed(entry.path, now) for entry in manifest.entries)
    return replace(manifest, base=added, delta=(), last_flush_seq=seq, removed=(*manifest.removed, *gone))


def swapping(manifest: Manifest, merged: Iterable[str], entries: Iterable[ManifestEntry], now: int) -> Manifest:
    """The manifest after a rewrite: exactly the merged files leave, and all of them must still be listed."""
    leaving = frozenset(merged)
    if not leaving <= manifest.paths:
        raise Conflict("entities.sources_changed", "Files that were being merged are not listed any more.")
    added = tuple(replace(entry, level=BASE) for entry in entries)
    _refuse_given_up(manifest, added)
    return replace(
        manifest,
        base=(*(entry for entry in manifest.base if entry.path not in leaving), *added),
        delta=tuple(entry for entry in manifest.delta if entry.path not in leaving),
        removed=(*manifest.removed, *(Removed(path, now) for path in sorted(leaving))),
    )


def promoting(manifest: Manifest, promoted: Iterable[str]) -> Manifest:
    """The manifest in which some deltas count as base; the files stay where they are."""
    rising = frozenset(promoted)
    if not rising <= {entry.path for entry in manifest.delta}:
        raise Conflict("entities.sources_changed", "Deltas that were to be promoted are not listed any more.")
    risen = tuple(replace(entry, level=BASE) for entry in manifest.delta if entry.path in rising)
    return replace(
        manifest,
        base=(*manifest.base, *risen),
        delta=tuple(entry for entry in manifest.delta if entry.path not in rising),
    )


def giving_up(manifest: Manifest, paths: Iterable[str], now: int) -> Manifest:
    """The manifest that has noticed unlisted files: from now on nobody can list them, and their grace begins."""
    known = {each.path for each in manifest.removed} | manifest.paths
    noticed = tuple(Removed(path, now) for path in sorted(set(paths) - known))
    return replace(manifest, removed=(*manifest.removed, *noticed))


def dropping(manifest: Manifest, lost: Iterable[str]) -> Manifest:
    """The manifest without entries whose objects are gone; their rows must be dirty before this is published.

    It counts as a flush: whoever read the dirty rows before that and the manifest after this would miss some.
    """
    gone = frozenset(lost)
    return replace(
        manifest,
        last_flush_seq=manifest.version + 1,
        base=tuple(entry for entry in manifest.base if entry.path not in gone),
        delta=tuple(entry for entry in manifest.delta if entry.path not in gone),
    )


def forgetting(manifest: Manifest, deleted: Iterable[str]) -> Manifest:
    """The manifest without the memory of files that are deleted now."""
    gone = frozenset(deleted)
    return replace(manifest, removed=tuple(each for each in manifest.removed if each.path not in gone))


def stored(attributes: Iterable[Attribute]) -> dict[str, StoredAttribute]:
    """What an entry says about the attributes of its file."""
    return {each.name: StoredAttribute(each.id, each.type_name, each.binding) for each in attributes}


def _refuse_given_up(manifest: Manifest, added: Iterable[ManifestEntry]) -> None:
    given_up = {each.path for each in manifest.removed}
    if any(entry.path in given_up for entry in added):
        raise Conflict(
            "entities.given_up",
            "The files of this run were taken for the leftovers of a dead one.",
            hint="The run starts again with new files.",
        )
