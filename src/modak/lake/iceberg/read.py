"""What the lake holds: tables and snapshots out of metadata, live files out of scans.

Metadata crosses the border as one JSON text (about 1 KB a snapshot) and is taken apart here. Files are streamed: a
scan's iterator stays in the JVM and hands over a thousand files at a time, with the statistics of one column only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

from modak.core.errors import ModakError
from modak.lake.changes import Range
from modak.lake.iceberg.java import Java, JavaFailure, plainly
from modak.lake.iceberg.schema import columns_of, layout_of
from modak.lake.mapping import file_names
from modak.lake.model import (
    OP_ID,
    PUBLISHED_TAG,
    DataFile,
    EqualityDeletes,
    ForeignSnapshot,
    LakeFile,
    LakeName,
    LakeTable,
    Snapshot,
    Vector,
)
from modak.storage.uri import normal

FILES_PER_CHUNK = 1_000
_FULL_METRICS = "write.metadata.metrics.column."
_SIDES = ("lower-bounds", "upper-bounds")
_TASK = ".FileScanTask"
_CONTENT = ".ContentFile"
_TEXT = "java.lang.String"

Metadata = Mapping[str, Any]


def metadata_of(java: Java, metadata: Any) -> Metadata:
    """Iceberg's table metadata as its own JSON."""
    return cast("Metadata", json.loads(java.iceberg.TableMetadataParser.toJson(metadata)))


def table_of(name: LakeName, location: str, metadata: Metadata) -> LakeTable:
    """A table, read out of its metadata."""
    schema = _pick(metadata["schemas"], "schema-id", metadata["current-schema-id"])
    spec = _pick(metadata["partition-specs"], "spec-id", metadata["default-spec-id"])
    properties: dict[str, str] = dict(metadata.get("properties", {}))
    log = metadata.get("metadata-log", [])
    refs: Mapping[str, Any] = metadata.get("refs", {})
    return LakeTable(
        identifier=name,
        location=metadata["location"],
        metadata_location=location,
        snapshot_id=_current(metadata),
        schema=columns_of(schema, file_names(properties)),
        spec_id=spec["spec-id"],
        layout=layout_of(spec, schema, _tier_key(properties)),
        format_version=metadata["format-version"],
        properties=properties,
        snapshot_count=len(metadata.get("snapshots", [])),
        tags={
            ref: entry["snapshot-id"] for ref, entry in refs.items() if entry["type"] == "tag" and ref != PUBLISHED_TAG
        },
        sequence_number=metadata.get("last-sequence-number", 0),
        oldest_metadata=log[0]["metadata-file"] if log else None,
        refs={ref: entry["snapshot-id"] for ref, entry in refs.items()},
    )


def snapshots_of(metadata: Metadata) -> list[Snapshot]:
    """Every snapshot that the metadata lists, oldest first."""
    return [snapshot_of(entry) for entry in metadata.get("snapshots", [])]


def snapshot_of(entry: Mapping[str, Any]) -> Snapshot:
    """A snapshot in Iceberg's JSON."""
    summary = {key: value for key, value in entry.get("summary", {}).items() if key != "operation"}
    return Snapshot(
        id=entry["snapshot-id"],
        parent=entry.get("parent-snapshot-id"),
        sequence_number=entry.get("sequence-number", 0),
        at_millis=entry["timestamp-ms"],
        operation=entry.get("summary", {}).get("operation", "unknown"),
        summary=summary,
    )


def foreign_since(metadata: Metadata, since: int | None) -> list[ForeignSnapshot]:
    """Snapshots on the way from `since` to the present that are not ours, oldest first."""
    known = {snapshot.id: snapshot for snapshot in snapshots_of(metadata)}
    current = _current(metadata)
    found: list[ForeignSnapshot] = []
    at = current
    while at is not None and at != since:
        snapshot = known.get(at)
        if snapshot is None:
            break
        if OP_ID not in snapshot.summary:
            found.append(ForeignSnapshot(snapshot.id, snapshot.operation, snapshot.summary))
        at = snapshot.parent
    if since is not None and at != since:
        summary = known[current].summary if current in known else {}
        found.append(ForeignSnapshot(current if current is not None else -1, "unrelated", summary))
    return found[::-1]


