"""Folding one table: batch after batch while there is backlog, each plan → write → locate → commit → tidy.

The daemon does it each cycle after tiering, `modak-worker compact` once. A correction made while a fold runs is either
in its snapshot or stays for the next one; nothing waits for anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
import structlog

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.locate import Located, LocatedFile, Lookup
from modak.lake.model import LakeTable, data_folder
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.postgres.snapshot import ExportSnapshot
from modak.tables.evolve import evolve
from modak.tables.fold.commit import Batch, commit
from modak.tables.fold.debt import tell_debt
from modak.tables.fold.plan import DRIVER_LAKE_ROWS, FoldPlan, foldable_below, plan_fold
from modak.tables.fold.read import Shape, shape_of
from modak.tables.fold.survey import has_rows, survey
from modak.tables.fold.write import Share, Written, write_share
from modak.tables.observe import observe
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site
from modak.tables.tidy import finish_operations, give_up
from modak.tables.upkeep import trim_snapshots

if TYPE_CHECKING:
    from modak.lake.iceberg.locate import Run

log = structlog.get_logger()

MOST_BATCHES = 20
"""Per pass, so that one table's flood of corrections does not keep the others waiting for ever."""
REPLANS = 5
FEW_VALUES = 2_000
"""A column of at most this many different values is worth a dictionary."""
SWEEP_ROWS = 1_000_000


@dataclass(frozen=True, slots=True)
class FoldReport:
    """What one pass did."""

    table: TableName
    batches: int = 0
    rows: int = 0
    upserts: int = 0
    replaced: int = 0
    files: int = 0
    vectors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    snapshot_id: int | None = None
    swept: int = 0
    left: int = 0
    blocked: str | None = None

    @property
    def changed(self) -> bool:
        """Whether anything was folded."""
        return self.batches > 0


def fold(site: Site, epoch: Epoch, name: TableName) -> FoldReport:
    """Fold the backlog of a table in the name of a leader's epoch."""
    try:
        return _pass(site, epoch, name)
    except psycopg.Error as error:
        raise translate(error) from error


def plan(site: Site, name: TableName) -> FoldPlan | str | None:
    """What the next batch would be, or why there is none; changes nothing."""
    state = site.reader.state(name)
    return _blocked(state) or _plan(site, state)


def _pass(site: Site, epoch: Epoch, name: TableName) -> FoldReport:
    writer = site.writer(epoch)
    state = site.reader.state(name)
    for op, removed in finish_operations(site, writer, state):
        log.info("repair.cleaned", table=str(name), op=op.op_id, kind=op.kind, files_removed=removed)
    with site.connect(autocommit=True) as conn:
        if not has_rows(conn, state.table.table_id):
            tell_debt(site, state, 0)
            return FoldReport(name, blocked=_blocked(state), snapshot_id=state.cutline.snapshot_id)
    report = FoldReport(name, swept=_sweep(writer, state), blocked=_blocked(state))
    all_taken = False
    while report.blocked is None and report.batches < MOST_BATCHES and not all_taken:
        done = _next(site, writer, name)
        if done is None:
            break
        report = _added(report, done)
        all_taken = not done.plan.more
    if report.changed:
        trim_snapshots(site, writer, name)
    after = site.reader.state(name)
    # Counting walks over all that was just removed; what came in meanwhile is the next pass's.
    left = 0 if all_taken else site.reader.delta_backlog(state.table.table_id)
    tell_debt(site, after, left)
    return replace(report, left=left, snapshot_id=after.cutline.snapshot_id)


def _blocked(state: TableState) -> str | None:
    if state.cutline.t is None:
        return "a table whose heap has every row has no corrections to fold"
    if state.table.frozen is not None:
        return "a foreign snapshot has frozen publication"
    if state.staged_loads:
        # Corrections that are newer than a staged row could not be told from older ones once they are in the lake.
        return "a staged load waits for its adoption"
    if _under_ingest(state):
        return "an ingest is under way"
    return None


def _under_ingest(state: TableState) -> bool:
    return any(op.kind == "ingest" and not op.landed for op in state.unfinished)


