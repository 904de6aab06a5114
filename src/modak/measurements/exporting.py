"""A measurement as an Iceberg table, by reference: its files stay where they are, only metadata is written.

The exporter is a reader: it makes itself known, sees what counts now, and describes every file by its footer. Files
that the last snapshot shows already are not looked at again. Then come the manifests, and last the new version of the
table, created where there is none: of two exporters one wins. Snapshots that are older than they are kept for go with
the next export; until then recovery deletes no file that they show.

Files that Iceberg cannot read as they are (corrupt ones, other types in other files than the format widens) are left
out and named. A merge makes most of them fit.

Memory: the descriptions of the files of one measurement.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

import structlog

from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.measurements.discover import Source
from modak.measurements.exports import HINT, Version, files_path, read_files, table_folder, version_path, write_files
from modak.measurements.footers import footer
from modak.measurements.layout import check_name
from modak.measurements.manifest import MANIFEST_BASE_PATH
from modak.measurements.reading import visible_files
from modak.measurements.state import State
from modak.storage.objects import Meta

if TYPE_CHECKING:
    from modak.lake.iceberg.static import Entry, Snapshot
    from modak.lake.model import LakeColumn

KEPT = timedelta(days=1)
"""How long a snapshot outlives the one that follows it."""
_READERS = 8
_log = structlog.get_logger()


@dataclass(frozen=True)
class Exported:
    """What an exported table shows now; `left_out` are files that it cannot show, with the reason."""

    database: str
    measurement: str
    location: str
    metadata_location: str
    snapshot_id: int
    snapshots: int
    files: int
    rows: int
    bytes: int
    added: int
    removed: int
    left_out: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _File:
    """A file that the table shows: the version, and Iceberg's description with what brought it in."""

    path: str
    etag: str
    entry: Entry

    def line(self) -> dict[str, Any]:
        entry = self.entry
        return {
            "path": self.path,
            "etag": self.etag,
            "snapshot": entry.snapshot_id,
            "sequence": entry.sequence,
            "content": entry.content,
        }


def export(state: State, source: Source, kept: timedelta = KEPT) -> Exported:
    """Show what a measurement has now as a snapshot of its table; one that shows it already is left as it is."""
    check_name("database", source.database)
    check_name("measurement", source.measurement)
    with _claimed(state, source):
        lease = state.lease()
        try:
            return _export(state, source, kept)
        finally:
            lease.release()


def drop(state: State, source: Source) -> int:
    """Take an exported table away; the measurement stays. How many files of metadata there were."""
    with _claimed(state, source):
        folder = f"{table_folder(source)}/metadata"
        paths = [meta.path for meta in state.objects.list(folder)]
        reach("export.before_drop")
        removed = state.objects.delete(paths)
        reach("export.dropped")
        state.exports.forget(source)
    return removed


def refresh(state: State, database: str | None = None, kept: timedelta = KEPT) -> list[str]:
    """Bring every exported table up to date; what could not be done, in words."""
    problems: list[str] = []
    for source in list(state.exports.all()):
        if database not in (None, source.database):
            continue
        try:
            done = export(state, source, kept)
        except ModakError as error:
            if error.code != "measurements.claimed":
                problems.append(f"the exported table of {source.folder} is not up to date: {error.message}")
            continue
        problems.extend(f"{path} is not in the exported table: {reason}" for path, reason in done.left_out)
    return problems


@contextmanager
def _claimed(state: State, source: Source) -> Iterator[None]:
    """Only one exporter works on a measurement."""
    database, measurement = quote(source.database, safe=""), quote(source.measurement, safe="")
    path = f"{MANIFEST_BASE_PATH}/claims/{database}/{measurement}/export.json"
    claims = state.claims
    if not claims.acquire(path) and not (claims.wait_for_dead([path]) and claims.acquire(path)):
        raise ModakError("measurements.claimed", f"{source.folder} is being exported by somebody else.", retryable=True)
    try:
        with claims.beating():
            yield
    finally:
        claims.release(path)


@dataclass(frozen=True)
class _Change:
    """What a new snapshot changes: metadata with the columns that it needs, and files by what becomes of them."""

    metadata: dict[str, Any]
    snapshot: Snapshot
    staying: list[_File]
    adding: list[_File]
    removing: list[_File]
    left: dict[str, str]


def _export(state: State, source: Source, kept: timedelta) -> Exported:
    from modak.lake.iceberg import static

    version = state.exports.newest(source)
    change = _change(state, source, version)
    ending = _ending(change.metadata, state.clock.now() - kept)
    if version is not None and not (change.adding or change.removing or ending):
        _sweep(state, source, version.metadata, version.path)
        return _told(state, source, version.path, version.metadata, change)
    # Before the table shows anything: recovery asks only about those that it knows of.
    state.exports.register(source)
    following = change.metadata
    if change.adding or change.removing or version is None:
        following = _with_snapshot(state, source, change)
    following = static.following(
        static.without_snapshots(following, ending),
        f"{state.objects.root}/{version.path}" if version is not None else None,
        change.snapshot.at_ms,
    )
    path = _commit(state, source, version, following)
    _sweep(state, source, following, path)
    return _told(state, source, path, following, change)