def expression(java: Java, rows: Range) -> Any:
    """The Java filter of a range."""
    made = java.iceberg.expressions.Expressions
    parts = []
    for operation, bound in (("gt_eq", rows.lower), ("lt", rows.upper)):
        if bound is not None:
            # Forced to long: Iceberg takes no Integer for a point in time, and Py4J sends small numbers as one.
            value = made.lit(bound).to(java.iceberg.types.Types.LongType.get())
            parts.append(
                made.predicate(java.iceberg.expressions.Expression.Operation.fromString(operation), rows.column, value)
            )
    if not parts:
        return made.alwaysTrue()
    return parts[0] if len(parts) == 1 else getattr(made, "and")(*parts)


def count_files(java: Java, table: Any, rows: Range) -> int:
    """How many live data files may hold rows of a range."""
    with (
        java.doing("looking for files of a range"),
        closing(table.newScan().filter(expression(java, rows)).planFiles()) as plan,
    ):
        return int(java.stream(plan).count())


def live_files(
    java: Java, table: Any, snapshot_id: int, *, column: str | None = None, rows: Range | None = None
) -> Iterator[LakeFile]:
    """The data files of a snapshot with their vectors, a thousand at a time; bounds are those of `column`."""
    with java.doing("listing files"):
        scan = table.newScan().useSnapshot(snapshot_id)
        if rows is not None:
            named = _name_then(table, scan, rows.column)
            scan = scan if named is None else scan.filter(expression(java, replace(rows, column=named)))
        field = None
        then = None if column is None else _name_then(table, scan, column)
        if then is not None:
            scan = scan.includeColumnStats(java.objects([then]))
            field = scan.schema().findField(then).fieldId()
        with closing(scan.planFiles()) as plan, closing(plan.iterator()) as iterator:
            while tasks := next_chunk(java, iterator):
                yield from _files_of(java, tasks, table.specs(), field)


def _name_then(table: Any, scan: Any, column: str) -> str | None:
    """What a column of today is called in the schema of a snapshot; nothing when it had no such column."""
    field = table.schema().findField(column)
    name = None if field is None else scan.schema().findColumnName(field.fieldId())
    return None if name is None else str(name)


def next_chunk(java: Java, iterator: Any) -> Any:
    """The next few of what a Java iterator yields, as a list; nothing at its end."""
    chunk = java.stream_on(iterator).limit(FILES_PER_CHUNK).toList()
    return None if chunk.isEmpty() else chunk


def _files_of(java: Java, tasks: Any, specs: Any, field: int | None) -> Iterator[LakeFile]:
    file = java.method(_TASK, "file", _CONTENT)
    deletes = java.method(_TASK, "deletes", "java.util.List")
    files = java.texts(tasks, java.after(file, _to_json(java, specs)))
    numbers = java.texts(tasks, java.after(file, java.method(_CONTENT, "dataSequenceNumber", "java.lang.Long")))
    counts = java.texts(tasks, java.after(deletes, java.method("java.util.List", "size", "int")))
    vectors = _vectors_of(java, tasks, specs, deletes) if any(count != "0" for count in counts) else {}
    for text, number, count in zip(files, numbers, counts, strict=True):
        entry = json.loads(text)
        own = tuple(vectors.get(entry["file-path"], ()))
        lower, upper = (_bound(entry.get(side), field) for side in _SIDES)
        yield LakeFile(
            file=DataFile(text, entry["record-count"], entry["file-size-in-bytes"], entry["file-path"]),
            lower=lower,
            upper=upper,
            sequence_number=None if number == "null" else int(number),
            vectors=own,
            foreign_deletes=int(count) - len(own),
        )


