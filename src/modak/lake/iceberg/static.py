"""Iceberg tables without a catalog: manifests and metadata that refer to files which somebody else wrote.

A table is a folder: `metadata/v{N}.metadata.json` is its N-th version, and the newest one counts. Creating that file
where there is none yet is the commit, which needs nothing but a store that can create conditionally. Files of the table
have no field ids, so columns are found by their names (a name mapping). Every snapshot has manifests of its own: what
a snapshot needs carries its id in the name.

Format version 2: there are no deletes, and every reader takes it. Nothing here does any I/O.

Memory: one manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from modak.lake.iceberg.avro import container
from modak.lake.iceberg.schema import columns_of, schema_json
from modak.lake.model import LakeColumn

EXISTING, ADDED, DELETED = 0, 1, 2
MOST_ENTRIES = 20_000
_LOGGED = 20
_MAIN = "main"


@dataclass(frozen=True)
class Entry:
    """A data file as a snapshot has it: Iceberg's JSON of it, and the snapshot and number that brought it in."""

    content: Mapping[str, Any]
    snapshot_id: int
    sequence: int
    status: int = EXISTING

    @property
    def rows(self) -> int:
        """Its rows."""
        return int(self.content["record-count"])


@dataclass(frozen=True)
class Snapshot:
    """A new state of a table: its own id and number, the one before it, and when it is made."""

    snapshot_id: int
    sequence: int
    parent: int | None
    at_ms: int


@dataclass(frozen=True)
class Manifest:
    """One manifest, described for the list of them."""

    location: str
    length: int
    counts: tuple[int, int, int]
    rows: tuple[int, int, int]
    lowest_sequence: int


def manifests(
    entries: Iterable[Entry], schema: str, snapshot: Snapshot, folder: str
) -> Iterator[tuple[Manifest, bytes]]:
    """The manifests of a snapshot with their data, a bounded number of files each."""
    head = {
        "schema": schema,
        "schema-id": str(json.loads(schema)["schema-id"]),
        "partition-spec": "[]",
        "partition-spec-id": "0",
        "format-version": "2",
        "content": "data",
    }
    remaining = iter(entries)
    number = 0
    while page := list(islice(remaining, MOST_ENTRIES)):
        data = container(_ENTRY, (_entry_record(entry, snapshot) for entry in page), head)
        counts = tuple(sum(entry.status == status for entry in page) for status in (ADDED, EXISTING, DELETED))
        rows = tuple(
            sum(entry.rows for entry in page if entry.status == status) for status in (ADDED, EXISTING, DELETED)
        )
        lowest = min((entry.sequence for entry in page if entry.status != DELETED), default=snapshot.sequence)
        location = f"{folder}/{snapshot.snapshot_id}-m{number}.avro"
        yield (
            Manifest(location, len(data), (counts[0], counts[1], counts[2]), (rows[0], rows[1], rows[2]), lowest),
            data,
        )
        number += 1


def manifest_list(made: Sequence[Manifest], snapshot: Snapshot) -> bytes:
    """The list of a snapshot's manifests."""
    head = {
        "snapshot-id": str(snapshot.snapshot_id),
        "parent-snapshot-id": "null" if snapshot.parent is None else str(snapshot.parent),
        "sequence-number": str(snapshot.sequence),
        "format-version": "2",
    }
    return container(_LIST, (_list_record(each, snapshot) for each in made), head)


def first_metadata(uuid: str, location: str) -> dict[str, Any]:
    """The metadata of a table that has nothing yet; never stored as it is."""
    return {
        "format-version": 2,
        "table-uuid": uuid,
        "location": location,
        "last-sequence-number": 0,
        "last-updated-ms": 0,
        "last-column-id": 0,
        "current-schema-id": -1,
        "schemas": [],
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        "last-partition-id": 999,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {},
        "current-snapshot-id": -1,
        "refs": {},
        "snapshots": [],
        "snapshot-log": [],
        "metadata-log": [],
    }


def columns_in(metadata: Mapping[str, Any]) -> tuple[LakeColumn, ...]:
    """The columns that a table has now."""
    current = [each for each in metadata["schemas"] if each["schema-id"] == metadata["current-schema-id"]]
    return columns_of(current[0]) if current else ()


