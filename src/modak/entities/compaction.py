"""Base and delta files become new base files, before reads have too many versions to weigh.

Ranges of ids are merged side by side by the kernel, tombstones drop out, and one swap of the manifest puts the new
files in the place of exactly those that were merged; the old ones are kept for readers under way until gc. A flush that
comes in between is no loss: its files were listed later, so the swap is tried again on the new manifest. Where the fate
of a swap is not known everything is kept. Memory in a task is the kernel's limit and one row group.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import structlog

from modak.core.clock import SystemClock
from modak.core.errors import Conflict, ModakError, UsageError
from modak.core.faults import reach
from modak.entities.evolution import check_evolution, with_former
from modak.entities.export import check_objects, discard, land_bases
from modak.entities.files import Compression, Draft, Writer, local_files
from modak.entities.kernel import Kernel, Merge, keys_sql, merged_schema, newest, running
from modak.entities.lock import SchemaLock, schema_lock
from modak.entities.manifest import ManifestEntry, promoting, swapping
from modak.entities.manifests import Change, Held
from modak.entities.paths import build_base_temp_path, uuid7
from modak.entities.plan import KeyRange, Nothing, Promotion, Rewrite, plan_compaction
from modak.entities.registry import EntitySchema
from modak.entities.store import EntityStore, backoff, tries_of
from modak.entities.tables import check
from modak.entities.types import file_schema

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What a compaction did with a schema."""

    schema_id: int
    because: str = ""
    rows_read: int = 0
    rows: int = 0
    files: int = 0
    bytes: int = 0
    merged: int = 0
    promoted: int = 0
    seconds: float = 0.0
    skipped: bool = False
    """Somebody else works on the schema."""
    error: ModakError | None = None

    @property
    def changed(self) -> bool:
        """Whether the manifest is another one now."""
        return bool(self.merged or self.promoted)


@dataclass(frozen=True, slots=True)
class Share:
    """One task's range of a rewrite."""

    merge: Merge
    schema: EntitySchema
    prefix: str
    target_bytes: int
    compression: Compression


@dataclass(frozen=True, slots=True)
class KeyScan:
    """The files whose row ids one task compares."""

    merge: Merge


def compact(store: EntityStore, schema_ids: Sequence[int] | None = None) -> tuple[CompactionReport, ...]:
    """Compact every schema of the store that needs it; one that fails does not stop the others."""
    config = store.compaction
    if config.manifest_path:
        if not config.schema_id:
            raise UsageError(
                "entities.manifest_path",
                "One manifest is named, and not whose it is.",
                hint="Set MODAK_ENTITIES_SCHEMA_ID beside MODAK_ENTITIES_MANIFEST_PATH.",
            )
        store = replace(store, manifest_path=config.manifest_path)
    _check_tables(store)
    chosen = schema_ids or ((config.schema_id,) if config.schema_id else store.schema_ids())
    reports = []
    for schema in [store.registry.resolve(schema_id) for schema_id in chosen]:
        try:
            reports.append(compact_schema(store, schema))
        except ModakError as error:
            log.error("entities.compaction_failed", schema=schema.schema_id, code=error.code, error=error.message)
            reports.append(CompactionReport(schema.schema_id, error=error))
    return tuple(reports)


def plan(store: EntityStore, schema_id: int) -> Rewrite | Promotion | Nothing:
    """What a compaction would do now."""
    _check_tables(store)
    return plan_compaction(store.manifests.load(schema_id).manifest, store.compaction, store.crew.cores)


def compact_schema(store: EntityStore, schema: EntitySchema) -> CompactionReport:
    """One compaction of a schema, begun anew while others change its files."""
    config = store.compaction
    began = time.monotonic()
    with schema_lock(store.address, schema.schema_id, store.config.change_log_table) as lock:
        if lock is None:
            return CompactionReport(schema.schema_id, "somebody else works on it", skipped=True)
        for attempt in range(tries_of(config)):
            try:
                report = _compact(store, schema, lock)
            except Conflict as conflict:
                if attempt + 1 == tries_of(config) or conflict.code == "entities.lock_lost":
                    raise
                log.info("entities.compaction_again", schema=schema.schema_id, because=conflict.message)
                store.clock.sleep(backoff(config.base_backoff, config.max_backoff, attempt, random.random()))  # noqa: S311
                continue
            if report.changed:
                log.info(
                    "entities.compacted",
                    schema=schema.schema_id,
                    rows=report.rows,
                    files=report.files,
                    merged=report.merged,
                    promoted=report.promoted,
                )
            return replace(report, seconds=time.monotonic() - began)
    raise AssertionError("unreachable")


def _check_tables(store: EntityStore) -> None:
    """The tables are only needed for the lock; wrong names must not look like a lock that somebody else holds."""
    with store.connect() as conn:
        check(conn, store.tables)


def _compact(store: EntityStore, schema: EntitySchema, lock: SchemaLock) -> CompactionReport:
    held = store.manifests.load(schema.schema_id)
    check_evolution(schema, held.manifest)
    planned = plan_compaction(held.manifest, store.compaction, store.crew.cores)
    if isinstance(planned, Promotion):
        if _apart(store, planned):
            return _promote(store, schema, held, planned, lock)
        if planned.otherwise is None:
            return CompactionReport(schema.schema_id, "keys of large deltas overlap, and they are few against the base")
        planned = planned.otherwise
    if isinstance(planned, Nothing):
        return CompactionReport(schema.schema_id, planned.because)
    return _rewrite(store, schema, held, planned, lock)


