"""After a commit, and after a crash: remove exactly the files that the journal says are ours and that nothing
references.

Nothing here lists a whole table. An operation's data lies in one folder, each attempt's manifests in another, its
metadata JSON has a name that follows from operation and attempt; all of them are known to the journal before they are
written. Only what an expiry has freed is found by comparing (`maintenance/freeing.py`), which may take long: whoever
comes by an expiry of another one leaves that to the thread of maintenance (`finish_expiries`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from modak.catalog import oplock, spill
from modak.catalog.journal import Journal
from modak.catalog.records import OpRecord, TableState
from modak.catalog.write import CatalogWriter
from modak.core.errors import Conflict, ModakError, NotLeader
from modak.core.faults import reach
from modak.core.ids import OpId
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.core.underway import is_under_way, working
from modak.lake.changes import Range
from modak.lake.model import attempt_folder, data_folder, metadata_stem
from modak.storage.store import normal
from modak.tables.maintenance.engine import MaintenanceEngine, engine_of
from modak.tables.maintenance.freeing import free
from modak.tables.site import Site

log = structlog.get_logger()


_NOT_OURS = frozenset({"journal.moved_on", "spark.gateway_lost"})
COPY = "copy"
"""The kind of operation that a first copy journals."""


@contextmanager
def copying_alone(site: Site, table_id: int) -> Iterator[None]:
    """One process at a time copies a table; the lock ends with the process."""
    with site.connect(autocommit=True) as conn:
        row = conn.execute("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))", (_copy_lock(table_id),)).fetchone()
        if not (row and row[0]):
            raise Conflict(
                "copy.running",
                "Another process copies this table right now.",
                hint="Let it finish, or stop it and run the same command again.",
                retryable=True,
            )
        try:
            yield
        finally:
            # Not left to the end of the session, which the server notices a moment later.
            if not conn.closed:
                conn.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", (_copy_lock(table_id),))


def _is_copying(site: Site, table_id: int) -> bool:
    with site.connect(autocommit=True) as conn:
        row = conn.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", (_copy_lock(table_id),)
        ).fetchone()
        return not (row and row[0])


def _copy_lock(table_id: int) -> str:
    return f"modak copy {table_id}"


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


def tidy_landed(
    site: Site, writer: CatalogWriter, state: TableState, op: OpRecord, engine: MaintenanceEngine | None = None
) -> int:
    """Remove what a landed operation left over; while a pin needs some of it, the operation stays unfinished."""
    if op.kind == "register":
        if state.cutline.t is None or not is_busy(open_spill(site, writer, state.table.name)):
            Journal(writer).finish(op.op_id)
        return 0
    if op.cleanup.get("withdraw"):
        from modak.tables.mirror.replication import withdraw

        withdraw(site, op.cleanup["withdraw"])
    removed = 0
    if not op.cleanup.get("tidied"):
        removed += _tidy_folders(site, state, op)
    freed: Sequence[str] = op.cleanup.get("freed", ())
    if op.cleanup.get("expired_from"):
        deleted, freed = free(site, writer, state.table, op, engine or engine_of(site))
        removed += deleted
    kept = list(op.cleanup.get("obsolete", ()))
    if kept:
        needed = _needed_metadata(site, state)
        kept = [uri for uri in kept if normal(uri) in needed]
    obsolete = [uri for uri in op.cleanup.get("obsolete", ()) if uri not in kept]
    removed += _delete(site, obsolete)
    gone = [*op.cleanup.get("expired", ()), *freed]
    removed += _delete(site, gone)
    if not kept and not op.cleanup.get("tagged"):
        Journal(writer).finish(op.op_id)
    elif obsolete or gone or not op.cleanup.get("tidied"):
        # Until the pin has gone, the operation's own metadata and snapshot may go: its folders are not looked at again.
        Journal(writer).note(op.op_id, cleanup={"tidied": True, "obsolete": kept, "expired": [], "freed": []})
    return removed


def _needed_metadata(site: Site, state: TableState) -> set[str]:
    """Metadata files that readers have pinned, that is published, or that an expiry has yet to compare with."""
    found = {pin.metadata_location for pin in state.pins} | {state.cutline.metadata_location}
    # Asked anew: one may have landed since the state was read.
    unfinished = site.reader.unfinished_ops(state.table.table_id)
    return {normal(uri) for uri in (*found, *(op.cleanup.get("expired_from") for op in unfinished)) if uri}


def _tidy_folders(site: Site, state: TableState, op: OpRecord) -> int:
    landed = int(op.cleanup.get("attempt", op.attempt))
    location, metadata = state.table.location, str(op.cleanup["metadata"])
    removed = sum(discard_attempt(site, location, op.op_id, n) for n in range(1, landed))
    try:
        if site.store.exists(metadata):
            removed += _delete(site, site.lake.unreferenced(attempt_folder(location, op.op_id, landed), metadata))
        return removed + _delete(site, _stray_data(site, state, op))
    except ModakError:
        if not _is_expired(site, state, op):
            raise
        # Nobody can say any more what its snapshot had; what it has left is an orphan, and swept as one.
        log.info("tidy.expired", op=op.op_id, kind=op.kind, table=str(state.table.name))
        return removed


def _is_expired(site: Site, state: TableState, op: OpRecord) -> bool:
    lake, snapshot = site.lake.load(state.table.lake), op.cleanup.get("snapshot")
    return lake is not None and snapshot is not None and int(snapshot) not in {s.id for s in site.lake.snapshots(lake)}


def open_spill(site: Site, writer: CatalogWriter, name: TableName) -> ModakError | None:
    """Let plain INSERTs of historical rows reach the delta where no partition is in the way; else why they do not."""
    try:
        with site.connect(autocommit=True) as conn:
            spill.enable(conn, name, writer.hold)
    except NotLeader:
        raise
    except ModakError as error:
        log.info("spill.not_enabled", table=str(name), because=error.message)
        return error
    return None


def is_busy(error: ModakError | None) -> bool:
    """Whether all that was in the way is a lock."""
    return error is not None and error.code == "postgres.busy"


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
    """Files of the operation's folder that its snapshot does not have: of tasks that Spark ran twice, keys, …"""
    if op.cleanup.get("exact"):
        return []
    listed = {entry.uri for entry in site.store.list(data_folder(state.table.location, op.op_id))}
    snapshot = op.cleanup.get("snapshot")
    kept = {normal(path) for path in op.cleanup.get("kept", ())}
    if listed and snapshot is not None and "kept" not in op.cleanup:
        rows = Range(state.table.tier_key, op.plan.get("cut_from"), op.plan.get("cut_to"))
        for found in site.lake.files(state.table.lake, int(snapshot), rows=rows):
            kept.update(normal(path) for path in (found.file.path, *(vector.path for vector in found.vectors)))
    return sorted(uri for uri in listed if normal(uri) not in kept)