def with_columns(metadata: Mapping[str, Any], columns: Sequence[LakeColumn]) -> dict[str, Any]:
    """The metadata with these columns, which keep the ids of those that are there; new ones get ids of their own."""
    known = {column.name: column.field_id for column in columns_in(metadata)}
    last = metadata["last-column-id"]
    numbered: list[LakeColumn] = []
    for column in columns:
        number = known.get(column.name)
        if number is None:
            number = last = last + 1
        numbered.append(LakeColumn(column.name, column.type, field_id=number))
    if tuple(numbered) == columns_in(metadata):
        return dict(metadata)
    schema_id = max((each["schema-id"] for each in metadata["schemas"]), default=-1) + 1
    mapping = [{"field-id": column.field_id, "names": [column.name]} for column in numbered]
    return {
        **metadata,
        "last-column-id": last,
        "current-schema-id": schema_id,
        "schemas": [*metadata["schemas"], {**json.loads(schema_json(numbered)), "schema-id": schema_id}],
        "properties": {**metadata["properties"], "schema.name-mapping.default": json.dumps(mapping)},
    }


def current_schema(metadata: Mapping[str, Any]) -> str:
    """The schema that counts now, as JSON."""
    return next(json.dumps(each) for each in metadata["schemas"] if each["schema-id"] == metadata["current-schema-id"])


def with_snapshot(
    metadata: Mapping[str, Any], snapshot: Snapshot, list_location: str, summary: Mapping[str, str]
) -> dict[str, Any]:
    """The metadata with one more snapshot, which is the current one."""
    made = {
        "snapshot-id": snapshot.snapshot_id,
        "sequence-number": snapshot.sequence,
        "timestamp-ms": snapshot.at_ms,
        "manifest-list": list_location,
        "summary": dict(summary),
        "schema-id": metadata["current-schema-id"],
    }
    if snapshot.parent is not None:
        made["parent-snapshot-id"] = snapshot.parent
    return {
        **metadata,
        "last-sequence-number": snapshot.sequence,
        "current-snapshot-id": snapshot.snapshot_id,
        "refs": {_MAIN: {"snapshot-id": snapshot.snapshot_id, "type": "branch"}},
        "snapshots": [*metadata["snapshots"], made],
        "snapshot-log": [
            *metadata["snapshot-log"],
            {"snapshot-id": snapshot.snapshot_id, "timestamp-ms": snapshot.at_ms},
        ],
    }


def without_snapshots(metadata: Mapping[str, Any], expired: frozenset[int]) -> dict[str, Any]:
    """The metadata without some snapshots, none of which may be the current one."""
    kept = [each for each in metadata["snapshots"] if each["snapshot-id"] not in expired]
    log = [each for each in metadata["snapshot-log"] if each["snapshot-id"] not in expired]
    return {**metadata, "snapshots": kept, "snapshot-log": log}


def following(metadata: Mapping[str, Any], previous: str | None, at_ms: int) -> dict[str, Any]:
    """The metadata as the next version after the one that lies at `previous`."""
    log = list(metadata["metadata-log"])
    if previous is not None:
        log.append({"metadata-file": previous, "timestamp-ms": metadata["last-updated-ms"]})
    return {**metadata, "metadata-log": log[-_LOGGED:], "last-updated-ms": max(at_ms, metadata["last-updated-ms"])}


def _entry_record(entry: Entry, snapshot: Snapshot) -> dict[str, Any]:
    told = entry.content
    return {
        "status": entry.status,
        "snapshot_id": snapshot.snapshot_id if entry.status == DELETED else entry.snapshot_id,
        "sequence_number": entry.sequence,
        "file_sequence_number": entry.sequence,
        "data_file": {
            "content": 0,
            "file_path": told["file-path"],
            "file_format": "PARQUET",
            "partition": {},
            "record_count": told["record-count"],
            "file_size_in_bytes": told["file-size-in-bytes"],
            "column_sizes": _pairs(told["column-sizes"]),
            "value_counts": _pairs(told["value-counts"]),
            "null_value_counts": _pairs(told["null-value-counts"]),
            "nan_value_counts": _pairs(told["nan-value-counts"]),
            "lower_bounds": _bounds(told["lower-bounds"]),
            "upper_bounds": _bounds(told["upper-bounds"]),
            "split_offsets": told["split-offsets"],
            "sort_order_id": 0,
        },
    }


