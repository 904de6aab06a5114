"""One pass over the schemas with dirty rows: `run_once`.

Per schema, under its lock: count, decide, and drain batch after batch. A batch is the longest-dirty rows as one
snapshot sees them; the manifest is read before that snapshot, so that a flush which comes late finds that another one
was faster. Exported files are listed, and only then exactly the exported versions are marked. A crash anywhere leaves
rows dirty, so the next run exports them again: later listed, they win. Memory: the ids of one batch, as text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from modak.core.clock import Clock
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.entities.address import address_of
from modak.entities.changelog import ChangeLog, Part, Unfit, dirty_schemas
from modak.entities.clients import S3ObjectClient, remove_quietly
from modak.entities.config import CDCConfig, CompactionConfig
from modak.entities.evolution import check_evolution
from modak.entities.export import Exported, Landed, check_objects, discard, export_share, land_deltas, share_of
from modak.entities.lock import SchemaLock, schema_lock
from modak.entities.manifest import Manifest, ManifestEntry, listing_deltas
from modak.entities.manifests import Held, lost
from modak.entities.paths import build_temp_path, uuid7
from modak.entities.plan import FlushDecision, plan_flush
from modak.entities.registry import EntitySchema, Registry
from modak.entities.rows import Listed
from modak.entities.snapshot import Snapshot, holding
from modak.entities.store import Crew, EntityStore, backoff, objects_of, tries_of
from modak.entities.tables import Installed, check
from modak.storage.objects import Objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What one pass did with a schema."""

    schema_id: int
    decision: FlushDecision | None = None
    rows: int = 0
    files: int = 0
    bytes: int = 0
    marked: int = 0
    unfit: tuple[Unfit, ...] = ()
    skipped: bool = False
    """Somebody else works on the schema."""
    error: ModakError | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """What became of one batch."""

    rows: int
    files: int
    bytes: int
    marked: int
    unfit: tuple[Unfit, ...]


def run_once(
    config: CDCConfig,
    client: S3ObjectClient | None = None,
    *,
    dry_run: bool = False,
    registry: Registry,
    objects: Objects | None = None,
    spark: SparkSession | None = None,
    clock: Clock | None = None,
) -> tuple[FlushReport, ...]:
    """Flush every schema that has enough dirty rows, once.

    For programs that hold no `EntityStore`; `flush` is the same for those that do. Without `objects` the store is where
    the environment says, and without a client of the caller's own it is its own client.
    """
    filled = config.with_defaults()
    if objects is None:
        from modak.config import load

        objects = objects_of(load(), filled)
    store = EntityStore(
        filled,
        CompactionConfig().with_defaults(),
        address_of(filled),
        objects,
        registry,
        Crew(None if spark is None else lambda: spark),
        client=client,
    )
    return flush(store if clock is None else replace(store, clock=clock), dry_run=dry_run)


def flush(
    store: EntityStore, *, schemas: Sequence[int] | None = None, dry_run: bool = False
) -> tuple[FlushReport, ...]:
    """One pass; a schema that fails is reported with its error and does not stop the others."""
    with store.connect() as conn:
        installed = check(conn, store.tables)
        found = dirty_schemas(conn, store.tables)
    wanted = set(schemas if schemas is not None else store.config.schemas)
    chosen = [schema_id for schema_id in found if not wanted or schema_id in wanted]
    # All of them, before anything happens: a schema that nobody describes must not be found half way.
    described = [store.registry.resolve(schema_id) for schema_id in sorted({*chosen, *wanted})]
    reports = []
    for schema in described:
        try:
            reports.append(dry(store, schema) if dry_run else flush_schema(store, installed, schema))
        except ModakError as error:
            log.error("entities.flush_failed", schema=schema.schema_id, code=error.code, error=error.message)
            reports.append(FlushReport(schema.schema_id, error=error))
    return tuple(reports)


def dry(store: EntityStore, schema: EntitySchema) -> FlushReport:
    """What a pass would decide; nothing is changed, no lock is taken."""
    return FlushReport(schema.schema_id, _decide(store, schema))


def flush_schema(store: EntityStore, installed: Installed, schema: EntitySchema) -> FlushReport:
    """Drain a schema until it is below its thresholds, at most `max_batch_size` rows in one pass."""
    with schema_lock(store.address, schema.schema_id, store.config.change_log_table) as lock:
        if lock is None:
            log.info("entities.flush_skipped", schema=schema.schema_id, because="somebody else works on it")
            return FlushReport(schema.schema_id, skipped=True)
        decision = _decide(store, schema)
        report = FlushReport(schema.schema_id, decision)
        waiting, left = decision.dirty, store.config.max_batch_size
        while decision.flush and left > 0:
            done = _flush_batch(store, installed, schema, lock, min(store.config.batch_size, left))
            report = replace(
                report,
                rows=report.rows + done.rows,
                files=report.files + done.files,
                bytes=report.bytes + done.bytes,
                marked=report.marked + done.marked,
                unfit=(*report.unfit, *done.unfit),
            )
            left -= done.rows
            waiting -= done.marked + len(done.unfit)
            if waiting <= 0 or not (done.marked or done.unfit):
                # All is done, or every row of the batch has changed meanwhile: the next pass takes what changes now.
                break
            decision = _decide(store, schema)
    return report


def _decide(store: EntityStore, schema: EntitySchema) -> FlushDecision:
    with store.connect() as conn:
        dirty, oldest = ChangeLog(store.tables, schema.schema_id, schema.digest).stats(conn)
    return plan_flush(schema.schema_id, dirty, oldest, store.now_ms, store.config)


