"""From Postgres to files under temporary paths: the step in which rows move.

A task reads its keys under the exported snapshot of the flow, pivots them and writes Parquet files of its own. What
comes back is a short description of each file and the rows that did not fit. The driver then takes the files to their
final paths, one after the other. Memory in a task is that of one pivot (`rows.py`) and one row group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING
from uuid import UUID

import structlog

from modak.core.clock import SystemClock
from modak.core.errors import Conflict, ModakError
from modak.core.faults import InjectedFault, reach
from modak.entities.address import Address
from modak.entities.changelog import Unfit
from modak.entities.clients import copy_tmp_to_final, remove_quietly
from modak.entities.config import CDCConfig
from modak.entities.files import Compression, Draft, Writer, entry_of
from modak.entities.manifest import ManifestEntry, stored
from modak.entities.paths import NO_KEY, build_base_path, build_base_temp_path, build_delta_path, build_temp_path, uuid7
from modak.entities.plan import KeyRange
from modak.entities.registry import EntitySchema
from modak.entities.rows import Keys, Lanes, Listed, Live, Source, rows_of
from modak.entities.store import EntityStore
from modak.entities.tables import EntityTables
from modak.entities.types import file_schema
from modak.storage.objects import Objects

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Export:
    """One task's share, with all that the task needs to know."""

    address: Address
    snapshot: str
    tables: EntityTables
    schema: EntitySchema
    keys: Keys
    objects: Objects
    prefix: str
    compression: Compression
    timeout_seconds: float = 0.0
    file_id: str = ""
    """What the one file of the share is called, where the driver wants to know it beforehand."""
    target_bytes: int | None = None
    target_rows: int | None = None
    lanes: Lanes = field(default_factory=Lanes)


@dataclass(frozen=True, slots=True)
class Exported:
    """What a share became: files, and the rows that are in none of them."""

    drafts: tuple[Draft, ...]
    unfit: tuple[Unfit, ...] = ()

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(draft.row_count for draft in self.drafts)


def export_share(share: Export) -> Exported:
    """Inside a task: read, pivot and write the rows of some keys."""
    source = Source(share.address, share.snapshot, share.tables, share.schema, share.timeout_seconds, share.lanes)
    reach("entities.share_started")
    unfit: list[Unfit] = []
    drafts = (_in_lanes if share.lanes.count > 1 else _in_one)(share, source, unfit)
    try:
        reach("entities.share_written")
    except BaseException:
        share.objects.delete([draft.tmp for draft in drafts])
        raise
    return Exported(tuple(drafts), tuple(unfit))


def _in_one(share: Export, source: Source, unfit: list[Unfit]) -> list[Draft]:
    with _writer(share) as writer:
        for rows in rows_of(source, share.keys):
            unfit += rows.unfit
            writer.write(rows.fit())
        return writer.close()


