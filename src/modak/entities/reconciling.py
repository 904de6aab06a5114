"""Whether manifest and objects agree, putting lost rows right, and removing what is not part of the store any more.

Repair never lists an old file again, because the tombstones that followed it may be merged away: it makes the file's
rows dirty, and the next flush exports what is true now. gc deletes only files that the manifest itself has given up,
and only after a grace that counts from then; who was thought dead cannot publish such a file any more. Listings are
streamed; the paths of one schema are held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from uuid import UUID

import structlog

from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.entities.changelog import ChangeLog
from modak.entities.files import local_files
from modak.entities.lock import SchemaLock, schema_lock
from modak.entities.manifest import ManifestEntry, dropping, forgetting, giving_up
from modak.entities.manifests import Held
from modak.entities.paths import base_folder, delta_folder
from modak.entities.plan import GRACE_MS, Collection, Differences, compare, plan_gc
from modak.entities.registry import EntitySchema
from modak.entities.store import EntityStore
from modak.entities.tables import check

log = structlog.get_logger()

KEY_ROWS = 65_536
"""Row ids that are made dirty at once."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What was found, and what was done about it."""

    schema_id: int
    found: Differences
    repaired_rows: int = 0
    dropped: tuple[str, ...] = ()
    deleted: int = 0
    waiting: int = 0
    """Files that gc will delete once their grace is over."""
    busy: bool = False
    """Somebody else works on the schema, so what is not listed yet may be soon: it waits and is no difference."""


def reconcile(
    store: EntityStore, schema_id: int, *, repair: bool = False, gc: bool = False, grace_ms: int = GRACE_MS
) -> Reconciled:
    """Compare, and where asked for put right and clean up, under the schema's lock."""
    schema = store.registry.resolve(schema_id)
    if not repair and not gc:
        return _looked(store, schema_id)
    with store.connect() as conn:
        check(conn, store.tables)
    with schema_lock(store.address, schema_id, store.config.change_log_table) as lock:
        if lock is None:
            raise Conflict(
                "entities.locked", f"Somebody else works on schema {schema_id}.", hint="Try again when it is done."
            )
        found = look(store, schema_id)
        rows, dropped = _repair(store, schema, found, lock) if repair else (0, ())
        deleted, waiting = _collect(store, schema_id, lock, grace_ms) if gc else (0, len(found.waiting))
    return Reconciled(schema_id, found, rows, dropped, deleted, waiting)


def collect(store: EntityStore) -> int:
    """Delete what has been out of the store for its grace, in every schema; how many files that were.

    One that somebody else works on, or that fails, is left to the next time.
    """
    deleted = 0
    for schema_id in store.schema_ids():
        try:
            deleted += reconcile(store, schema_id, gc=True).deleted
        except Conflict as conflict:
            log.info("entities.collection_skipped", schema=schema_id, because=conflict.message)
        except ModakError as error:
            log.error("entities.collection_failed", schema=schema_id, code=error.code, error=error.message)
    return deleted


def _looked(store: EntityStore, schema_id: int) -> Reconciled:
    """What is not published is only a difference where nobody is at work who would publish it."""
    found = look(store, schema_id)
    if not _unlisted(found) and not found.lost_manifest:
        return Reconciled(schema_id, found)
    with schema_lock(store.address, schema_id, store.config.change_log_table) as lock:
        if lock is not None:
            return Reconciled(schema_id, look(store, schema_id))
    waiting = tuple(sorted({*found.waiting, *_unlisted(found)}))
    calm = replace(found, delta_orphans=(), base_orphans=(), leftovers=(), waiting=waiting, lost_manifest="")
    return Reconciled(schema_id, calm, busy=True)


def look(store: EntityStore, schema_id: int) -> Differences:
    """How the manifest and the objects of a schema differ now."""
    # The manifest first: a file that is published meanwhile then looks like an orphan at worst, never like a loss.
    held = store.manifests.load(schema_id)
    found = compare(held.manifest, _objects(store, schema_id), delta_folder(store.config.s3_prefix, schema_id))
    # A file may be listed that is not where files are written now: the prefix is a setting.
    gone = tuple(entry for entry in found.missing if store.objects.head(entry.path) is None)
    lost = store.manifests.key(schema_id) if held.meta is None and _stored(store, schema_id) else ""
    return replace(found, missing=gone, lost_manifest=lost)


def _unlisted(found: Differences) -> tuple[str, ...]:
    return (*found.delta_orphans, *found.base_orphans, *found.leftovers)


def _stored(store: EntityStore, schema_id: int) -> bool:
    with store.connect() as conn:
        return ChangeLog(store.tables, schema_id, "").stored(conn)


