"""Files in a table's data folder that nothing references and that are old enough go; opt-in.

Only a crash of a foreign writer between write and commit leaves such files, ours are known to the journal. Never taken
are files that any retained snapshot reaches (pinned ones are retained), files of operations in flight and of loads that
wait for adoption. A table whose folder overlaps another table's is not swept at all, and nothing goes while the lake
lacks a snapshot that is published or pinned. Listing and comparing are the engine's; what is found is journaled and
deleted batch by batch, and the driver holds one, or as much of a listing as it compares itself
(`engine.LISTED_AT_ONCE`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import LiteralString

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter
from modak.core.errors import Refused
from modak.core.faults import reach
from modak.core.ids import new_op_id
from modak.core.states import OpPhase
from modak.core.underway import working
from modak.storage.uri import normal
from modak.tables.maintenance.engine import MaintenanceEngine, Orphan, batches
from modak.tables.maintenance.freeing import BATCH, needed_snapshots, require_listed
from modak.tables.maintenance.plan import Bounds, MaintenancePlan, OrphanStep
from modak.tables.site import Site
from modak.tables.tidy import tidy_landed

log = structlog.get_logger()

_OTHERS: LiteralString = """
    SELECT table_namespace || '.' || table_name, metadata_location FROM modak_iceberg.iceberg_tables
    WHERE (table_namespace, table_name) <> (%s, %s) AND metadata_location IS NOT NULL
    UNION ALL
    SELECT schema_name || '.' || table_name, location || '/metadata/registered' FROM modak.tables WHERE table_id <> %s
"""


def sweep(
    site: Site, writer: CatalogWriter, engine: MaintenanceEngine, plan: MaintenancePlan, step: OrphanStep
) -> dict[str, int] | None:
    """Delete orphans; None when there are none."""
    state = site.reader.state(plan.table)
    refuse_overlap(site, state)
    _require_needed(site, state)
    before = datetime.fromtimestamp(step.older_than_millis / 1000, UTC)
    totals = Counter[str]()
    reach("orphans.before_listing")
    for unreferenced in engine.listed(state.table.lake, f"{state.table.location}/data", before):
        reach("orphans.after_listing")
        # In this order: a listed file of an operation that has begun since the plan (an adoption links files as old as
        # their load) is that of one which is still unfinished, or of one which has landed and is referenced.
        unfinished = {op.op_id for op in site.reader.unfinished_ops(state.table.table_id)}
        for batch in batches(_allowed(unreferenced(), plan.bounds, unfinished, state), BATCH):
            # Again, since the table that was compared with has been loaded in between.
            _require_needed(site, state)
            totals.update(_delete(site, writer, plan, batch))
    if not totals:
        return None
    log.info("maintenance.orphans", table=str(plan.table), **totals)
    return dict(totals)


def _require_needed(site: Site, state: TableState) -> None:
    needed = needed_snapshots(site, state.table)
    lake = site.lake.load(state.table.lake)
    require_listed(state.table, needed, [each.id for each in site.lake.snapshots(lake)] if lake else ())


def _delete(site: Site, writer: CatalogWriter, plan: MaintenancePlan, orphans: Sequence[Orphan]) -> Counter[str]:
    """One operation: a batch is journaled, then deleted."""
    counters = Counter(files_deleted=len(orphans), bytes_deleted=sum(orphan.size for orphan in orphans))
    state, op_id = site.reader.state(plan.table), new_op_id(site.clock)
    with working(op_id):
        journal = Journal(writer)
        journal.begin(op_id, state.table.table_id, "orphans", {"base": plan.base})
        journal.phase(op_id, OpPhase.PLANNED, OpPhase.PREPARED)
        reach("orphans.before_commit")
        with writer.transaction(op_id) as tx:
            tx.count(**counters)
            tx.tidy_later(tidied=True, expired=sorted(orphan.uri for orphan in orphans))
        reach("orphans.after_commit")
        landed = site.reader.op(op_id)
        assert landed is not None
        tidy_landed(site, writer, state, landed)
    return counters


def _allowed(
    found: Iterable[Orphan], bounds: Bounds, unfinished: Collection[str], state: TableState
) -> Iterator[Orphan]:
    in_flight = {*bounds.in_flight, *unfinished}
    theirs = tuple(f"{normal(state.table.location)}/data/op-{op_id}/" for op_id in in_flight)
    for orphan in found:
        if orphan.uri not in bounds.staged and not orphan.uri.startswith(theirs):
            yield orphan


def refuse_overlap(site: Site, state: TableState) -> None:
    """Stop when another table's files may lie in this table's folder, or the other way round."""
    record = state.table
    own = normal(record.location) + "/"
    with site.connect(autocommit=True) as conn:
        rows = conn.execute(_OTHERS, (record.lake.namespace_text, record.lake.name, record.table_id)).fetchall()
    for name, metadata in rows:
        other = normal(metadata).rsplit("/", 2)[0] + "/"
        if other.startswith(own) or own.startswith(other):
            raise Refused(
                "maintenance.overlap",
                f"The files of {name} lie in {other}, which overlaps the folder of {record.name}: a sweep by listing"
                " could take them.",
                hint="Move one of the two tables; until then orphans of both stay.",
            )
