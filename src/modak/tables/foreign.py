"""Snapshots that somebody else committed to our lake tables.

A `replace` only rearranges rows (a foreign compaction) and is taken along. Anything else changed rows behind our
back: publication freezes, the status says so by name, and it goes on when an operator has looked and accepts it.
"""

from __future__ import annotations

import structlog

from modak.catalog.records import TableRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import Refused
from modak.core.faults import reach
from modak.core.names import TableName
from modak.lake.model import LakeTable
from modak.tables.site import Site

log = structlog.get_logger()


def refuse_foreign_rows(
    site: Site, writer: CatalogWriter, record: TableRecord, lake: LakeTable, since: int | None
) -> None:
    """Freeze publication and stop when a foreign snapshot since ours changed rows."""
    for snapshot in site.lake.foreign_snapshots(lake, since):
        if not snapshot.changes_rows:
            log.info("lake.foreign_rewrite", table=str(record.name), snapshot=snapshot.id)
            continue
        reach("foreign.before_freeze")
        with writer.step() as tx:
            tx.freeze(record.table_id, {"snapshot": snapshot.id, "operation": snapshot.operation})
        reach("foreign.after_freeze")
        log.error("lake.frozen", table=str(record.name), snapshot=snapshot.id, operation=snapshot.operation)
        raise Refused(
            "lake.foreign_rows",
            f"Snapshot {snapshot.id} ({snapshot.operation}) of {record.lake} is not ours and may have changed rows.",
            hint=f"Look at it; to go on from it: modak-worker accept --table {record.name}",
        )


def accept(site: Site, name: TableName) -> str:
    """Take a foreign snapshot as the published state: S moves to it and publication goes on."""
    state = site.reader.state(name)
    lake = site.lake.load(state.table.lake)
    if lake is None:
        raise Refused(
            "lake.missing", f"The lake table of {name} is gone.", hint="Restore it from a backup of the warehouse."
        )
    if state.table.frozen is None and lake.snapshot_id == state.cutline.snapshot_id:
        return f"{name}: nothing to accept, the lake is at the published snapshot."
    reach("foreign.before_accept")
    with site.writer(None).step() as tx:
        tx.publish_foreign(state.cutline, lake.snapshot_id, lake.metadata_location)
        tx.freeze(state.table.table_id, None)
    reach("foreign.after_accept")
    log.info("lake.accepted", table=str(name), snapshot=lake.snapshot_id)
    return f"{name}: snapshot {lake.snapshot_id} accepted; publication goes on."
