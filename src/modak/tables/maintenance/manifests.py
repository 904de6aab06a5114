"""The manifest list is folded: few manifests, each with files of neighbouring partitions.

Metadata only; Iceberg reads and writes the manifests one entry at a time. The driver holds one text per partition.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict, ModakError
from modak.core.ids import new_op_id
from modak.core.states import OpPhase
from modak.core.underway import working
from modak.lake.changes import Change, RewriteManifests
from modak.lake.model import LakeTable, Prepared
from modak.tables.landing import land
from modak.tables.maintenance.plan import MaintenancePlan, ManifestStep
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed

log = structlog.get_logger()

_NUMBERS = re.compile(r"(-?\d+)")


def rewrite_manifests(site: Site, writer: CatalogWriter, plan: MaintenancePlan, step: ManifestStep) -> dict[str, int]:
    """Fold the manifests in one commit; returns what it did."""
    state = site.reader.state(plan.table)
    op_id = new_op_id(site.clock)
    counters: dict[str, int] = {}

    def changes(lake: LakeTable, _: TableState) -> Sequence[Change]:
        if lake.snapshot_id is None:
            raise Conflict("maintenance.nothing", "The lake holds nothing.")
        return [RewriteManifests(clusters(site.lake.partitions(lake.identifier, lake.snapshot_id), step.clusters))]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        tx.move(now.cutline, becomes)
        before = int(prepared.summary.get("manifests-replaced", "0"))
        after = int(prepared.summary.get("manifests-created", "0"))
        kept = int(prepared.summary.get("manifests-kept", "0"))
        counters.update(manifests_before=before + kept, manifests_after=after + kept, manifest_bytes=step.bytes)
        tx.count(**counters)

    with working(op_id):
        Journal(writer).begin(op_id, state.table.table_id, "rewrite-manifests", {"base": plan.base})
        try:
            land(site, writer, plan.table, op_id, OpPhase.PLANNED, changes, within, "maintenance")
        except ModakError as error:
            give_up(site, writer, state.table.location, op_id, error)
            raise
        landed = site.reader.op(op_id)
        assert landed is not None
        tidy_landed(site, writer, site.reader.state(plan.table), landed)
    log.info("maintenance.manifests", table=str(plan.table), **counters)
    return counters


def clusters(partitions: Iterable[str], count: int) -> dict[str, str]:
    """Partitions in their order, cut into about equal clusters."""
    ordered = sorted(partitions, key=_natural)
    return {each: f"{place * count // len(ordered):06d}" for place, each in enumerate(ordered)}


def _natural(text: str) -> list[tuple[int, str]]:
    """Numbers inside a text count as numbers."""
    return [(int(part), "") if _NUMBERS.fullmatch(part) else (0, part) for part in _NUMBERS.split(text)]
