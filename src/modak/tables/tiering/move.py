"""One tiering operation from the journal to the tidying: seal → export → commit.

`move` takes aged partitions into the lake and moves the cut-line. `move_again` exports a tiered partition once more,
because it was not watched without a break and the lake may lack a write; the heap copy, still there, replaces the
range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.records import PartitionRecord, TableRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase, PartitionState
from modak.lake.model import data_folder
from modak.postgres.describe import Leaf, PgTable, describe
from modak.postgres.snapshot import ExportSnapshot, HeldLeaf
from modak.tables.evolve import evolve
from modak.tables.landing import Landed
from modak.tables.observe import Observed
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site
from modak.tables.tidy import discard_operation, finish_operations
from modak.tables.tiering.commit import Evidence, commit, replace_range
from modak.tables.tiering.export import Exported, Source, export, fits_driver, plan_splits
from modak.tables.tiering.plan import TieringPlan
from modak.tables.tiering.seal import seal

log = structlog.get_logger()

FEW_VALUES = 2_000
"""A column of at most this many different values is worth a dictionary."""

Publish = Callable[[Site, CatalogWriter, TieringPlan, OpId, Exported, Evidence], Landed]


@dataclass(frozen=True, slots=True)
class Moved:
    """What one operation moved."""

    op_id: OpId
    rows: int
    bytes: int
    files: int
    snapshot_id: int | None
    seconds: float


def move(site: Site, epoch: Epoch, observed: Observed, plan: TieringPlan) -> Moved:
    """Take the partitions of a plan into the lake."""
    return _move(site, epoch, observed, plan, "tier", commit)


def move_again(site: Site, epoch: Epoch, observed: Observed, plan: TieringPlan) -> Moved:
    """Export partitions again that are tiered but were not watched without a break."""
    return _move(site, epoch, observed, plan, "retier", replace_range)


def _move(site: Site, epoch: Epoch, observed: Observed, plan: TieringPlan, kind: str, publish: Publish) -> Moved:
    started = site.clock.monotonic()
    record, writer = observed.record, site.writer(epoch)
    op_id = new_op_id(site.clock)
    folder = data_folder(record.location, op_id)
    Journal(writer).begin(op_id, record.table_id, kind, _journaled(plan), [folder])
    try:
        exported, landed = _export_and_publish(site, epoch, writer, observed, plan, op_id, publish)
    except ModakError as error:
        _give_up(site, writer, record, op_id, error)
        raise
    log.info("tiering.committed", table=str(plan.table), snapshot=landed.prepared.snapshot_id, rows=exported.rows)
    finish_operations(site, writer, site.reader.state(plan.table))
    return Moved(
        op_id,
        exported.rows,
        exported.bytes,
        len(exported.files),
        landed.prepared.snapshot_id,
        site.clock.monotonic() - started,
    )


def _export_and_publish(
    site: Site,
    epoch: Epoch,
    writer: CatalogWriter,
    observed: Observed,
    plan: TieringPlan,
    op_id: OpId,
    publish: Publish,
) -> tuple[Exported, Landed]:
    record = observed.record
    source = _source(site, writer, observed)
    leaves = _leaves(site, observed, plan)
    seal(site, epoch, record, [(part, leaf) for part, leaf in zip(plan.partitions, leaves, strict=True)])
    log.info("tiering.sealed", table=str(plan.table), partitions=[part.name for part in plan.partitions])
    with ExportSnapshot(site.dsn, [(leaf.oid, leaf.table_name) for leaf in leaves]) as snapshot:
        reach("export.snapshot_taken")
        _refuse_new_columns(site, observed.heap, record.tier_key)
        _note_export(site, writer, record, plan, op_id, snapshot.held)
        exported = _export(site, plan, source(snapshot.held), op_id, snapshot.id)
        snapshot.check()
        evidence = Evidence({leaf.oid: leaf.relfilenode for leaf in snapshot.held}, snapshot.pg_snapshot)
        return exported, publish(site, writer, plan, op_id, exported, evidence)


def _source(site: Site, writer: CatalogWriter, observed: Observed) -> Callable[[Sequence[HeldLeaf]], Source]:
    record = observed.record
    keys = frozenset({*record.pk_columns, record.tier_key})
    mapped, problems = map_columns(observed.heap, record.numeric_as, keys)
    if problems:
        raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
    lake = site.lake.load(record.lake)
    if lake is None:
        raise Refused("lake.missing", f"The lake table {record.lake} is gone from the catalog.")
    lake = evolve(site, writer, observed.catalog, observed.heap, mapped, lake)
    few = frozenset(
        c.name for c in observed.heap.columns if c.n_distinct is not None and 0 < c.n_distinct <= FEW_VALUES
    )
    cut = tuple(sorted(part.upper for part in observed.state.partitions if part.upper is not None))
    return lambda held: Source(
        site.dsn, tuple(held), tuple(mapped), lake, record.tier_key, few, site.settings.lake.target_file_bytes, cut
    )


def _leaves(site: Site, observed: Observed, plan: TieringPlan) -> list[Leaf]:
    found = []
    for partition in plan.partitions:
        leaf = observed.leaves.get(partition.name) or _detached(site, observed.records.get(partition.name))
        if leaf is None:
            raise Conflict("tiering.leaf_gone", f"Partition {partition.name} of {plan.table} is gone.")
        found.append(leaf)
    return found


def _detached(site: Site, part: PartitionRecord | None) -> Leaf | None:
    """A leaf between detach and drop: no longer below its table, but still the one that the catalog knows."""
    if part is None:
        return None
    with site.connect() as conn:
        alone = describe(conn, TableName(part.leaf_schema, part.name))
    if alone.oid != part.leaf_oid:
        return None
    return Leaf(
        oid=alone.oid,
        schema=part.leaf_schema,
        name=part.name,
        lower=part.lower,
        upper=part.upper,
        is_default=False,
        relfilenode=alone.relfilenode,
        pages=alone.pages,
        bytes=alone.bytes,
        rows_estimate=alone.rows_estimate,
        detach_pending=False,
        kind=alone.relkind,
        is_spill=False,
    )


def _refuse_new_columns(site: Site, seen: PgTable, tier_key: str) -> None:
    # From here on our lock keeps ALTER TABLE out; before it, a column may have come that the plan does not know.
    with site.connect() as conn:
        now = describe(conn, seen.name, tier_key)
    if [(c.name, c.attnum, c.type) for c in now.columns] != [(c.name, c.attnum, c.type) for c in seen.columns]:
        raise Conflict(
            "tiering.columns_changed", f"The columns of {seen.name} changed just now; the plan is made again."
        )


def _note_export(
    site: Site, writer: CatalogWriter, record: TableRecord, plan: TieringPlan, op_id: OpId, held: Sequence[HeldLeaf]
) -> None:
    """Journal which files are read under the lock, and take the partitions from sealing to tiering."""
    parts = {part.leaf_oid: part for part in site.reader.state(plan.table).living()}
    with writer.step() as tx:
        for leaf in held:
            part = parts[leaf.oid]
            if part.state is PartitionState.TIERED:
                continue
            tx.note_leaf(record.table_id, part.name, leaf.oid, leaf.relfilenode, _trigger(part))
            if part.state is PartitionState.SEALING:
                tx.partitions(record.table_id, (part.name,), PartitionState.SEALING, PartitionState.TIERING)
    Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)


def _trigger(part: PartitionRecord) -> int:
    if part.trigger_oid is None:
        raise Conflict("tiering.not_sealed", f"Partition {part.name} is not sealed.")
    return part.trigger_oid


def _export(site: Site, plan: TieringPlan, source: Source, op_id: OpId, snapshot: str) -> Exported:
    from modak.spark.conf import cores

    spark = None if fits_driver(source) else site.spark
    splits = plan_splits(source, op_id, snapshot, max(cores(), spark.sparkContext.defaultParallelism) if spark else 1)
    started = site.clock.monotonic()

    def progress(done: int, total: int) -> None:
        spent = site.clock.monotonic() - started
        left = round(spent / done * (total - done), 1) if done else None
        rows = plan.rows * done // total
        log.info("tiering.progress", table=str(plan.table), tasks=done, of=total, rows=rows, seconds_left=left)

    exported = export(splits, spark, progress if len(splits) > 1 else None)
    seconds = max(site.clock.monotonic() - started, 1e-9)
    log.info(
        "tiering.exported",
        table=str(plan.table),
        rows=exported.rows,
        bytes=exported.bytes,
        files=len(exported.files),
        seconds=round(seconds, 2),
        rows_per_second=round(exported.rows / seconds),
    )
    return exported


def _give_up(site: Site, writer: CatalogWriter, record: TableRecord, op_id: OpId, error: ModakError) -> None:
    """After a failure that is not a crash: clean up now. If even that fails, the journal does it in the next cycle."""
    try:
        op = site.reader.op(op_id)
        if op is None or op.landed or Journal(writer).landed(op_id):
            return
        discard_operation(site, record.location, op)
        Journal(writer).fail(op_id, op.phase, error)
    except ModakError as another:
        log.warning("tiering.cleanup_deferred", table=str(record.name), op=op_id, because=another.code)


def _journaled(plan: TieringPlan) -> dict[str, object]:
    return {
        "cut_from": plan.cut_from,
        "cut_to": plan.cut_to,
        "partitions": [part.name for part in plan.partitions],
        "table": [plan.table.schema, plan.table.name],
    }
