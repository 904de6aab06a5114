"""Rows gone everywhere: heap, delta, lake, and every snapshot that is kept.

Heap rows are deleted by SQL first. Then everything that was on its way before (corrections, loads, exports, changes of
a mirror) arrives in the lake (`settling.py`), so that the lake holds all that is left. Its rows are found by Spark as
(file, position) and hidden by deletion vectors in one commit; then the debt pass writes the files anew and expiry takes
every older snapshot that no reader holds. What is held stays open in `modak.erasures`, and later maintenance passes
finish it. The driver holds the positions of one file, or `AT_ONCE` of them if they belong to several.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import structlog
from psycopg import sql

from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict, ModakError, Refused, UsageError
from modak.core.faults import reach
from modak.core.ids import new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.core.underway import working
from modak.lake.changes import Change, RowDelta
from modak.lake.model import LakeFile, LakeTable, Prepared, Vector, data_folder
from modak.postgres.connect import translate
from modak.storage.uri import normal
from modak.tables.landing import land
from modak.tables.maintenance import condition, erasures
from modak.tables.maintenance.condition import Condition
from modak.tables.maintenance.run import maintain
from modak.tables.maintenance.settling import Settle, by_itself, mark, until_freed
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = structlog.get_logger()

ROUNDS = 3
PASSES = 6
"""How often files are rewritten and snapshots expired before neighbours count as too many."""
AT_ONCE = 1_000_000
"""About so many positions come to the driver at a time."""


@dataclass(frozen=True, slots=True)
class Erased:
    """What was done, and the evidence."""

    heap_rows: int
    lake_rows: int
    files_rewritten: int
    snapshots_expired: int
    waiting: int
    """Snapshots that may still show the rows, held by readers."""
    snapshots_scanned: int = 0
    found: int = 0
    freeing: int = 0
    """Expiries that have still to delete files which may hold the rows."""


def count(site: Site, name: TableName, where: str) -> tuple[int, int]:
    """Rows of the heap and of the published lake state that match; a condition that either cannot read is refused."""
    state = site.reader.state(name)
    return _count(site, state, condition.read(site, state, where))


def _count(site: Site, state: TableState, which: Condition) -> tuple[int, int]:
    with site.connect(autocommit=True) as conn:
        heap = _heap(conn, "SELECT count(*) FROM {} WHERE ({})", state.table.name, which)
    snapshot = state.cutline.snapshot_id
    lake = 0 if snapshot is None else _matching(site, state, snapshot, which).count()
    return heap, int(lake)


def refuse_unreadable(site: Site, name: TableName, where: str) -> None:
    """Refuse a condition that Postgres cannot read; Spark reads it later."""
    which = condition.read(site, site.reader.state(name), where)
    with site.connect(autocommit=True) as conn:
        _heap(conn, "SELECT 1 FROM {} WHERE ({}) LIMIT 0", name, which)


def erase_rows(
    site: Site,
    epoch: Epoch,
    name: TableName,
    where: str,
    *,
    settle: Settle = by_itself,
    erasure_id: int | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Erased:
    """Erase every row that matches, in the name of a leader's epoch."""
    try:
        return _erase(site, epoch, name, where, settle, erasure_id, stopping)
    except psycopg.Error as error:
        raise translate(error) from error


def _erase(
    site: Site,
    epoch: Epoch,
    name: TableName,
    where: str,
    settle: Settle,
    erasure_id: int | None,
    stopping: Callable[[], bool],
) -> Erased:
    writer = site.writer(epoch)
    state = site.reader.state(name)
    if state.table.frozen is not None:
        raise Refused("lake.frozen", "A foreign snapshot has frozen publication.", hint="modak-worker accept first.")
    which = condition.read(site, state, where)
    _count(site, state, which)
    erasure = erasures.begin(writer, state.table.table_id, where) if erasure_id is None else erasure_id
    reach("erase.before_heap")
    with site.connect() as conn:
        heap = _heap(conn, "DELETE FROM {} WHERE ({})", name, which)
        conn.commit()
    reach("erase.after_heap")
    settle(site, epoch, name, mark(site))
    lake_rows = sum(_hide(site, writer, name, which) for _ in range(ROUNDS))
    dirty, below = _under_deletes(site, state)
    erasures.erased(writer, erasure, below, {"heap_rows": heap, "lake_rows": lake_rows})
    done, below = _rewritten(site, epoch, name, Erased(heap, lake_rows, 0, 0, 0), dirty, below, erasure)
    _forget_keys(site, state)
    return _proved(site, epoch, name, which, done, below, stopping)