def _change(state: State, source: Source, version: Version | None) -> _Change:
    """What has changed since the last version of the table."""
    from modak.lake.iceberg import static

    location = f"{state.objects.root}/{table_folder(source)}"
    base = static.first_metadata(str(uuid4()), location) if version is None else dict(version.metadata)
    shown = {} if version is None else _shown(state, source, version)
    counting = [file.meta for file in visible_files(state, source)]
    aside = {(each.path, each.etag): each.reason for each in state.aside.all(source)}
    left = {meta.path: aside[meta.path, meta.etag] for meta in counting if (meta.path, meta.etag) in aside}
    wanted = {meta.path: meta for meta in counting if meta.path not in left}
    read, corrupt = _footers(state, [meta for meta in wanted.values() if not _same(meta, shown.get(meta.path))])
    columns, odd = _columns(static.columns_in(base), {meta.path: found.schema for meta, found in read})
    left |= corrupt | odd
    if not columns:
        told = "; ".join(f"{path}: {reason}" for path, reason in list(left.items())[:3]) or "it has no files"
        raise Refused(
            "measurements.nothing_to_export",
            f"{source.folder} has nothing that a table could show: {told}.",
            hint="modak-worker measurements status shows what there is.",
        )
    parent = base["current-snapshot-id"] if version is not None else None
    at_ms = int(state.clock.now().timestamp() * 1000)
    snapshot = static.Snapshot(secrets.randbits(62) + 1, base["last-sequence-number"] + 1, parent, at_ms)
    metadata = static.with_columns(base, columns)
    ids = {column.name: column for column in static.columns_in(metadata)}
    return _Change(
        metadata,
        snapshot,
        staying=[file for file in shown.values() if _same(wanted.get(file.path), file)],
        adding=[_described(state, meta, found, ids, snapshot) for meta, found in read if meta.path not in odd],
        removing=[file for file in shown.values() if not _same(wanted.get(file.path), file)],
        left=left,
    )


def _shown(state: State, source: Source, version: Version) -> dict[str, _File]:
    from modak.lake.iceberg.static import Entry

    current = version.metadata["current-snapshot-id"]
    return {
        line["path"]: _File(line["path"], line["etag"], Entry(line["content"], line["snapshot"], line["sequence"]))
        for line in read_files(state.objects, source, current)
    }


def _same(meta: Meta | None, file: _File | None) -> bool:
    return meta is not None and file is not None and meta.etag == file.etag


@dataclass(frozen=True)
class _Footer:
    read: Any
    schema: Any


def _footers(state: State, metas: Iterable[Meta]) -> tuple[list[tuple[Meta, _Footer]], dict[str, str]]:
    """The footers of files, and those that have none with the reason."""
    import pyarrow as pa

    def look(meta: Meta) -> tuple[Meta, _Footer | str]:
        try:
            found = footer(state.objects, meta)
            return meta, _Footer(found, found.schema.to_arrow_schema())
        except (pa.ArrowException, OSError, ValueError) as error:
            return meta, f"it cannot be read: {(str(error).splitlines() or ['corrupt'])[0][:200]}"

    with ThreadPoolExecutor(_READERS) as pool:
        looked = list(pool.map(look, metas))
    sound = [(meta, found) for meta, found in looked if isinstance(found, _Footer)]
    return sound, {meta.path: found for meta, found in looked if isinstance(found, str)}


def _columns(have: tuple[LakeColumn, ...], schemas: Mapping[str, Any]) -> tuple[tuple[LakeColumn, ...], dict[str, str]]:
    """The columns of the table, as wide as its files need them, and the files that do not fit with the reason."""
    from modak.lake.model import LakeColumn
    from modak.measurements.exportable import joined

    columns = {column.name: column.type for column in have}
    odd: dict[str, str] = {}
    for path, schema in schemas.items():
        found = joined(columns, schema)
        if isinstance(found, str):
            odd[path] = found
        else:
            columns = found
    return tuple(LakeColumn(name, kind) for name, kind in columns.items()), odd


def _described(state: State, meta: Meta, found: _Footer, ids: Mapping[str, LakeColumn], snapshot: Snapshot) -> _File:
    from modak.lake.iceberg.bounds import data_file
    from modak.lake.iceberg.static import ADDED, Entry

    told = data_file(
        f"{state.objects.root}/{meta.path}",
        meta.size,
        found.read,
        [ids[name] for name in found.schema.names],
        spec_id=0,
        partition=[],
        nan_counts={},
    )
    return _File(meta.path, meta.etag, Entry(json.loads(told.json), snapshot.snapshot_id, snapshot.sequence, ADDED))


