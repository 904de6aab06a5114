"""Preparing a lake commit: everything is written and validated, nothing is visible.

An Iceberg transaction collects the changes in memory and is never committed. What it writes on the way lies in one
folder per attempt; the new metadata JSON lies beside the old ones. Making it visible is one row update in the catalog
room's own Postgres transaction. Only metadata passes through here, bounded by the number of files of one operation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.lake.changes import Change, CreateTag, ExpireSnapshots, RemoveTag, SetProperties, SnapshotChange
from modak.lake.iceberg.durable import make_durable
from modak.lake.iceberg.java import Java, JavaFailure, plainly
from modak.lake.iceberg.log import OURS, fallen
from modak.lake.iceberg.read import snapshot_of
from modak.lake.iceberg.schema import schema_json, spec_of
from modak.lake.iceberg.updates import Updates
from modak.lake.model import LakeColumn, LakeName, Layout, Prepared, attempt_folder, metadata_stem, pin_tag

FORMAT_VERSION = "3"
_PATH = "write.metadata.path"
_CODEC = "write.metadata.compression-codec"
_USER_PREFIX = "iceberg.table."
_FOREVER = 2**63 - 1
_VERSION = re.compile(r"(\d+)-")
_BESIDE_EXPIRY = (ExpireSnapshots, CreateTag, RemoveTag, SetProperties)
_PRUNING = "write.metadata.delete-after-commit.enabled"
_DEFAULTS = {
    # Old metadata is removed by our own commits. With "true" foreign commits would do it too, and they know no pins.
    _PRUNING: "false",
    "write.metadata.previous-versions-max": "100",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one operation to prepare a commit."""

    op_id: str
    number: int
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class NewTable:
    """A table to create."""

    name: LakeName
    location: str
    columns: Sequence[LakeColumn]
    layout: Layout
    properties: Mapping[str, str]


def prepare(
    java: Java,
    table: Any,
    name: LakeName,
    attempt: Attempt,
    changes: Sequence[Change],
    *,
    tag: Iterable[int] = (),
    published: str | None = None,
) -> Prepared:
    """Write a commit of all changes together without making it visible; the tag `published` moves to its snapshot."""
    _check(changes)
    folder = attempt_folder(table.location(), attempt.op_id, attempt.number)
    transaction = table.newTransaction()
    base = transaction.startMetadata()
    base_path = base.property(_PATH, None)
    changes, own_path = _path_afterwards(changes, base_path)
    present = _refs(java, base)
    tagged = frozenset(tag)
    new_tags = frozenset(snapshot for snapshot in tagged if pin_tag(snapshot) not in present)

    reach("lake.prepare_started")
    version = _version(base.metadataFileLocation()) + 1
    # One update, and so the first of the changes that are looked at below.
    properties = transaction.updateProperties().set(_PATH, folder)
    properties.set(OURS, metadata_stem(version, attempt.op_id, attempt.number))
    properties.set(_PRUNING, _DEFAULTS[_PRUNING]).commit()
    updates = Updates(java, transaction, attempt.op_id, attempt.kind)
    for snapshot in sorted(new_tags):
        updates.apply(CreateTag(pin_tag(snapshot), snapshot))
    for change in changes:
        updates.apply(change)
    if published is not None:
        _publish(transaction, published)
    last = transaction.updateProperties()
    (last.remove(_PATH) if own_path is None else last.set(_PATH, own_path)).commit()
    reach("lake.manifests_written")

    metadata = transaction.currentMetadata()
    _refuse_what_is_missing(java, metadata, changes, moved=own_path != base_path)
    location = _write(java, transaction, metadata, version, attempt)
    make_durable(folder, location)
    reach("lake.metadata_written")
    snapshot, base_snapshot = metadata.currentSnapshot(), base.currentSnapshot()
    return Prepared(
        identifier=name,
        base_location=base.metadataFileLocation(),
        new_location=location,
        snapshot_id=None if snapshot is None else snapshot.snapshotId(),
        base_snapshot_id=None if base_snapshot is None else base_snapshot.snapshotId(),
        attempt_folder=folder,
        obsolete=fallen(java, table.io(), base, metadata),
        tagged=tagged,
        new_tags=new_tags,
        summary={} if snapshot is None else _summary(java, snapshot),
        expired_from=base.metadataFileLocation() if _expires(changes) else None,
        location=table.location(),
    )


def _publish(transaction: Any, tag: str) -> None:
    """Let a tag follow the present snapshot."""
    metadata = transaction.currentMetadata()
    snapshot, ref = metadata.currentSnapshot(), metadata.ref(tag)
    if snapshot is None or (ref is not None and ref.snapshotId() == snapshot.snapshotId()):
        return
    manage = transaction.manageSnapshots()
    move = manage.createTag if ref is None else manage.replaceTag
    move(tag, snapshot.snapshotId()).setMaxRefAgeMs(tag, _FOREVER).commit()