def _list_record(made: Manifest, snapshot: Snapshot) -> dict[str, Any]:
    names = ("added", "existing", "deleted")
    return {
        "manifest_path": made.location,
        "manifest_length": made.length,
        "partition_spec_id": 0,
        "content": 0,
        "sequence_number": snapshot.sequence,
        "min_sequence_number": made.lowest_sequence,
        "added_snapshot_id": snapshot.snapshot_id,
        **{f"{name}_files_count": count for name, count in zip(names, made.counts, strict=True)},
        **{f"{name}_rows_count": count for name, count in zip(names, made.rows, strict=True)},
        "partitions": [],
    }


def _pairs(values: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    return [{"key": key, "value": value} for key, value in zip(values["keys"], values["values"], strict=True)]


def _bounds(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    pairs = zip(values["keys"], values["values"], strict=True)
    return [{"key": key, "value": bytes.fromhex(value)} for key, value in pairs]


def _field(name: str, number: int, kind: Any) -> dict[str, Any]:
    field = {"name": name, "type": kind, "field-id": number}
    return {**field, "default": None} if isinstance(kind, list) else field


def _map_of(key: int, value: int, kind: str) -> list[Any]:
    record = {
        "type": "record",
        "name": f"k{key}_v{value}",
        "fields": [_field("key", key, "int"), _field("value", value, kind)],
    }
    return ["null", {"type": "array", "logicalType": "map", "items": record}]


def _list_of(element: int, kind: Any) -> list[Any]:
    return ["null", {"type": "array", "element-id": element, "items": kind}]


_DATA_FILE = {
    "type": "record",
    "name": "r2",
    "fields": [
        _field("content", 134, "int"),
        _field("file_path", 100, "string"),
        _field("file_format", 101, "string"),
        _field("partition", 102, {"type": "record", "name": "r102", "fields": []}),
        _field("record_count", 103, "long"),
        _field("file_size_in_bytes", 104, "long"),
        _field("column_sizes", 108, _map_of(117, 118, "long")),
        _field("value_counts", 109, _map_of(119, 120, "long")),
        _field("null_value_counts", 110, _map_of(121, 122, "long")),
        _field("nan_value_counts", 137, _map_of(138, 139, "long")),
        _field("lower_bounds", 125, _map_of(126, 127, "bytes")),
        _field("upper_bounds", 128, _map_of(129, 130, "bytes")),
        _field("key_metadata", 131, ["null", "bytes"]),
        _field("split_offsets", 132, _list_of(133, "long")),
        _field("equality_ids", 135, _list_of(136, "int")),
        _field("sort_order_id", 140, ["null", "int"]),
    ],
}
_ENTRY = {
    "type": "record",
    "name": "manifest_entry",
    "fields": [
        _field("status", 0, "int"),
        _field("snapshot_id", 1, ["null", "long"]),
        _field("sequence_number", 3, ["null", "long"]),
        _field("file_sequence_number", 4, ["null", "long"]),
        _field("data_file", 2, _DATA_FILE),
    ],
}
_PARTITION = {
    "type": "record",
    "name": "r508",
    "fields": [
        _field("contains_null", 509, "boolean"),
        _field("contains_nan", 518, ["null", "boolean"]),
        _field("lower_bound", 510, ["null", "bytes"]),
        _field("upper_bound", 511, ["null", "bytes"]),
    ],
}
_LIST = {
    "type": "record",
    "name": "manifest_file",
    "fields": [
        _field("manifest_path", 500, "string"),
        _field("manifest_length", 501, "long"),
        _field("partition_spec_id", 502, "int"),
        _field("content", 517, "int"),
        _field("sequence_number", 515, "long"),
        _field("min_sequence_number", 516, "long"),
        _field("added_snapshot_id", 503, "long"),
        _field("added_files_count", 504, "int"),
        _field("existing_files_count", 505, "int"),
        _field("deleted_files_count", 506, "int"),
        _field("added_rows_count", 512, "long"),
        _field("existing_rows_count", 513, "long"),
        _field("deleted_rows_count", 514, "long"),
        _field("partitions", 507, _list_of(508, _PARTITION)),
        _field("key_metadata", 519, ["null", "bytes"]),
    ],
}