def _objects(store: EntityStore, schema_id: int) -> Iterator[str]:
    prefixes = [store.config.s3_prefix]
    if store.compaction.temp_prefix:
        prefixes.append(store.compaction.temp_prefix)
    for prefix in dict.fromkeys(prefixes):
        for folder in (base_folder(prefix, schema_id), delta_folder(prefix, schema_id)):
            yield from (meta.path for meta in store.objects.list(folder))


def _repair(
    store: EntityStore, schema: EntitySchema, found: Differences, lock: SchemaLock
) -> tuple[int, tuple[str, ...]]:
    changes = ChangeLog(store.tables, schema.schema_id, schema.digest)
    orphans = [*found.delta_orphans, *found.base_orphans]
    damaged: list[ModakError] = []
    rows = 0
    for path in orphans:
        try:
            rows += _make_dirty(store, changes, path)
        except ModakError as error:
            if error.code != "entities.damaged":
                raise
            damaged.append(error)
    for low, high in _lost_ranges(found):
        rows += _make_range_dirty(store, changes, low, high)
    if found.missing or found.lost_manifest:
        gone = [entry.path for entry in found.missing]
        held = store.manifests.load(schema.schema_id)
        lock.check()
        reach("reconcile.before_drop")
        store.manifests.save(held, lambda now: dropping(now, gone))
        reach("reconcile.dropped")
    if orphans:
        _give_up(store, store.manifests.load(schema.schema_id), orphans, lock)
    log.info("entities.repaired", schema=schema.schema_id, rows=rows, orphans=len(orphans), lost=len(found.missing))
    if damaged:
        raise damaged[0]
    return rows, tuple(entry.path for entry in found.missing)


def _make_dirty(store: EntityStore, changes: ChangeLog, path: str) -> int:
    """The keys of an unlisted file become dirty, a batch at a time."""
    import pyarrow.parquet as pq

    rows = 0
    with local_files(store.objects, [ManifestEntry(path)], verify=False) as (local,), store.connect() as conn:
        try:
            with pq.ParquetFile(local) as file:
                for batch in file.iter_batches(KEY_ROWS, columns=["row_id"]):
                    reach("reconcile.before_dirty")
                    rows += changes.make_dirty(conn, batch.column(0).to_pylist(), store.now_ms)
                    reach("reconcile.made_dirty")
        except (OSError, ValueError, KeyError) as error:
            raise ModakError(
                "entities.damaged",
                f"{path} is not listed and cannot be read, so nobody knows which rows it had.",
                hint="Everything else was repaired. modak-worker entities verify tells whether rows are missing.",
            ) from error
    return rows


def _lost_ranges(found: Differences) -> Iterator[tuple[str, str]]:
    """The row ids that may have been in what is lost."""
    first, last = str(UUID(int=0)), str(UUID(int=2**128 - 1))
    if found.lost_manifest:
        yield first, last
    for entry in found.missing:
        yield entry.min_row_id or first, entry.max_row_id or last


def _make_range_dirty(store: EntityStore, changes: ChangeLog, low: str, high: str) -> int:
    """Every row of a range becomes dirty, deleted ones too: their tombstones may be lost."""
    with store.connect() as conn:
        return changes.make_range_dirty(conn, low, high, store.now_ms)


def _collect(store: EntityStore, schema_id: int, lock: SchemaLock, grace_ms: int) -> tuple[int, int]:
    held = store.manifests.load(schema_id)
    planned: Collection = plan_gc(held.manifest, _objects(store, schema_id), store.now_ms, grace_ms)
    if planned.notice:
        held = _give_up(store, held, planned.notice, lock)
        if grace_ms == 0:
            planned = plan_gc(held.manifest, _objects(store, schema_id), store.now_ms, 0)
    store.objects.sweep(timedelta(milliseconds=max(grace_ms, GRACE_MS)))
    if planned.delete:
        reach("gc.before_delete")
        store.objects.delete(planned.delete)
        reach("gc.deleted")
        lock.check()
        store.manifests.save(held, lambda now: forgetting(now, planned.delete))
        reach("gc.forgotten")
    log.info("entities.collected", schema=schema_id, deleted=len(planned.delete), noticed=len(planned.notice))
    return len(planned.delete), len(planned.notice) + len(planned.waiting) if grace_ms else 0


def _give_up(store: EntityStore, held: Held, paths: tuple[str, ...] | list[str], lock: SchemaLock) -> Held:
    lock.check()
    reach("gc.before_notice")
    store.manifests.save(held, lambda now: giving_up(now, paths, store.now_ms))
    reach("gc.noticed")
    return store.manifests.load(held.manifest.schema_id)