def _require_no_ingest(site: Site, name: TableName) -> None:
    """Asked after the snapshot: what it shows is older than the beginning of any ingest that is not seen now."""
    if _under_ingest(site.reader.state(name)):
        raise Conflict("fold.ingest_began", f"An ingest into {name} has begun.")


def _require_same_columns(site: Site, state: TableState, heap: PgTable) -> None:
    """Asked after the snapshot: images in it may use a column or a name that came after the lake had followed."""
    record = state.table
    with site.connect(autocommit=True) as conn:
        now = describe(conn, record.name, record.tier_key)
    if (now.oid, _columns(now)) != (heap.oid, _columns(heap)):
        raise Conflict("fold.columns_changed", f"The columns of {record.name} have changed since the fold looked.")


def _columns(heap: PgTable) -> list[tuple[object, ...]]:
    return [(column.attnum, column.name, column.type, column.missing_value) for column in heap.columns]


def _sweep(writer: CatalogWriter, state: TableState) -> int:
    """Remove folded rows that were kept for readers who are gone."""
    with writer.step() as tx:
        swept = tx.sweep_delta(state.table.table_id, SWEEP_ROWS)
    if swept:
        log.info("fold.swept", table=str(state.table.name), rows=swept)
    return swept


@dataclass(frozen=True, slots=True)
class _Done:
    """One batch that has landed."""

    plan: FoldPlan
    batch: Batch
    located: Located
    seconds: float


def _next(site: Site, writer: CatalogWriter, name: TableName) -> _Done | None:
    for again in range(REPLANS):
        state = site.reader.state(name)
        chosen = None if _blocked(state) else _plan(site, state)
        if chosen is None:
            return None
        try:
            return _fold(site, writer, chosen)
        except Conflict as conflict:
            # The world changed between plan and commit: look again and plan from what is there.
            if again == REPLANS - 1:
                raise
            log.info("fold.again", table=str(name), because=conflict.code, detail=conflict.message)
    raise AssertionError("unreachable")


def _plan(site: Site, state: TableState) -> FoldPlan | None:
    from modak.spark.conf import cores

    with site.connect(autocommit=True) as conn:
        backlog = survey(conn, state, foldable_below(state), site.settings.corrections.compaction_batch)
    return plan_fold(state.table.name, backlog, cores())


def _fold(site: Site, writer: CatalogWriter, chosen: FoldPlan) -> _Done:
    started = site.clock.monotonic()
    with site.connect(autocommit=True) as conn:
        observed, delta = observe(site, conn, chosen.table), _delta(conn)
    state, heap = observed.catalog, observed.heap
    lake, shape = _evolved(site, writer, state, heap)
    op_id = new_op_id(site.clock)
    folder = data_folder(state.table.location, op_id)
    Journal(writer).begin(op_id, state.table.table_id, "fold", _journaled(chosen), [folder])
    log.info("fold.planned", table=str(chosen.table), rows=chosen.rows, shares=len(chosen.shares), more=chosen.more)
    try:
        with ExportSnapshot(site.dsn, [delta]) as snapshot:
            reach("fold.snapshot_taken")
            _require_same_columns(site, state, heap)
            _require_no_ingest(site, chosen.table)
            Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
            shares = _shares(site, state, heap, lake, shape, chosen, snapshot.id, folder)
            written = tuple(_write(site, chosen, shares))
            snapshot.check()
            batch = Batch(chosen, written, _locator(site, state, shape, chosen, written, folder), snapshot.pg_snapshot)
            located = commit(site, writer, site.reader.state(chosen.table), lake, op_id, batch)
    except ModakError as error:
        give_up(site, writer, state.table.location, op_id, error)
        raise
    seconds = site.clock.monotonic() - started
    log.info(
        "fold.committed",
        table=str(chosen.table),
        rows=batch.rows,
        replaced=located.rows,
        files=len(batch.files),
        vectors=len(located.vectors),
        seconds=round(seconds, 2),
        rows_per_second=round(batch.rows / max(seconds, 1e-9)),
    )
    finish_operations(site, writer, site.reader.state(chosen.table))
    return _Done(chosen, batch, located, site.clock.monotonic() - started)