def prepare_create(java: Java, catalog: Any, identifier: Any, new: NewTable, attempt: Attempt) -> Prepared:
    """Write the first metadata of a new table without making it visible."""
    schema = java.iceberg.SchemaParser.fromJson(schema_json(new.columns))
    builder = catalog.buildTable(identifier, schema).withPartitionSpec(spec_of(java, schema, new.layout))
    for key, value in create_properties(new.layout, new.properties).items():
        builder.withProperty(key, value)
    try:
        with java.failures():
            transaction = builder.withLocation(new.location).createTransaction()
    except JavaFailure as failure:
        if failure.simple_name == "AlreadyExistsException":
            raise Refused("lake.exists", f"The lake already has a table {new.name}.") from failure
        raise plainly(failure, f"creating {new.name}") from failure
    # Made from the created table: Iceberg gives the columns ids of its own.
    mapping = java.iceberg.mapping.MappingUtil.create(transaction.table().schema())
    text = java.iceberg.mapping.NameMappingParser.toJson(mapping)
    properties = transaction.updateProperties().set("schema.name-mapping.default", text)
    properties.set(OURS, metadata_stem(0, attempt.op_id, attempt.number)).commit()
    reach("lake.create_started")
    new_location = _write(java, transaction, transaction.currentMetadata(), 0, attempt)
    folder = attempt_folder(new.location, attempt.op_id, attempt.number)
    make_durable(folder, new_location)
    reach("lake.create_written")
    return Prepared(
        identifier=new.name,
        base_location=None,
        new_location=new_location,
        snapshot_id=None,
        base_snapshot_id=None,
        attempt_folder=folder,
        location=new.location,
    )


def create_properties(layout: Layout, properties: Mapping[str, str]) -> dict[str, str]:
    """The properties of a new table: ours, then the user's, who may write them with the prefix `iceberg.table.`."""
    ours = {"format-version": FORMAT_VERSION, **_DEFAULTS}
    if layout.column is not None:
        # Retention and seam reads decide by the tier key's bounds, which must not be cut off.
        ours[f"write.metadata.metrics.column.{layout.column}"] = "full"
    theirs = {key.removeprefix(_USER_PREFIX): value for key, value in properties.items()}
    if theirs.get("format-version", FORMAT_VERSION) != FORMAT_VERSION:
        raise Refused(
            "lake.format_version",
            f"Iceberg format version {theirs['format-version']} is not written here.",
            hint="Deletes and column defaults need version 3; leave the property out.",
        )
    if theirs.get(_PRUNING, _DEFAULTS[_PRUNING]) != _DEFAULTS[_PRUNING]:
        raise Refused(
            "lake.metadata_pruning",
            f"{_PRUNING} is not switched on here: foreign commits would delete metadata under pinned readers.",
            hint="Leave it out; every commit of ours removes the metadata that has fallen out of the log.",
        )
    return ours | theirs


def _check(changes: Sequence[Change]) -> None:
    if _expires(changes) and not all(isinstance(change, _BESIDE_EXPIRY) for change in changes):
        # The metadata that the commit starts from tells which files may go: it must know all that the commit knows.
        raise ValueError("snapshots are expired in a commit of their own")


def _expires(changes: Sequence[Change]) -> bool:
    return any(isinstance(change, ExpireSnapshots) for change in changes)


def _path_afterwards(changes: Sequence[Change], path: str | None) -> tuple[list[Change], str | None]:
    """The changes without any to the metadata path, which is ours during the attempt; and its value afterwards."""
    kept: list[Change] = []
    for change in changes:
        if isinstance(change, SetProperties) and (_PATH in change.values or _PATH in change.removed):
            path = change.values.get(_PATH)
            rest = {key: value for key, value in change.values.items() if key != _PATH}
            kept.append(SetProperties(rest, change.removed - {_PATH}))
        else:
            kept.append(change)
    return kept, path


def _refuse_what_is_missing(java: Java, metadata: Any, changes: Sequence[Change], *, moved: bool) -> None:
    # An update whose own commit was forgotten can be silently absent from the transaction. The first and the last of
    # what it did are the metadata path, which comes and goes.
    kinds = java.texts(
        metadata.changes(),
        java.after(
            java.method("java.lang.Object", "getClass", "java.lang.Class"),
            java.method("java.lang.Class", "getSimpleName", "java.lang.String"),
        ),
    )[1:-1]
    snapshots = sum(isinstance(change, SnapshotChange) for change in changes)
    if not kinds and not moved:
        raise ModakError("lake.nothing_changed", "The commit would change nothing in the lake table.")
    if kinds.count("AddSnapshot") != snapshots:
        raise ModakError("lake.incomplete", f"{snapshots} snapshots were to be made, Iceberg made {kinds}.")


def _write(java: Java, transaction: Any, metadata: Any, version: int, attempt: Attempt) -> str:
    codec = metadata.property(_CODEC, "none")
    file_name = metadata_stem(version, attempt.op_id, attempt.number)
    file_name += java.iceberg.TableMetadataParser.getFileExtension(codec)
    operations = transaction.table().operations()
    location: str = operations.metadataFileLocation(file_name)
    try:
        with java.failures():
            java.iceberg.TableMetadataParser.write(metadata, operations.io().newOutputFile(location))
    except JavaFailure as failure:
        if failure.simple_name == "AlreadyExistsException":
            raise ModakError(
                "lake.attempt_reused",
                f"Attempt {attempt.number} of operation {attempt.op_id} has already written {location}.",
                hint="Every attempt needs a number of its own.",
            ) from failure
        raise plainly(failure, "writing table metadata") from failure
    return location


def _version(location: str) -> int:
    match = _VERSION.match(location.rpartition("/")[2])
    return int(match[1]) if match else -1


def _refs(java: Java, metadata: Any) -> set[str]:
    return set(str(java.jvm.java.lang.String.join("\n", metadata.refs().keySet())).split("\n"))


def _summary(java: Java, snapshot: Any) -> dict[str, str]:
    parsed = snapshot_of(json.loads(java.iceberg.SnapshotParser.toJson(snapshot)))
    return {"operation": parsed.operation, **parsed.summary}