def _in_lanes(share: Export, source: Source, unfit: list[Unfit]) -> list[Draft]:
    """Each portion as so many files at once, cut where the keys are."""
    drafts: list[Draft] = []

    def written(part: pa.Table) -> list[Draft]:
        with _writer(share) as writer:
            writer.write(part)
            return writer.close()

    try:
        with ThreadPoolExecutor(share.lanes.count) as pool:
            for rows in rows_of(source, share.keys):
                unfit += rows.unfit
                fit = rows.fit()
                edges = [fit.num_rows * lane // share.lanes.count for lane in range(share.lanes.count + 1)]
                parts = [pool.submit(written, fit.slice(low, high - low)) for low, high in pairwise(edges)]
                wait(parts)
                drafts += [draft for part in parts if part.exception() is None for draft in part.result()]
                for part in parts:
                    part.result()
    except BaseException:
        share.objects.delete([draft.tmp for draft in drafts])
        raise
    return drafts


def _writer(share: Export) -> Writer:
    build = build_base_temp_path if isinstance(share.keys, Live) else build_temp_path
    clock = SystemClock()
    return Writer(
        share.objects,
        file_schema(share.schema),
        lambda: build(share.prefix, share.schema.schema_id, share.file_id or uuid7(clock)),
        share.compression,
        target_bytes=share.target_bytes,
        target_rows=share.target_rows,
    )


class SnapshotExporter:
    """Exports rows of an entity store to temporary files, for programs that arrange the rest themselves."""

    def __init__(self, store: EntityStore) -> None:
        self._store = store

    @property
    def config(self) -> CDCConfig:
        """The configuration, of which the exporter uses compression and prefix."""
        return self._store.config

    def export_snapshot_to_tmp(self, schema_id: int, snapshot: str, row_ids: Sequence[UUID | str]) -> Exported:
        """Export dirty rows, as an exported Postgres snapshot sees them, to a delta file under its temporary path."""
        return export_share(self._share(schema_id, snapshot, Listed(",".join(map(str, row_ids)))))

    def export_base_file_to_tmp(
        self, schema_id: int, snapshot: str, lower: UUID | str | None = None, upper: UUID | str | None = None
    ) -> Exported:
        """Export live rows with ids in [lower, upper) to a base file; the change log plays no part."""
        within = KeyRange(None if lower is None else str(lower), None if upper is None else str(upper))
        return export_share(self._share(schema_id, snapshot, Live(within)))

    def _share(self, schema_id: int, snapshot: str, keys: Keys) -> Export:
        return share_of(self._store, self._store.registry.resolve(schema_id), snapshot, keys)


DuckExporter = SnapshotExporter
"""The seed's name."""


def share_of(store: EntityStore, schema: EntitySchema, snapshot: str, keys: Keys) -> Export:
    """A task for some keys of a schema."""
    return Export(
        store.address,
        snapshot,
        store.tables,
        schema,
        keys,
        store.objects,
        store.config.s3_prefix,
        store.compression,
        store.config.query_timeout,
    )


@dataclass(frozen=True, slots=True)
class Landed:
    """Files at their final paths, not listed yet; and the failure that kept the others away, where there was one."""

    entries: tuple[ManifestEntry, ...]
    failure: ModakError | None = None

    @property
    def paths(self) -> list[str]:
        """The final paths."""
        return [entry.path for entry in self.entries]


def land_deltas(store: EntityStore, schema: EntitySchema, drafts: Sequence[Draft]) -> Landed:
    """Take delta files to their final paths, in order, up to the first that fails."""
    prefix, number = store.config.s3_prefix, schema.schema_id
    return _land(store, schema, drafts, lambda _: build_delta_path(prefix, number, uuid7(store.clock)))


def land_bases(store: EntityStore, schema: EntitySchema, drafts: Sequence[Draft]) -> Landed:
    """Take base files to their final paths, all or none."""
    prefix, number = store.config.s3_prefix, schema.schema_id

    def final(draft: Draft) -> str:
        low, high = draft.min_row_id or NO_KEY, draft.max_row_id or NO_KEY
        return build_base_path(prefix, number, low, high, uuid7(store.clock))

    landed = _land(store, schema, drafts, final)
    if landed.failure is not None:
        remove_quietly(store.copier, store.config.s3_bucket, landed.paths)
        raise landed.failure
    return landed


def _land(store: EntityStore, schema: EntitySchema, drafts: Sequence[Draft], final: Callable[[Draft], str]) -> Landed:
    attributes = stored(schema.attributes)
    bucket = store.config.s3_bucket
    entries: list[ManifestEntry] = []
    for number, draft in enumerate(drafts):
        path = final(draft)
        try:
            copy_tmp_to_final(store.copier, bucket, draft.tmp, path)
        except InjectedFault:
            raise
        except Exception as error:
            remove_quietly(store.copier, bucket, [each.tmp for each in drafts[number:]])
            return Landed(tuple(entries), _not_copied(path, error))
        entries.append(entry_of(draft, path, attributes))
    return Landed(tuple(entries))


def _not_copied(path: str, error: Exception) -> ModakError:
    if isinstance(error, ModakError):
        return error
    # A client of the caller's own may raise anything.
    return ModakError("entities.not_copied", f"{path} could not be written: {type(error).__name__}.", retryable=True)


def check_objects(store: EntityStore, entries: Sequence[ManifestEntry]) -> None:
    """Refuse to publish a file that is not there in full: every listed object exists."""
    for entry in entries:
        found = store.objects.head(entry.path)
        if found is None or found.size != entry.size_bytes:
            raise Conflict("entities.not_there", f"{entry.path} was written and is not there any more.")


def discard(store: EntityStore, schema_id: int, paths: Sequence[str]) -> None:
    """Delete files that were written and not published; one that is listed after all stays, whoever did it."""
    try:
        listed = store.manifests.load(schema_id).manifest.paths
    except ModakError as error:
        log.warning("entities.left_to_gc", schema=schema_id, files=len(paths), because=error.message)
        return
    remove_quietly(store.copier, store.config.s3_bucket, [path for path in paths if path not in listed])


def rolled(share: Export, target_mb: int, batch_rows: int) -> Export:
    """The share with the size of its files: by bytes, or by rows where no size is wanted."""
    if target_mb:
        return replace(share, target_bytes=target_mb << 20)
    return replace(share, target_rows=batch_rows)
