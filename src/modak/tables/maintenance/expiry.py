"""Snapshots that nobody needs go, and then the files that only they reached.

The ids are chosen anew for every attempt, from the pins and operations of that moment. The commit takes them out of the
metadata and touches no list of files, so nobody waits for it; which files are free is found out afterwards
(`freeing.py`), and the journal makes that resumable. The driver holds the table's snapshots and manifests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict, ModakError
from modak.core.ids import new_op_id
from modak.core.states import OpPhase
from modak.core.underway import working
from modak.lake.changes import Change, ExpireSnapshots
from modak.lake.model import LakeTable, Prepared
from modak.tables.landing import land
from modak.tables.maintenance.engine import MaintenanceEngine
from modak.tables.maintenance.observe import observed
from modak.tables.maintenance.plan import MaintenancePlan, expirable
from modak.tables.maintenance.policy import Policy
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed
from modak.tables.upkeep import require_unpinned

log = structlog.get_logger()


def expire(
    site: Site,
    writer: CatalogWriter,
    engine: MaintenanceEngine,
    plan: MaintenancePlan,
    policy: Policy,
    ours: Sequence[str] = (),
) -> dict[str, int]:
    """Expire what may go, in one commit; returns what went."""
    state = site.reader.state(plan.table)
    op_id = new_op_id(site.clock)
    going: list[int] = []

    def changes(lake: LakeTable, now: TableState) -> Sequence[Change]:
        seen = observed(site, now, lake, policy, files=False, ours=(op_id, *ours))
        going[:] = expirable(seen, policy)
        if not going:
            raise Conflict("maintenance.nothing", "No snapshot may expire any more.")
        return [ExpireSnapshots(tuple(going))]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        require_unpinned(tx, now.table, going)
        becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        tx.move(now.cutline, becomes)
        tx.count(snapshots=len(going))

    with working(op_id):
        Journal(writer).begin(op_id, state.table.table_id, "expire", {"base": plan.base, "engine": engine.name})
        try:
            land(site, writer, plan.table, op_id, OpPhase.PLANNED, changes, within, "maintenance")
        except ModakError as error:
            give_up(site, writer, state.table.location, op_id, error)
            raise
        landed = site.reader.op(op_id)
        assert landed is not None
        tidy_landed(site, writer, site.reader.state(plan.table), landed, engine)
    ended = site.reader.op(op_id)
    assert ended is not None
    counters = {name: int(ended.counters.get(name, 0)) for name in ("snapshots", "files_deleted")}
    log.info("maintenance.expiry", table=str(plan.table), **counters)
    return counters