def _ending(metadata: Mapping[str, Any], limit: datetime) -> frozenset[int]:
    """The snapshots that are kept no longer: another one has followed, and that long enough ago."""
    at = int(limit.timestamp() * 1000)
    pairs = pairwise(metadata["snapshots"])
    return frozenset(one["snapshot-id"] for one, other in pairs if other["timestamp-ms"] <= at)


def _with_snapshot(state: State, source: Source, change: _Change) -> dict[str, Any]:
    """Write what a new snapshot needs, and the metadata with it."""
    from modak.lake.iceberg import static

    root, snapshot = state.objects.root, change.snapshot
    folder = f"{table_folder(source)}/metadata"
    entries = [
        *(file.entry for file in change.adding),
        *(replace(file.entry, status=static.EXISTING) for file in change.staying),
        *(replace(file.entry, status=static.DELETED) for file in change.removing),
    ]
    reach("export.before_files")
    made = []
    for manifest, data in static.manifests(
        entries, static.current_schema(change.metadata), snapshot, f"{root}/{folder}"
    ):
        state.objects.put(manifest.location.removeprefix(f"{root}/"), data)
        made.append(manifest)
    lists = f"{folder}/snap-{snapshot.snapshot_id}.avro"
    state.objects.put(lists, static.manifest_list(made, snapshot))
    now = [*change.staying, *change.adding]
    state.objects.put(files_path(source, snapshot.snapshot_id), write_files(file.line() for file in now))
    reach("export.files_written")
    summary = _summary(now, change.adding, change.removing)
    return static.with_snapshot(change.metadata, snapshot, f"{root}/{lists}", summary)


def _summary(now: list[_File], adding: list[_File], removing: list[_File]) -> dict[str, str]:
    added, removed, total = (sum(file.entry.rows for file in files) for files in (adding, removing, now))
    if not removing:
        operation = "append"
    elif not adding:
        operation = "delete"
    else:
        # A merge changes files and no rows.
        operation = "replace" if added == removed else "overwrite"
    return {
        "operation": operation,
        "added-data-files": str(len(adding)),
        "added-records": str(added),
        "deleted-data-files": str(len(removing)),
        "deleted-records": str(removed),
        "total-data-files": str(len(now)),
        "total-records": str(total),
        "total-delete-files": "0",
    }


def _commit(state: State, source: Source, version: Version | None, metadata: Mapping[str, Any]) -> str:
    number = version.number + 1 if version is not None else 1
    path, data = version_path(source, number), json.dumps(metadata).encode()
    reach("export.before_commit")
    # The answer to our own write may have been lost on its way.
    if state.objects.create(path, data) is None and state.objects.get(path).data != data:
        raise Conflict("measurements.export_lost", f"The table of {source.folder} was changed by another exporter.")
    reach("export.committed")
    state.objects.put(f"{table_folder(source)}/metadata/{HINT}", str(number).encode())
    reach("export.hinted")
    return path


def _sweep(state: State, source: Source, metadata: Mapping[str, Any], path: str) -> None:
    """Remove metadata that no version needs any more, and what exporters that died have left."""
    logged = {each["metadata-file"].rpartition("/")[2] for each in metadata["metadata-log"]}
    wanted = {HINT, path.rpartition("/")[2], *logged}
    alive = tuple(str(each["snapshot-id"]) for each in metadata["snapshots"])
    found = list(_unneeded(state, f"{table_folder(source)}/metadata", wanted, alive))
    if found:
        reach("export.before_sweep")
        state.objects.delete(found)
        reach("export.swept")


def _unneeded(state: State, folder: str, wanted: set[str], alive: tuple[str, ...]) -> Iterator[str]:
    for meta in state.objects.list(folder):
        name = meta.path.rpartition("/")[2]
        if name not in wanted and not name.removeprefix("snap-").startswith(alive):
            yield meta.path


def _told(state: State, source: Source, path: str, metadata: Mapping[str, Any], change: _Change) -> Exported:
    for name, reason in change.left.items():
        _log.warning("measurements.file_not_exported", file=name, reason=reason)
    files = [*change.staying, *change.adding]
    return Exported(
        source.database,
        source.measurement,
        metadata["location"],
        f"{state.objects.root}/{path}",
        metadata["current-snapshot-id"],
        len(metadata["snapshots"]),
        len(files),
        sum(file.entry.rows for file in files),
        sum(int(file.entry.content["file-size-in-bytes"]) for file in files),
        len(change.adding),
        len(change.removing),
        tuple(change.left.items()),
    )
