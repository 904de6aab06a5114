"""After snapshots have expired: the files that only they reached go.

Comparing takes as long as the table is large, so it comes after the commit, when nobody waits for the pointer. The
commit journals the metadata file that still lists the snapshots. What that one reaches and the table as it is *now*
does not is deleted, batch by batch as it is found; manifests and their lists are journaled and go last, because they
tell of all others. So a crash leaves nothing that the next leader does not find again, by comparing again. What lies
outside the table's own folder is never deleted, and nothing at all while the lake has not what is published or pinned.
The driver holds one batch (of paths that it compares itself, `reaching.AT_ONCE`) and the names of manifests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, LiteralString

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import OpRecord, TableRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.storage.retry import pause
from modak.storage.uri import normal
from modak.tables.maintenance.engine import MaintenanceEngine, batches
from modak.tables.site import Site

if TYPE_CHECKING:
    from modak.lake.iceberg.reaching import Freed

log = structlog.get_logger()

BATCH = 10_000
"""So many files are deleted, and where it is needed journaled, at a time."""
TRIES = 5
_AGAIN = frozenset({"lake.changed_underneath", "lake.failed", "lake.file_missing", "lake.storage"})
"""Another expiry has landed while we compared, or the store has failed: the table is looked at anew."""
_ANOTHER_TABLE = "lake.another_table"
_WAITING: LiteralString = """
    SELECT t.schema_name, t.table_name FROM modak.op_log o JOIN modak.tables t USING (table_id)
    WHERE o.phase NOT IN ('done', 'abandoned', 'failed') AND o.phase = 'committed'
        AND o.cleanup ->> 'expired_from' IS NOT NULL
        AND NOT EXISTS (SELECT FROM modak.pauses p WHERE p.table_id = o.table_id)
    GROUP BY t.table_id ORDER BY min(o.started_at)
"""


def waiting(site: Site) -> list[TableName]:
    """Tables with expiries that have landed and whose files are still there; none that is paused."""
    with site.connect(autocommit=True) as conn:
        return [TableName(schema, name) for schema, name in conn.execute(_WAITING)]


def free(
    site: Site, writer: CatalogWriter, record: TableRecord, op: OpRecord, engine: MaintenanceEngine
) -> tuple[int, list[str]]:
    """Delete the data and delete files that a landed expiry has freed; how many, and the metadata to go after them."""
    before, removed = str(op.cleanup["expired_from"]), 0
    for again in range(1, TRIES + 1):
        try:
            reach("expiry.before_compare")
            freed = _freed(site, record, before)
            for batch in batches(_inside(record, engine.unreached(record.lake, freed)), BATCH):
                reach("expiry.before_delete")
                removed += site.store.delete(batch)
                reach("expiry.after_delete")
            metadata = list(_inside(record, freed.metadata))
            break
        except ModakError as error:
            if error.code == _ANOTHER_TABLE or not site.store.exists(before):
                # Somebody has removed it, and nobody can say any more what the snapshots had (a sweep finds the data),
                # or has put another table in the place of ours: what we would take may be all that is left of it.
                log.warning("expiry.forgotten", table=str(record.name), op=op.op_id, metadata=before)
                metadata = []
                break
            if error.code not in _AGAIN or again == TRIES:
                raise
            log.info("expiry.again", table=str(record.name), op=op.op_id, because=error.message)
            site.clock.sleep(pause(again))
    reach("expiry.after_compare")
    counters = {"files_deleted": removed + len(metadata)}
    Journal(writer).note(op.op_id, counters=counters, cleanup={"expired_from": None, "freed": metadata})
    return removed, metadata


def _freed(site: Site, record: TableRecord, before: str) -> Freed:
    needed = needed_snapshots(site, record)
    freed = site.lake.freed(record.lake, before)
    require_listed(record, needed, freed.snapshots)
    return freed


def needed_snapshots(site: Site, record: TableRecord) -> set[int]:
    """The published snapshot and the pinned ones; asked before the lake is, which has them from then on."""
    state = site.reader.state(record.name)
    needed = {pin.snapshot_id for pin in state.pins} | {state.cutline.snapshot_id}
    return {each for each in needed if each is not None}


def require_listed(record: TableRecord, needed: Collection[int], listed: Collection[int]) -> None:
    """Stop when the lake lacks a snapshot that is needed: what only that one reaches looks as if nobody did."""
    if lost := sorted(set(needed) - set(listed)):
        # The pointer has been set back by hand, or another tool has expired what readers need: nothing more goes.
        raise Conflict(
            "lake.changed_underneath",
            f"Snapshots that are published or pinned are not in {record.lake}: {lost}.",
            hint="Files that seem superfluous stay until the lake has these again, or nobody needs them.",
        )


def _inside(record: TableRecord, uris: Iterable[str]) -> Iterator[str]:
    folder = normal(record.location) + "/"
    return (uri for uri in uris if uri.startswith(folder))