def _rewritten(
    site: Site, epoch: Epoch, name: TableName, done: Erased, dirty: Collection[str], below: int, erasure: int
) -> tuple[Erased, int]:
    """Write files anew and expire snapshots until only readers hold any; what went, and which snapshots may be left."""
    for again in range(PASSES):
        report = maintain(site, epoch, name)
        if report.failed:
            first = report.failed[0]
            raise ModakError("erase.incomplete", f"{first.name} failed: {first.error}", hint="Run the command again.")
        done = replace(
            done,
            files_rewritten=done.files_rewritten + sum(one.counters.get("files_before", 0) for one in report.passes),
            snapshots_expired=done.snapshots_expired + sum(one.counters.get("snapshots", 0) for one in report.passes),
        )
        state = site.reader.state(name)
        lake = site.lake.load(state.table.lake)
        assert lake is not None
        clean = _first_without(site, lake, dirty, below)
        if clean is not None and clean > below:
            # Neighbours have committed between the hiding and the rewrite: their snapshots hold the old files too.
            below = clean
            erasures.erased(site.writer(epoch), erasure, below, {})
        if clean is not None and (state.pins or not _older(site, lake, below)):
            return done, below
        # A neighbour was faster with some file, or its operation was still reading old snapshots.
        site.clock.sleep(0.5 * (again + 1))
    if clean is None:
        raise ModakError(
            "erase.incomplete", f"Files of {name} are being replaced all the time.", hint="Run the command again."
        )
    return done, below


def _under_deletes(site: Site, state: TableState) -> tuple[frozenset[str], int]:
    """Files whose hidden rows may be those that were erased, and the first sequence number that can be without them."""
    lake = site.lake.load(state.table.lake)
    if lake is None or lake.snapshot_id is None:
        return frozenset(), 0
    current = next(each for each in site.lake.snapshots(lake) if each.id == lake.snapshot_id)
    files = site.lake.files(lake.identifier, lake.snapshot_id)
    dirty = frozenset(each.file.path for each in files if each.deletes)
    return dirty, current.sequence_number + bool(dirty)


def _first_without(site: Site, lake: LakeTable, dirty: Collection[str], below: int) -> int | None:
    """The first sequence number from `below` on whose snapshot has none of the files."""
    if lake.snapshot_id is None or not dirty:
        return below
    later = [each for each in site.lake.snapshots(lake) if each.sequence_number >= below]
    for each in sorted(later, key=lambda one: one.sequence_number):
        if not any(found.file.path in dirty for found in site.lake.files(lake.identifier, each.id)):
            return each.sequence_number
    return None


def _older(site: Site, lake: LakeTable, below: int) -> list[int]:
    """Snapshots that may still show the rows."""
    kept = site.lake.snapshots(lake)
    return [each.id for each in kept if each.sequence_number < below and each.id != lake.snapshot_id]


def _forget_keys(site: Site, state: TableState) -> None:
    """Keys that the pump keeps on the local disk may be those of erased rows; it reads them again as it needs them."""
    from modak.tables.mirror.names import slot_name

    slot = slot_name(state.table.table_id, site.dsn.dbname)
    shutil.rmtree(site.settings.home.path / "mirror" / slot / "keys", ignore_errors=True)


def _proved(
    site: Site,
    epoch: Epoch,
    name: TableName,
    which: Condition,
    done: Erased,
    below: int,
    stopping: Callable[[], bool],
) -> Erased:
    """See to it that the files of older snapshots go, and look again at everything that is left."""
    state = site.reader.state(name)
    lake = site.lake.load(state.table.lake)
    assert lake is not None
    if held := _older(site, lake, below):
        return replace(done, waiting=len(held))
    freeing = until_freed(site, epoch, name, stopping)
    erasures.finish(site, site.writer(epoch), name)
    kept = site.lake.snapshots(lake)
    with site.connect(autocommit=True) as conn:
        found = _heap(conn, "SELECT count(*) FROM {} WHERE ({})", name, which) + _delta(conn, state, which)
    for each in kept:
        found += _matching(site, state, each.id, which).count()
    log.info("erase.proved", table=str(name), snapshots=len(kept), found=found, freeing=freeing)
    return replace(done, snapshots_scanned=len(kept), found=int(found), freeing=freeing)


def _heap(conn: psycopg.Connection[Any], statement: LiteralString, name: TableName, which: Condition) -> int:
    text = which.heap.replace("%", "%%")
    query = sql.SQL(statement).format(sql.Identifier(name.schema, name.name), sql.SQL(text))
    try:
        # With parameters, even none, Postgres takes one statement only.
        cursor = conn.execute(query, [], prepare=True)
    except psycopg.errors.LockNotAvailable:
        raise
    except psycopg.Error as error:
        if (error.sqlstate or "").startswith(("42", "22")):
            raise UsageError(
                "usage.where", f"Postgres cannot read the condition: {error.diag.message_primary}"
            ) from error
        raise
    if cursor.description is None:
        return cursor.rowcount
    row = cursor.fetchone()
    return int(row[0]) if row else 0