def _rewrite(
    store: EntityStore, schema: EntitySchema, held: Held, planned: Rewrite, lock: SchemaLock
) -> CompactionReport:
    prefix = store.compaction.temp_prefix or store.config.s3_prefix
    # An attribute that is missing from the registry today may be back tomorrow.
    schema = with_former(schema, planned.sources)
    shares = [
        Share(
            Merge(
                store.objects,
                tuple(entry for entry in planned.sources if part.meets(entry)),
                schema.attributes,
                part,
                Kernel.of(store.config),
                verify=True,
                in_order=True,
            ),
            schema,
            prefix,
            store.compaction.target_base_size_mb << 20,
            store.compression,
        )
        for part in planned.ranges
    ]
    reach("compaction.before_rewrite")
    at_once = store.compaction.max_parallel_files or len(shares)
    drafts: list[Draft] = []
    for first in range(0, len(shares), at_once):
        written = store.crew.run(rewrite_share, shares[first : first + at_once], planned.rows)
        drafts += [draft for each in written for draft in each]
    reach("compaction.rewritten")
    # A store in which every row is deleted has one base file without rows, so that it is known to be empty.
    landed = land_bases(store, schema, drafts or [_nothing_left(shares[0])])
    seq = max(entry.seq for entry in planned.sources)
    entries = tuple(replace(entry, seq=seq) for entry in landed.entries)
    merged = [entry.path for entry in planned.sources]
    _publish(store, held, lambda now: swapping(now, merged, entries, store.now_ms), entries, lock)
    return CompactionReport(
        schema.schema_id,
        planned.because,
        planned.rows,
        sum(entry.row_count for entry in entries),
        len(entries),
        sum(entry.size_bytes for entry in entries),
        merged=len(merged),
    )


def rewrite_share(share: Share) -> list[Draft]:
    """Inside a task: merge a range of ids into new base files, which roll by the bytes written."""
    import pyarrow as pa

    schema = merged_schema(share.schema.attributes)
    reach("compaction.share_started")
    with _writer(share) as writer:
        for batch in newest(share.merge):
            writer.write(pa.Table.from_batches([batch], schema))
        drafts = writer.close()
        reach("compaction.share_written")
    return drafts


def _nothing_left(share: Share) -> Draft:
    with _writer(share) as writer:
        (draft,) = writer.close(at_least_one=True)
    return draft


def _writer(share: Share) -> Writer:
    clock = SystemClock()
    return Writer(
        share.merge.objects,
        file_schema(share.schema),
        lambda: build_base_temp_path(share.prefix, share.schema.schema_id, uuid7(clock)),
        share.compression,
        target_bytes=share.target_bytes,
    )


def _promote(
    store: EntityStore, schema: EntitySchema, held: Held, planned: Promotion, lock: SchemaLock
) -> CompactionReport:
    rising = [entry.path for entry in planned.deltas]
    rows = sum(entry.row_count for entry in planned.deltas)
    # A flush that came meanwhile may have brought the same keys: its files are deltas over the new base.
    _publish(store, held, lambda now: promoting(now, rising), planned.deltas, lock)
    return CompactionReport(schema.schema_id, "large deltas stand beside the base", rows, rows, promoted=len(rising))


def _apart(store: EntityStore, planned: Promotion) -> bool:
    """Whether no row id stands in two of the files: by their ranges if these say so, else by a look at every id."""
    entries = (*planned.deltas, *planned.others)
    spans = sorted((entry.min_row_id, entry.max_row_id) for entry in entries if entry.row_count)
    if all(before[1] < after[0] for before, after in pairwise(spans)):
        return True
    merge = Merge(store.objects, entries, (), KeyRange(), Kernel.of(store.config))
    (apart,) = store.crew.run(scan_keys, [KeyScan(merge)], sum(entry.row_count for entry in entries))
    return apart


def scan_keys(scan: KeyScan) -> bool:
    """Inside a task: whether all row ids of some files are different; only that one column is read."""
    merge = scan.merge
    with local_files(merge.objects, merge.sources, verify=False) as paths, running(merge.kernel) as duck:
        row = duck.execute(keys_sql([str(path) for path in paths])).fetchone()
    return row is not None and bool(row[0])


def _publish(
    store: EntityStore, held: Held, change: Change, entries: Sequence[ManifestEntry], lock: SchemaLock
) -> None:
    """Swap, and after a definite conflict swap again on the new manifest, as long as the sources are all listed."""
    config = store.compaction
    made = [entry.path for entry in entries if entry.path not in held.manifest.paths]
    for attempt in range(tries_of(config)):
        try:
            lock.check()
            check_objects(store, entries)
            reach("compaction.before_publish")
            store.manifests.save(held, change)
            reach("compaction.published")
        except Conflict as conflict:
            if conflict.code != "entities.manifest_conflict" or attempt + 1 == tries_of(config):
                discard(store, held.manifest.schema_id, made)
                raise
            log.info("entities.compaction_again", schema=held.manifest.schema_id, because=conflict.message)
            store.clock.sleep(backoff(config.base_backoff, config.max_backoff, attempt, random.random()))  # noqa: S311
            held = store.manifests.load(held.manifest.schema_id)
        else:
            return