def _evolved(site: Site, writer: CatalogWriter, state: TableState, heap: PgTable) -> tuple[LakeTable, Shape]:
    """The lake table with every column that the heap has, and how delta rows fit into it."""
    record = state.table
    mapped, problems = map_columns(heap, record.numeric_as, frozenset({*record.pk_columns, record.tier_key}))
    if problems:
        raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
    lake = site.lake.load(record.lake)
    if lake is None:
        raise Refused("lake.missing", f"The lake table {record.lake} is gone from the catalog.")
    lake = evolve(site, writer, state, heap, mapped, lake)
    return lake, shape_of(record, heap, mapped, lake)


def _shares(
    site: Site,
    state: TableState,
    heap: PgTable,
    lake: LakeTable,
    shape: Shape,
    chosen: FoldPlan,
    snapshot: str,
    folder: str,
) -> list[Share]:
    few = frozenset(c.name for c in heap.columns if c.n_distinct is not None and 0 < c.n_distinct <= FEW_VALUES)
    cut = tuple(sorted({part.upper for part in state.partitions if part.upper is not None}))
    return [
        Share(
            site.dsn,
            state.table.table_id,
            rows,
            snapshot,
            shape,
            folder,
            f"{number:05d}",
            lake.layout,
            lake.spec_id,
            site.settings.lake.target_file_bytes,
            few,
            cut,
        )
        for number, rows in enumerate(chosen.shares)
    ]


def _write(site: Site, chosen: FoldPlan, shares: Sequence[Share]) -> list[Written]:
    reach("fold.before_write")
    if chosen.in_driver:
        written = [write_share(share) for share in shares]
    else:
        from modak.spark.distribute import distribute

        written = distribute(site.spark, write_share, shares, on_progress=_progress(site, chosen, "write"))
    reach("fold.after_write")
    return written


def _locator(
    site: Site, state: TableState, shape: Shape, chosen: FoldPlan, written: Sequence[Written], folder: str
) -> Any:
    from modak.lake.iceberg.locate import Locator
    from modak.spark.conf import cores

    return Locator(
        site.lake,
        state.table.lake,
        [share.keys for share in written],
        shape.keys,
        shape.tier_key,
        folder,
        _looker(site, chosen),
        least_tasks=1 if chosen.in_driver else cores(),
    )


def _looker(site: Site, chosen: FoldPlan) -> Run:
    def run(tasks: Sequence[Lookup]) -> Sequence[tuple[LocatedFile, ...]]:
        from modak.lake.iceberg.locate import look_up

        reach("fold.before_locate")
        if chosen.in_driver and sum(task.rows for task in tasks) <= DRIVER_LAKE_ROWS:
            found = [look_up(task) for task in tasks]
        else:
            from modak.spark.distribute import distribute

            found = distribute(site.spark, look_up, tasks, on_progress=_progress(site, chosen, "locate"))
        reach("fold.after_locate")
        return found

    return run


def _progress(site: Site, chosen: FoldPlan, step: str) -> Callable[[int, int], None]:
    started = site.clock.monotonic()

    def tell(done: int, total: int) -> None:
        spent = site.clock.monotonic() - started
        left = round(spent / done * (total - done), 1) if done else None
        log.info("fold.progress", table=str(chosen.table), step=step, tasks=done, of=total, seconds_left=left)

    return tell


def _delta(conn: psycopg.Connection[Any]) -> tuple[int, TableName]:
    """The delta itself, to be held against a rewrite while it is read."""
    row = conn.execute("SELECT 'modak.delta'::regclass::oid::int8").fetchone()
    assert row is not None
    return int(row[0]), TableName("modak", "delta")


def _journaled(chosen: FoldPlan) -> dict[str, object]:
    return {
        "cut_from": chosen.whole.lower,
        "cut_to": chosen.cut_to,
        "rows": chosen.rows,
        "table": [chosen.table.schema, chosen.table.name],
    }


def _added(report: FoldReport, done: _Done) -> FoldReport:
    files = done.batch.files
    return replace(
        report,
        batches=report.batches + 1,
        rows=report.rows + done.batch.rows,
        upserts=report.upserts + sum(file.rows for file in files),
        replaced=report.replaced + done.located.rows,
        files=report.files + len(files),
        vectors=report.vectors + len(done.located.vectors),
        bytes=report.bytes + sum(file.bytes for file in files),
        seconds=report.seconds + done.seconds,
    )