def _vectors_of(java: Java, tasks: Any, specs: Any, deletes: Any) -> dict[str, list[Vector]]:
    each = java.function(java.after(deletes, java.method("java.util.List", "stream", "java.util.stream.Stream")))
    found: dict[str, list[Vector]] = {}
    for text in java.texts(tasks.stream().flatMap(each).distinct().toList(), _to_json(java, specs)):
        entry = json.loads(text)
        target = entry.get("referenced-data-file")
        if _is_positional(entry) and entry["file-format"].lower() != "puffin":
            # Format 3 takes no new ones, and who leaves one unread brings deleted rows back.
            raise ModakError(
                "lake.position_deletes",
                f"{entry['file-path']} is a positional delete file of an older table format.",
                hint="Let the tool that wrote it rewrite its position deletes as vectors.",
            )
        if entry["file-format"].lower() == "puffin" and target is not None:
            vector = Vector(text, entry["record-count"], entry["file-size-in-bytes"], entry["file-path"], target)
            found.setdefault(target, []).append(vector)
    return found


def _is_positional(entry: Mapping[str, Any]) -> bool:
    return str(entry["content"]).lower().replace("_", "-") == "position-deletes"


def equality_deletes(java: Java, table: Any, snapshot_id: int) -> Iterator[EqualityDeletes]:
    """The equality delete files of a snapshot, manifest by manifest; only foreign writers make them."""
    with java.doing("listing delete files"):
        manifests = table.snapshot(snapshot_id).deleteManifests(table.io())
        for manifest in java.stream(manifests).toList():
            reader = java.iceberg.ManifestFiles.readDeleteManifest(manifest, table.io(), table.specs())
            with closing(reader), closing(reader.iterator()) as iterator:
                while files := next_chunk(java, iterator):
                    yield from _equality(java, files, table.specs())


def _equality(java: Java, files: Any, specs: Any) -> Iterator[EqualityDeletes]:
    texts = java.texts(files, _to_json(java, specs))
    numbers = java.texts(files, java.method(_CONTENT, "dataSequenceNumber", "java.lang.Long"))
    for text, number in zip(texts, numbers, strict=True):
        entry = json.loads(text)
        if entry["content"].lower().replace("_", "-") == "equality-deletes":
            yield EqualityDeletes(
                text,
                entry["record-count"],
                entry["file-size-in-bytes"],
                entry["file-path"],
                int(number),
                tuple(entry["equality-ids"]),
                entry["spec-id"],
                partition_of(entry),
            )


def partition_of(entry: Mapping[str, Any]) -> tuple[object, ...]:
    """The partition of a content file, in either form that Iceberg's JSON has had."""
    found = entry.get("partition") or ()
    return tuple(found.values() if isinstance(found, Mapping) else found)


def needed_deletes(java: Java, table: Any, snapshot_id: int, without: Iterable[str]) -> set[str]:
    """Delete files that apply to any data file of a snapshot but those of the paths `without`."""
    with java.doing("looking for delete files in use"):
        gone = java.jvm.java.util.HashSet(java.strings(without))
        contains = java.method("java.util.Set", "contains", "boolean", "java.lang.Object").bindTo(gone)
        inverted = java.bind(java.static("java.lang.Boolean", "logicalXor", "boolean", "boolean", "boolean"), 1, True)
        file = java.method(_TASK, "file", _CONTENT)
        stays = java.after(file, java.method(_CONTENT, "location", _TEXT), contains, inverted)
        deletes = java.method(_TASK, "deletes", "java.util.List")
        each = java.function(java.after(deletes, java.method("java.util.List", "stream", "java.util.stream.Stream")))
        with closing(table.newScan().useSnapshot(snapshot_id).planFiles()) as plan:
            left = java.stream(plan).filter(java.predicate(stays)).flatMap(each)
            paths = left.map(java.function(java.method(_CONTENT, "location", _TEXT))).distinct().toList()
        return set(java.texts(paths))


def partition_text(java: Java) -> Any:
    """A handle that tells a data file's partition as Iceberg writes it for people."""
    partition = java.method(_CONTENT, "partition", ".StructLike")
    return java.after(partition, java.static("java.util.Objects", "toString", _TEXT, "java.lang.Object"))