def _metadata_of(site: Site, location: str, op_id: OpId, attempt: int) -> list[str]:
    # The version in front is not known after a crash; what follows it is.
    ending = metadata_stem(0, op_id, attempt).partition("-")[2]
    return [e.uri for e in site.store.list(f"{location}/metadata/") if ending in e.uri.rpartition("/")[2]]


def give_up(site: Site, writer: CatalogWriter, location: str, op_id: OpId, error: ModakError) -> None:
    """After a failure that is not a crash: clean up now. If even that fails, the journal does it in the next cycle."""
    try:
        op = site.reader.op(op_id)
        if op is None or op.landed or Journal(writer).landed(op_id):
            return
        discard_operation(site, location, op)
        Journal(writer).fail(op_id, op.phase, error)
    except ModakError as another:
        log.warning("tidy.deferred", op=op_id, because=another.code)


def _is_somebody_at(site: Site, state: TableState, op: OpRecord, copying: bool) -> bool:
    """Whether another thread or a command works on an operation right now."""
    if is_under_way(op.op_id) or (op.kind in oplock.OWNED and oplock.is_held(site.dsn, op.op_id)):
        return True
    return op.kind == COPY and not copying and _is_copying(site, state.table.table_id)


@contextmanager
def unless_done() -> Iterator[None]:
    """A neighbour may be tidying the same operation; whoever comes second has nothing left to do."""
    try:
        yield
    except Conflict as lost:
        if lost.code != "journal.moved_on":
            raise


def finish_operations(
    site: Site, writer: CatalogWriter, state: TableState, *, copying: bool = False
) -> list[tuple[OpRecord, int]]:
    """Deal with every operation of a table that has not ended: tidy what landed, undo what did not.

    A first copy runs in a command of its own, beside the daemon; who is not that command lets it work. Expiries whose
    files are still to be compared are left to `finish_expiries`: nobody waits for them.
    """
    handled: list[tuple[OpRecord, int]] = []
    for op in state.unfinished:
        if not _has_to_compare(op) and not _is_somebody_at(site, state, op, copying):
            with unless_done():
                handled += _finish(site, writer, state, op)
    return handled


def finish_expiries(site: Site, writer: CatalogWriter, name: TableName, engine: MaintenanceEngine | None = None) -> int:
    """Delete what landed expiries of a table have freed, by the site's engine or another; how many wait for later."""
    waiting = [op for op in site.reader.unfinished_ops(site.reader.state(name).table.table_id) if _has_to_compare(op)]
    if any(is_under_way(op.op_id) for op in waiting):
        # It would delete metadata that the other one is reading, which then begins anew: one after the other.
        return len(waiting)
    later = 0
    for op in waiting:
        try:
            with unless_done(), working(op.op_id):
                _compare(site, writer, name, op.op_id, engine)
        except ModakError as error:
            if isinstance(error, NotLeader) or error.code in _NOT_OURS:
                raise
            # All other work goes on; the next one looks again.
            log.warning("expiry.later", op=op.op_id, table=str(name), code=error.code, error=error.message)
            later += 1
    return later


def _has_to_compare(op: OpRecord) -> bool:
    return op.landed and bool(op.cleanup.get("expired_from"))


def _compare(site: Site, writer: CatalogWriter, name: TableName, op_id: OpId, engine: MaintenanceEngine | None) -> None:
    # Asked anew: comparing for the one before may have taken long.
    op = site.reader.op(op_id)
    if op is not None and op.phase is OpPhase.COMMITTED:
        removed = tidy_landed(site, writer, site.reader.state(name), op, engine)
        log.info("expiry.freed", op=op_id, table=str(name), files_removed=removed)


def _finish(site: Site, writer: CatalogWriter, state: TableState, op: OpRecord) -> list[tuple[OpRecord, int]]:
    journal = Journal(writer)
    if not op.landed and not journal.landed(op.op_id):
        removed = discard_operation(site, state.table.location, op)
        journal.abandon(op.op_id, op.phase)
        return [(op, removed)]
    current = site.reader.op(op.op_id) or op
    if current.phase is not OpPhase.COMMITTED or _has_to_compare(current):
        return []
    with working(op.op_id):
        # It may take long, and a neighbour should not do the same beside it.
        removed = tidy_landed(site, writer, state, current)
    ended = site.reader.op(op.op_id)
    # One that waits for a pin is looked at in every cycle and has nothing to tell.
    told = removed or ended is None or ended.phase is OpPhase.DONE
    return [(current, removed)] if told else []
