"""After a commit, and after a crash: remove exactly the files that the journal says are ours and that nothing
references.

Nothing here lists a whole table. An operation's data lies in one folder, each attempt's manifests in another, its
metadata JSON has a name that follows from operation and attempt; all of them are known to the journal before they are
written.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from modak.catalog import spill
from modak.catalog.journal import Journal
from modak.catalog.records import OpRecord, TableState
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.core.ids import OpId
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.changes import Range
from modak.lake.model import attempt_folder, data_folder, metadata_stem
from modak.storage.store import normal
from modak.tables.site import Site

log = structlog.get_logger()


def discard_attempt(site: Site, location: str, op_id: OpId, attempt: int) -> int:
    """Remove what an attempt that did not land has written."""
    reach("tidy.before_attempt")
    removed = site.store.delete_prefix(attempt_folder(location, op_id, attempt))
    removed += site.store.delete(_metadata_of(site, location, op_id, attempt))
    reach("tidy.after_attempt")
    return removed


def discard_operation(site: Site, location: str, op: OpRecord) -> int:
    """Remove everything that an operation which did not land has written."""
    reach("tidy.before_data")
    removed = site.store.delete_prefix(data_folder(location, op.op_id))
    reach("tidy.after_data")
    return removed + sum(discard_attempt(site, location, op.op_id, attempt) for attempt in range(1, op.attempt + 1))


def tidy_landed(site: Site, writer: CatalogWriter, state: TableState, op: OpRecord) -> int:
    """Remove what a landed operation left over; while a pin needs some of it, the operation stays unfinished."""
    if op.kind == "register":
        if open_spill(site, state.table.name):
            Journal(writer).finish(op.op_id)
        return 0
    removed = 0
    if not op.cleanup.get("tidied"):
        removed += _tidy_folders(site, state, op)
    pinned = {normal(pin.metadata_location) for pin in state.pins} | {normal(state.cutline.metadata_location)}
    obsolete = [uri for uri in op.cleanup.get("obsolete", ()) if normal(uri) not in pinned]
    removed += _delete(site, obsolete)
    removed += _delete(site, op.cleanup.get("expired", ()))
    if len(obsolete) == len(op.cleanup.get("obsolete", ())) and not op.cleanup.get("tagged"):
        Journal(writer).finish(op.op_id)
    elif not op.cleanup.get("tidied"):
        # Until the pin has gone, the operation's own metadata and snapshot may go: its folders are not looked at again.
        Journal(writer).note(op.op_id, cleanup={"tidied": True})
    return removed


def _tidy_folders(site: Site, state: TableState, op: OpRecord) -> int:
    landed = int(op.cleanup.get("attempt", op.attempt))
    location, metadata = state.table.location, str(op.cleanup["metadata"])
    removed = sum(discard_attempt(site, location, op.op_id, n) for n in range(1, landed))
    if site.store.exists(metadata):
        removed += _delete(site, site.lake.unreferenced(attempt_folder(location, op.op_id, landed), metadata))
    return removed + _delete(site, _stray_data(site, state, op))


def open_spill(site: Site, name: TableName) -> bool:
    """Let plain INSERTs of historical rows reach the delta where no partition is in the way; False: busy, ask again."""
    try:
        with site.connect(autocommit=True) as conn:
            spill.enable(conn, name)
    except ModakError as error:
        log.info("spill.not_enabled", table=str(name), because=error.message)
        return error.code != "postgres.busy"
    return True


def purge(site: Site, writer: CatalogWriter, op: OpRecord) -> int:
    """Remove all files of a table whose unregistration has landed, and end the operation."""
    location = str(op.cleanup["purge"])
    with site.connect(autocommit=True) as conn:
        # One process at a time: a late second one would delete what a new registration has begun to write there.
        row = conn.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", (f"modak {location}",)).fetchone()
        if not (row and row[0]):
            raise Conflict("lake.purging", f"{location} is just being removed.", hint="Try again.", retryable=True)
        current = site.reader.op(op.op_id)
        if current is None or current.phase is not OpPhase.COMMITTED:
            return 0
        reach("purge.before_delete")
        removed = site.store.delete_prefix(location)
        reach("purge.after_delete")
        Journal(writer).finish(op.op_id, {"files_removed": removed})
    return removed


def finish_purges(site: Site, writer: CatalogWriter, location: str) -> None:
    """Before a new table takes a location: remove what an interrupted unregistration has left there."""
    for op in site.reader.unfinished_ops():
        if op.landed and op.cleanup.get("purge") == location:
            log.info("repair.cleaned", op=op.op_id, kind=op.kind, files_removed=purge(site, writer, op))


def _delete(site: Site, uris: Iterable[str]) -> int:
    wanted = list(uris)
    if not wanted:
        return 0
    reach("tidy.before_delete")
    removed = site.store.delete(wanted)
    reach("tidy.after_delete")
    return removed


def _stray_data(site: Site, state: TableState, op: OpRecord) -> list[str]:
    """Files of tasks that Spark ran twice: in the operation's folder, but not in its snapshot."""
    listed = {entry.uri for entry in site.store.list(data_folder(state.table.location, op.op_id))}
    snapshot = op.cleanup.get("snapshot")
    if not listed or snapshot is None:
        return []
    rows = Range(state.table.tier_key, op.plan.get("cut_from"), op.plan.get("cut_to"))
    kept = {normal(found.file.path) for found in site.lake.files(state.table.lake, int(snapshot), rows=rows)}
    return sorted(uri for uri in listed if normal(uri) not in kept)


def _metadata_of(site: Site, location: str, op_id: OpId, attempt: int) -> list[str]:
    # The version in front is not known after a crash; what follows it is.
    ending = metadata_stem(0, op_id, attempt).partition("-")[2]
    return [e.uri for e in site.store.list(f"{location}/metadata/") if ending in e.uri.rpartition("/")[2]]


def finish_operations(site: Site, writer: CatalogWriter, state: TableState) -> list[tuple[OpRecord, int]]:
    """Deal with every operation of a table that has not ended: tidy what landed, undo what did not."""
    handled: list[tuple[OpRecord, int]] = []
    journal = Journal(writer)
    for op in state.unfinished:
        if op.landed or journal.landed(op.op_id):
            current = site.reader.op(op.op_id) or op
            if current.phase is OpPhase.COMMITTED:
                removed = tidy_landed(site, writer, state, current)
                ended = site.reader.op(op.op_id)
                # One that waits for a pin is looked at in every cycle and has nothing to tell.
                if removed or ended is None or ended.phase is OpPhase.DONE:
                    handled.append((current, removed))
            continue
        removed = discard_operation(site, state.table.location, op)
        journal.abandon(op.op_id, op.phase)
        handled.append((op, removed))
    return handled