def partitions(java: Java, table: Any, snapshot_id: int) -> list[str]:
    """The partitions of a snapshot's live files, as Iceberg writes them for people."""
    with java.doing("listing partitions"), closing(table.newScan().useSnapshot(snapshot_id).planFiles()) as plan:
        told = java.after(java.method(_TASK, "file", _CONTENT), partition_text(java))
        return java.texts(java.stream(plan).map(java.function(told)).distinct().toList())


def manifests(java: Java, table: Any, snapshot_id: int) -> tuple[list[int], list[int]]:
    """The sizes of a snapshot's data manifests and of its delete manifests."""
    with java.doing("listing manifests"):
        snapshot = table.snapshot(snapshot_id)
        length = java.method(".ManifestFile", "length", "long")
        data, deletes = snapshot.dataManifests(table.io()), snapshot.deleteManifests(table.io())
        return [int(n) for n in java.texts(data, length)], [int(n) for n in java.texts(deletes, length)]


def _to_json(java: Java, specs: Any) -> Any:
    """A handle that writes a content file as JSON, by the spec it was written with."""
    to_json = java.static(".ContentFileParser", "toJson", _TEXT, _CONTENT, ".PartitionSpec")
    spec_of_id = java.method("java.util.Map", "get", "java.lang.Object", "java.lang.Object").bindTo(specs)
    spec = java.after(java.method(_CONTENT, "specId", "int"), spec_of_id)
    itself = java.jvm.java.lang.invoke.MethodHandles.identity(java.type(_CONTENT))
    return java.spread(to_json, _CONTENT, itself, spec)


def _bound(bounds: Mapping[str, Any] | None, field: int | None) -> int | None:
    """An axis value out of Iceberg's bounds: integers, dates and times are all little-endian integers."""
    if bounds is None or field not in bounds["keys"]:
        return None
    return int.from_bytes(bytes.fromhex(bounds["values"][bounds["keys"].index(field)]), "little", signed=True)


def _pick(entries: list[Metadata], key: str, value: int) -> Metadata:
    return next(entry for entry in entries if entry[key] == value)


def _current(metadata: Metadata) -> int | None:
    current = metadata.get("current-snapshot-id")
    return None if current in (None, -1) else int(cast("int", current))


def _tier_key(properties: Mapping[str, str]) -> str | None:
    # An unpartitioned table remembers its tier key only as the column with full metrics.
    full = [key for key, value in properties.items() if key.startswith(_FULL_METRICS) and value == "full"]
    return full[0].removeprefix(_FULL_METRICS) if len(full) == 1 else None


def referenced(java: Java, io: Any, location: str, folder: str, *, every_snapshot: bool) -> set[str]:
    """Manifests and manifest lists below a folder that the metadata at a location references."""
    with java.doing("looking for referenced files"):
        metadata = java.iceberg.TableMetadataParser.read(io, location)
        lists = java.texts(metadata.snapshots(), java.method(".Snapshot", "manifestListLocation", _TEXT))
        found = {uri for uri in map(normal, lists) if uri.startswith(f"{folder}/")}
        wanted = metadata.snapshots()
        if not every_snapshot:
            wanted = java.objects(metadata.snapshots().get(i) for i, uri in enumerate(lists) if normal(uri) in found)
        manifests = java.bind(java.method(".Snapshot", "allManifests", "java.util.List", ".io.FileIO"), 1, io)
        each = java.function(java.after(manifests, java.method("java.util.List", "stream", "java.util.stream.Stream")))
        path = java.method(".ManifestFile", "path", _TEXT)
        paths = wanted.stream().flatMap(each).map(java.function(path)).distinct().toList()
        found |= {uri for uri in map(normal, java.texts(paths)) if uri.startswith(f"{folder}/")}
        return found


def listed(java: Java, io: Any, folder: str) -> list[str]:
    """Every file below a folder; none when there is no such folder."""
    try:
        with java.failures():
            entries = java.stream(io.listPrefix(folder)).toList()
    except JavaFailure as failure:
        # Hadoop's listing wraps it once more.
        if "FileNotFoundException" in str(failure) or failure.simple_name == "NotFoundException":
            return []
        raise plainly(failure, f"listing {folder}") from failure
    return [normal(uri) for uri in java.texts(entries, java.method(".io.FileInfo", "location", _TEXT))]