def _flush_batch(
    store: EntityStore, installed: Installed, schema: EntitySchema, lock: SchemaLock, limit: int
) -> _Batch:
    config = store.config
    for attempt in range(tries_of(config)):
        try:
            return _try_batch(store, installed, schema, lock, limit)
        except Conflict as conflict:
            if attempt + 1 == tries_of(config) or conflict.code == "entities.lock_lost":
                raise
            log.info("entities.flush_again", schema=schema.schema_id, because=conflict.message)
            pause = backoff(config.base_backoff_ms / 1000, config.max_backoff_ms / 1000, attempt, random.random())  # noqa: S311
            store.clock.sleep(pause)
    raise AssertionError("unreachable")


def _try_batch(store: EntityStore, installed: Installed, schema: EntitySchema, lock: SchemaLock, limit: int) -> _Batch:
    changes = ChangeLog(store.tables, schema.schema_id, schema.digest)
    # Before the snapshot: whoever publishes from a later snapshot than ours is then seen as a change of this.
    held = store.manifests.load(schema.schema_id)
    check_evolution(schema, held.manifest)
    with holding(store, installed) as snapshot:
        reach("flush.snapshot_taken")
        if held.meta is None and changes.stored(snapshot.conn):
            raise lost(store.manifests.key(schema.schema_id), schema.schema_id)
        parts = changes.batch(snapshot.conn, limit, store.config.chunk_rows)
        exported = _export(store, schema, snapshot, parts)
        snapshot.check()
    unfit = tuple(each for share in exported for each in share.unfit)
    if unfit:
        _put_aside(store, changes, parts, unfit)
    landed = land_deltas(store, schema, [draft for share in exported for draft in share.drafts])
    manifest = _publish(store, held, landed, lock) if landed.entries else held.manifest
    published = _published(parts, exported, len(landed.entries))
    marked = _mark(store, changes, published, unfit) if published else 0
    rows = sum(entry.row_count for entry in landed.entries)
    log.info(
        "entities.flushed",
        schema=schema.schema_id,
        rows=rows,
        files=len(landed.entries),
        marked=marked,
        unfit=len(unfit),
        version=manifest.version,
    )
    if landed.failure is not None:
        raise landed.failure
    return _Batch(rows, len(landed.entries), sum(entry.size_bytes for entry in landed.entries), marked, unfit)


def _export(store: EntityStore, schema: EntitySchema, snapshot: Snapshot, parts: Sequence[Part]) -> list[Exported]:
    """One file for each part; if a part fails, none of them stays."""
    shares = [
        replace(
            share_of(store, schema, snapshot.id, Listed(part.row_ids)),
            file_id=uuid7(store.clock),
        )
        for part in parts
    ]
    reach("flush.before_export")
    try:
        exported = store.crew.run(export_share, shares, sum(part.count for part in parts))
    except ModakError:
        tmps = [build_temp_path(share.prefix, schema.schema_id, share.file_id) for share in shares]
        remove_quietly(store.copier, store.config.s3_bucket, tmps)
        raise
    reach("flush.after_export")
    return exported


def _publish(store: EntityStore, held: Held, landed: Landed, lock: SchemaLock) -> Manifest:
    """List the files; again after a conflict only as long as nobody else has published rows from Postgres."""
    first = held.manifest.last_flush_seq
    config = store.config
    for attempt in range(tries_of(config)):
        try:
            lock.check()
            check_objects(store, landed.entries)
            reach("flush.before_publish")
            manifest = store.manifests.save(held, lambda now: listing_deltas(now, landed.entries))
            reach("flush.published")
        except Conflict as conflict:
            again = conflict.code == "entities.manifest_conflict" and attempt + 1 < tries_of(config)
            held = store.manifests.load(held.manifest.schema_id) if again else held
            if not again or held.manifest.last_flush_seq != first:
                discard(store, held.manifest.schema_id, landed.paths)
                raise
        except ModakError as error:
            raise _unlisted(error, landed.entries) from error
        else:
            return manifest
    raise AssertionError("unreachable")


def _unlisted(error: ModakError, entries: Sequence[ManifestEntry]) -> ModakError:
    names = ", ".join(entry.path for entry in entries[:3]) + (" …" if len(entries) > 3 else "")
    return ModakError(
        error.code,
        f"{error.message} The rows stay dirty; perhaps unlisted: {names}.",
        hint="The next flush exports the rows again, and gc removes what is not listed.",
        retryable=True,
    )


def _published(parts: Sequence[Part], exported: Sequence[Exported], files: int) -> list[Part]:
    """The parts whose every file has landed."""
    done: list[Part] = []
    for part, share in zip(parts, exported, strict=True):
        files -= len(share.drafts)
        if files < 0:
            break
        done.append(part)
    return done


def _mark(store: EntityStore, changes: ChangeLog, published: Sequence[Part], unfit: Sequence[Unfit]) -> int:
    """Every part in a transaction of its own, which sees what others have committed meanwhile."""
    aside = {each.row_id for each in unfit}
    parts = [part.without(aside) for part in published] if aside else published

    def mark(part: Part) -> int:
        with store.connect() as conn:
            return changes.mark(conn, part, store.now_ms)

    reach("flush.before_mark")
    with ThreadPoolExecutor(store.crew.cores) as pool:
        marked = sum(pool.map(mark, parts))
    reach("flush.marked")
    return marked


def _put_aside(store: EntityStore, changes: ChangeLog, parts: Sequence[Part], unfit: Sequence[Unfit]) -> None:
    versions = {row_id: version for part in parts for row_id, version in part.slots.items()}
    with store.connect() as conn:
        reach("flush.before_quarantine")
        changes.quarantine(conn, unfit, [versions[each.row_id] for each in unfit], store.now_ms)
        reach("flush.quarantined")
    log.warning(
        "entities.quarantined", schema=changes.schema_id, rows=len(unfit), row=unfit[0].row_id, because=unfit[0].reason
    )