def _delta(conn: psycopg.Connection[Any], state: TableState, which: Condition) -> int:
    """Images in the delta that match; those kept for readers go with their pins."""
    query = sql.SQL(
        "SELECT count(*) FROM (SELECT (jsonb_populate_record(NULL::{}, payload)).* FROM modak.delta"
        " WHERE table_id = {} AND payload IS NOT NULL) AS images WHERE ({})"
    ).format(
        sql.Identifier(state.table.name.schema, state.table.name.name),
        sql.Literal(state.table.table_id),
        sql.SQL(which.heap.replace("%", "%%")),
    )
    row = conn.execute(query, [], prepare=True).fetchone()
    return int(row[0]) if row else 0


def _matching(site: Site, state: TableState, snapshot: int, which: Condition) -> DataFrame:
    """The lake rows of a snapshot that match, with where they lie."""
    from pyspark.errors import PySparkException

    lake = state.table.lake
    quoted = ".".join("`" + part.replace("`", "``") + "`" for part in ("modak", *lake.namespace, lake.name))
    try:
        frame = site.spark.sql(f"SELECT * FROM {quoted} VERSION AS OF {snapshot}")  # noqa: S608
        return which.lake(frame).selectExpr("_file AS file", "_pos AS pos")
    except PySparkException as error:
        raise UsageError(
            "usage.where",
            f"Spark cannot read the condition: {str(error).splitlines()[0]}",
            hint="The condition is read by Postgres and by Spark: plain comparisons mean the same to both.",
        ) from error


def _hide(site: Site, writer: CatalogWriter, name: TableName, which: Condition) -> int:
    """Hide the matching rows of the lake's present state; how many."""
    state = site.reader.state(name)
    lake = site.lake.load(state.table.lake)
    if lake is None or lake.snapshot_id is None or _matching(site, state, lake.snapshot_id, which).isEmpty():
        return 0
    op_id = new_op_id(site.clock)
    folder = data_folder(state.table.location, op_id)
    found: dict[int, tuple[list[Vector], list[Vector], int]] = {}

    def changes(now: LakeTable, _: TableState) -> Sequence[Change]:
        assert now.snapshot_id is not None
        if now.snapshot_id not in found:
            found.clear()
            found[now.snapshot_id] = _vectors(site, state, now, now.snapshot_id, which, folder)
        new, replaced, _rows = found[now.snapshot_id]
        if not new:
            raise Conflict("erase.nothing", "The rows are gone already.")
        return [RowDelta(vectors=tuple(new), removed_vectors=tuple(replaced), validate_from=now.snapshot_id)]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        tx.move(now.cutline, becomes)
        tx.count(rows=next(iter(found.values()))[2])

    with working(op_id):
        Journal(writer).begin(op_id, state.table.table_id, "erase", {"base": lake.snapshot_id}, [folder])
        try:
            Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
            reach("erase.before_hide")
            land(site, writer, name, op_id, OpPhase.WRITING, changes, within, "erase")
            reach("erase.after_hide")
        except ModakError as error:
            give_up(site, writer, state.table.location, op_id, error)
            if error.code == "erase.nothing":
                return 0
            raise
        landed = site.reader.op(op_id)
        assert landed is not None
        tidy_landed(site, writer, site.reader.state(name), landed)
    return next(iter(found.values()))[2]


def _vectors(
    site: Site, state: TableState, lake: LakeTable, snapshot_id: int, which: Condition, folder: str
) -> tuple[list[Vector], list[Vector], int]:
    from pyroaring import BitMap64

    from modak.lake.iceberg.rewrite import deleted_in
    from modak.lake.iceberg.vectors import vector_uri, write_vector

    found = _kept(_matching(site, state, snapshot_id, which))
    files = _files(site, lake, snapshot_id, found)
    new: list[Vector] = []
    replaced: list[Vector] = []
    rows = 0
    for path, places in _positions(found):
        each, bits = files[path], BitMap64(places)
        rows += len(bits)
        new.append(write_vector(vector_uri(folder, "erase"), bits | deleted_in(each.vectors), each.file))
        replaced += each.vectors
    return new, replaced, rows


def _kept(matching: DataFrame) -> DataFrame:
    """The same rows, found once: they are asked for their files, and then for their positions."""
    from pyspark import StorageLevel

    return matching.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)


def _files(site: Site, lake: LakeTable, snapshot_id: int, found: DataFrame) -> dict[str, LakeFile]:
    """The files that have rows which match, by their paths."""
    wanted = {normal(row["file"]) for row in found.select("file").distinct().toLocalIterator()}
    listed = ((normal(each.file.path), each) for each in site.lake.files(lake.identifier, snapshot_id))
    return {path: each for path, each in listed if path in wanted}


def _positions(found: DataFrame) -> Iterator[tuple[str, array[int]]]:
    """The positions that match, file by file."""
    from pyspark.sql import functions

    # A partition comes to the driver as a whole.
    parts = -(-found.count() // AT_ONCE) or 1
    grouped = found.repartition(parts, "file").groupBy("file").agg(functions.collect_list("pos").alias("places"))
    for row in grouped.toLocalIterator():
        yield normal(row["file"]), array("Q", row["places"])
