"""The one transaction of a tiering operation: lake pointer, T, S, partition states, delta and journal move together
or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import LiteralString

from modak.catalog.records import DeltaRange, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.ids import OpId
from modak.core.states import OpPhase, PartitionState
from modak.lake.changes import Append, Change, Overwrite, SetProperties
from modak.lake.model import LakeTable, Prepared
from modak.tables.landing import Landed, land
from modak.tables.retention.plan import RETENTION_LINE
from modak.tables.site import Site
from modak.tables.tiering.export import Exported
from modak.tables.tiering.plan import TieringPlan

CUT_LINE = "modak.cut-line"
"""Table property: T as of this metadata, so that a foreign reader knows where the lake ends."""
RETIERED = "modak.retiered-by"

WATCHED: LiteralString = """
    SELECT count(*) = cardinality(%(leaves)s::oid[]) FROM modak.partitions p
    JOIN pg_trigger g ON g.oid = p.trigger_oid AND g.tgrelid = p.leaf_oid AND g.tgenabled = 'A'
        AND g.tgfoid = 'modak.capture'::regproc AND g.tgtype = 29 AND g.tgqual IS NULL
    JOIN pg_class c ON c.oid = p.leaf_oid AND pg_relation_filenode(c.oid) = p.relfilenode
    WHERE p.table_id = %(table)s AND p.state <> 'dropped' AND p.leaf_oid = ANY (%(leaves)s::oid[])
"""
"""True when every leaf is still the same file and has been watched by the same trigger since it was sealed."""


WATCHED_AGAIN: LiteralString = """
    UPDATE modak.partitions SET relfilenode = %(file)s
    WHERE table_id = %(table)s AND leaf_oid = %(leaf)s AND state = 'tiered'
"""
"""From this export on the lake has all that the trigger did not see; before it, a crash must not make us believe so."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the export relied on, checked again inside the transaction."""

    leaves: Mapping[int, int]
    """The leaves by oid, each with the file that was read."""
    pg_snapshot: str


def commit(
    site: Site, writer: CatalogWriter, plan: TieringPlan, op_id: OpId, exported: Exported, evidence: Evidence
) -> Landed:
    """Publish the exported files and move the cut-line, in one transaction."""

    def changes(lake: LakeTable, state: TableState) -> Sequence[Change]:
        return [*_rows(site, lake, state, plan, exported), SetProperties(_lines(lake, state, plan))]

    def within(tx: CommitTransaction, prepared: Prepared, state: TableState) -> None:
        table_id = state.table.table_id
        _still_watched(tx, table_id, evidence)
        names = [partition.name for partition in plan.partitions]
        tx.partitions(table_id, names, PartitionState.TIERING, PartitionState.TIERED)
        tx.advance(table_id, plan.cut_from, plan.cut_to, prepared.snapshot_id, prepared.new_location)
        tx.retire_delta(table_id, DeltaRange(plan.cut_from, plan.cut_to), evidence.pg_snapshot)
        tx.count(rows=exported.rows, bytes=exported.bytes, files=len(exported.files))

    return land(site, writer, plan.table, op_id, OpPhase.WRITING, changes, within, "tier")


def replace_range(
    site: Site, writer: CatalogWriter, plan: TieringPlan, op_id: OpId, exported: Exported, evidence: Evidence
) -> Landed:
    """Publish what the heap holds in a range that is in the lake already; the cut-line stays."""

    def changes(lake: LakeTable, state: TableState) -> Sequence[Change]:
        return [*_rows(site, lake, state, plan, exported), SetProperties({RETIERED: op_id})]

    def within(tx: CommitTransaction, prepared: Prepared, state: TableState) -> None:
        table_id = state.table.table_id
        for leaf, file in evidence.leaves.items():
            tx.change("The export of a leaf", WATCHED_AGAIN, {"table": table_id, "leaf": leaf, "file": file})
        _still_watched(tx, table_id, evidence)
        becomes = replace(state.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        tx.move(state.cutline, becomes)
        tx.retire_delta(table_id, DeltaRange(plan.cut_from, plan.cut_to), evidence.pg_snapshot)
        tx.count(rows=exported.rows, bytes=exported.bytes, files=len(exported.files))

    return land(site, writer, plan.table, op_id, OpPhase.WRITING, changes, within, "retier")


def _rows(site: Site, lake: LakeTable, state: TableState, plan: TieringPlan, exported: Exported) -> list[Change]:
    column = state.table.tier_key
    if site.lake.overlapping_files(state.table.lake, column, plan.cut_from, plan.cut_to):
        # The range was here before (an earlier registration, or a leaf nobody watched): the heap is the truth.
        return [Overwrite(column, plan.cut_from, plan.cut_to, exported.files, validate_from=lake.snapshot_id)]
    return [Append(exported.files)] if exported.files else []


def _lines(lake: LakeTable, state: TableState, plan: TieringPlan) -> dict[str, str]:
    lines = {CUT_LINE: str(plan.cut_to)}
    if RETENTION_LINE in lake.properties and state.cutline.retention_line is not None:
        # A new registration may have begun below the line that an earlier one has left.
        lines[RETENTION_LINE] = str(state.cutline.retention_line)
    return lines


def _still_watched(tx: CommitTransaction, table_id: int, evidence: Evidence) -> None:
    tx.require(
        "A sealed partition was rewritten, or its capture trigger was removed or disabled: it is exported again.",
        WATCHED,
        {"table": table_id, "leaves": list(evidence.leaves)},
    )
