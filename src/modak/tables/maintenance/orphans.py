"""Files in a table's data folder that nothing references and that are old enough go; opt-in.

Only a crash of a foreign writer between write and commit leaves such files, ours are known to the journal. Never taken
are files that any retained snapshot reaches (pinned ones are retained), files of operations in flight and of loads that
wait for adoption. A table whose folder overlaps another table's is not swept at all. Listing and comparing are the
engine's; the driver holds the names of the old files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
from modak.storage.store import Entry
from modak.storage.uri import normal
from modak.tables.maintenance.engine import MaintenanceEngine
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
    before = datetime.fromtimestamp(step.older_than_millis / 1000, UTC)
    folder = f"{state.table.location}/data"
    # In this order: a listed file of an operation that has begun since the plan (an adoption links files as old as
    # their load) is that of one which is still unfinished, or of one which has landed and is referenced.
    listed = engine.listed(folder, before)
    unfinished = {op.op_id for op in site.reader.unfinished_ops(state.table.table_id)}
    old = list(_allowed(listed, plan.bounds, unfinished, state))
    found = sorted(engine.unreferenced(state.table.lake, old), key=lambda entry: entry.uri)
    if not found:
        return None
    counters = {"files_deleted": len(found), "bytes_deleted": sum(entry.size for entry in found)}
    op_id = new_op_id(site.clock)
    with working(op_id):
        journal = Journal(writer)
        journal.begin(op_id, state.table.table_id, "orphans", {"base": plan.base})
        journal.phase(op_id, OpPhase.PLANNED, OpPhase.PREPARED)
        reach("orphans.before_commit")
        with writer.transaction(op_id) as tx:
            tx.count(**counters)
            tx.tidy_later(tidied=True, expired=[entry.uri for entry in found])
        reach("orphans.after_commit")
        landed = site.reader.op(op_id)
        assert landed is not None
        tidy_landed(site, writer, site.reader.state(plan.table), landed)
    log.info("maintenance.orphans", table=str(plan.table), **counters)
    return counters


def _allowed(
    listed: Iterable[Entry], bounds: Bounds, unfinished: Collection[str], state: TableState
) -> Iterator[Entry]:
    in_flight = {*bounds.in_flight, *unfinished}
    theirs = tuple(f"{normal(state.table.location)}/data/op-{op_id}/" for op_id in in_flight)
    for entry in listed:
        if entry.uri not in bounds.staged and not entry.uri.startswith(theirs):
            yield entry


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
