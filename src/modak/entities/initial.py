"""A new base from everything that Postgres has: the beginning of a store, or a new beginning.

Live rows by their ids, in ranges that a walk over the index finds, all under one snapshot; the files are published
once, at the end, in one swap of the manifest. Whatever changes meanwhile is dirty by then and read from Postgres. An
init that is interrupted leaves nothing that anybody sees. Memory in the driver: one description per file.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import structlog
from psycopg import sql

from modak.core.errors import Conflict, Refused
from modak.core.faults import reach
from modak.entities.changelog import ChangeLog, Part, Unfit
from modak.entities.evolution import check_evolution
from modak.entities.export import Exported, check_objects, discard, export_share, land_bases, rolled, share_of
from modak.entities.files import Draft, Writer
from modak.entities.lock import SchemaLock, schema_lock
from modak.entities.manifest import Manifest, ManifestEntry, replacing_base
from modak.entities.manifests import Held
from modak.entities.paths import build_base_temp_path, uuid7
from modak.entities.plan import KeyRange, init_lanes, init_rows, ranges
from modak.entities.registry import EntitySchema
from modak.entities.rows import Lanes, Live
from modak.entities.snapshot import Snapshot, holding
from modak.entities.store import EntityStore
from modak.entities.tables import Installed, check, identifier
from modak.entities.types import file_schema

log = structlog.get_logger()

_LIVE = "SELECT count(*) FROM {main} WHERE ltbase_schema_id = %(schema)s AND ltbase_deleted_at IS NULL"
_BOUNDS = """
SELECT row_id::text FROM (
    SELECT ltbase_row_id AS row_id, row_number() OVER (ORDER BY ltbase_row_id) AS number FROM {main}
    WHERE ltbase_schema_id = %(schema)s AND ltbase_deleted_at IS NULL
) AS numbered WHERE number > 1 AND (number - 1) %% %(rows)s = 0 ORDER BY row_id
"""
# Where files roll by their size, ranges need not be exact: some pages of the table tell where keys are.
_ABOUT = """
SELECT DISTINCT row_id::text FROM (
    SELECT unnest(percentile_disc(%(shares)s::float8[]) WITHIN GROUP (ORDER BY ltbase_row_id)) AS row_id
    FROM {main} TABLESAMPLE SYSTEM (%(percent)s) WHERE ltbase_schema_id = %(schema)s AND ltbase_deleted_at IS NULL
) AS sampled WHERE row_id IS NOT NULL ORDER BY 1
"""
_PAGES = """
SELECT pg_relation_size(%s::regclass) / size, pg_relation_size(%s::regclass) / size
FROM (SELECT current_setting('block_size')::int8 AS size) AS block
"""
SAMPLE_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class InitReport:
    """What an init made."""

    schema_id: int
    rows: int
    files: int
    bytes: int
    marked: int
    unfit: tuple[Unfit, ...]
    seconds: float


def init(store: EntityStore, schema_id: int, *, replace_delta: bool = False) -> InitReport:
    """Export every live row of a schema as new base files and publish them at once."""
    began = time.monotonic()
    schema = store.registry.resolve(schema_id)
    with store.connect() as conn:
        installed = check(conn, store.tables)
    with schema_lock(store.address, schema_id, store.config.change_log_table) as lock:
        if lock is None:
            raise Conflict(
                "entities.locked",
                f"Somebody else works on schema {schema_id}.",
                hint="Wait for the flush or compaction to end, then run init again.",
            )
        held = store.manifests.load(schema_id)
        if held.manifest.delta and not replace_delta:
            raise Refused(
                "entities.delta_exists",
                f"Schema {schema_id} has {len(held.manifest.delta)} delta files, which a new base would replace.",
                hint="Compact them, or run init with --replace-delta.",
            )
        if not replace_delta:
            check_evolution(schema, held.manifest)
        return _init(store, installed, schema, lock, held, began)


def _init(
    store: EntityStore, installed: Installed, schema: EntitySchema, lock: SchemaLock, held: Held, began: float
) -> InitReport:
    changes = ChangeLog(store.tables, schema.schema_id, schema.digest)
    # The snapshot is held to the end: it alone knows which versions of the dirty rows were exported.
    with holding(store, installed) as snapshot:
        reach("init.snapshot_taken")
        exported = _export(store, schema, snapshot)
        snapshot.check()
        drafts = [draft for share in exported for draft in share.drafts] or [_empty(store, schema)]
        unfit = tuple(each for share in exported for each in share.unfit)
        if unfit:
            # They are in no file, so they must be dirty before the files count: then a read takes them from Postgres.
            _put_aside(store, changes, unfit, snapshot)
        landed = land_bases(store, schema, drafts)
        manifest = _publish(store, held, landed.entries, lock)
        marked = _mark(store, changes, unfit, snapshot)
    report = InitReport(
        schema.schema_id,
        sum(entry.row_count for entry in landed.entries),
        len(landed.entries),
        sum(entry.size_bytes for entry in landed.entries),
        marked,
        unfit,
        time.monotonic() - began,
    )
    log.info(
        "entities.initialised",
        schema=schema.schema_id,
        rows=report.rows,
        files=report.files,
        version=manifest.version,
        seconds=round(report.seconds, 2),
    )
    return report


def live_ranges(store: EntityStore, schema: EntitySchema, snapshot: Snapshot) -> tuple[int, tuple[KeyRange, ...], int]:
    """How many rows are live, the ranges that tasks take, and how many rows those have."""
    names: dict[str, object] = {"schema": schema.schema_id}
    main = identifier(store.tables.main)
    row = snapshot.conn.execute(sql.SQL(_LIVE).format(main=main), names).fetchone()
    count = int(row[0]) if row else 0
    size = init_rows(store.config, count, store.crew.cores)
    if count <= size:
        return count, ranges(()), size
    if store.config.target_file_size_mb and count > 10 * SAMPLE_ROWS:
        parts = -(-count // size)
        shares = [part / parts for part in range(1, parts)]
        query, more = _ABOUT, {"shares": shares, "percent": 100 * SAMPLE_ROWS / count}
    else:
        query, more = _BOUNDS, {"rows": size}
    found = snapshot.conn.execute(sql.SQL(query).format(main=main), {**names, **more}).fetchall()
    return count, ranges(str(each[0]) for each in found), size


def _export(store: EntityStore, schema: EntitySchema, snapshot: Snapshot) -> list[Exported]:
    count, parts, size = live_ranges(store, schema, snapshot)
    lanes = Lanes()
    threads = init_lanes(store.config, count, store.crew.cores)
    if threads > 1 and count > store.crew.driver_rows and store.crew.threads > 1:
        # One task that scans once and divides the work costs less than a task for each core, all of which scan.
        parts, lanes = ranges(()), Lanes(threads, *_pages(store, snapshot))
    shares = [share_of(store, schema, snapshot.id, Live(part)) for part in parts]
    target = store.config.target_file_size_mb
    shares = [replace(rolled(share, target, size), lanes=lanes) for share in shares]
    began = time.monotonic()

    def tell(done: int, of: int) -> None:
        passed = time.monotonic() - began
        left = round(passed * (of - done) / done, 1) if done else None
        log.info("entities.init_progress", schema=schema.schema_id, tasks=done, of=of, rows=count, seconds_left=left)

    reach("init.before_export")
    exported = store.crew.run(export_share, shares, count, tell)
    reach("init.after_export")
    return exported


def _pages(store: EntityStore, snapshot: Snapshot) -> tuple[int, int]:
    tables = [identifier(table).as_string() for table in (store.tables.main, store.tables.eav)]
    row = snapshot.conn.execute(_PAGES, tables).fetchone()
    return (int(row[0]), int(row[1])) if row else (0, 0)


def _empty(store: EntityStore, schema: EntitySchema) -> Draft:
    """A base file without rows, which says that the store is there and empty."""

    def name() -> str:
        return build_base_temp_path(store.config.s3_prefix, schema.schema_id, uuid7(store.clock))

    with Writer(store.objects, file_schema(schema), name, store.compression) as writer:
        (draft,) = writer.close(at_least_one=True)
    return draft


def _publish(store: EntityStore, held: Held, entries: tuple[ManifestEntry, ...], lock: SchemaLock) -> Manifest:
    try:
        lock.check()
        check_objects(store, entries)
        reach("init.before_publish")
        manifest = store.manifests.save(held, lambda now: replacing_base(now, entries, store.now_ms))
        reach("init.published")
    except Conflict:
        discard(store, held.manifest.schema_id, [entry.path for entry in entries])
        raise
    return manifest


def _put_aside(store: EntityStore, changes: ChangeLog, unfit: tuple[Unfit, ...], snapshot: Snapshot) -> None:
    with store.connect() as conn:
        reach("init.before_quarantine")
        changes.put_aside(conn, unfit, snapshot.conn, store.now_ms)
        reach("init.quarantined")
    log.warning("entities.quarantined", schema=changes.schema_id, rows=len(unfit), because=unfit[0].reason)


def _mark(store: EntityStore, changes: ChangeLog, unfit: tuple[Unfit, ...], snapshot: Snapshot) -> int:
    """Every version that the snapshot sees, page by page; a row that has changed since stays dirty."""
    aside = {each.row_id for each in unfit}

    def mark(page: Part) -> int:
        with store.connect() as conn:
            return changes.mark(conn, page.without(aside) if aside else page, store.now_ms)

    reach("init.before_mark")
    marked = 0
    with ThreadPoolExecutor(store.crew.cores) as pool:
        marking: deque[Future[int]] = deque()
        for page in changes.slots(snapshot.conn):
            marking.append(pool.submit(mark, page))
            if len(marking) > store.crew.cores:
                marked += marking.popleft().result()
        marked += sum(each.result() for each in marking)
    reach("init.marked")
    return marked
