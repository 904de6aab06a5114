"""Staged batches become part of the lake: their files and their labels in one transaction.

Labels are taken in the order in which they were accepted, several at once as long as no key comes twice among them; a
key that does waits for the next commit, so the later batch wins. Corrections older than a batch give way to it, newer
ones stay. A label that is itself to blame fails alone; under any other trouble all of them stay staged. Memory is
bounded by the keys of one commit's labels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, LiteralString

import psycopg
import structlog

from modak.catalog import loads, oplock
from modak.catalog.journal import Journal
from modak.catalog.lease import Epoch
from modak.catalog.loads import Label
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.locate import KeyFile
from modak.lake.model import DataFile, data_folder
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.storage import remote
from modak.storage.uri import local_path
from modak.tables.ingest import overlay
from modak.tables.ingest.commit import Landing, Retired
from modak.tables.ingest.plan import room_of
from modak.tables.ingest.rows import Intake
from modak.tables.ingest.run import shaped
from modak.tables.load.stage import Staged
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger()

MOST_LABELS = 64
MOST_KEYS = 2_000_000
GRACE = timedelta(hours=72)
"""How long files of a failed or interrupted load are kept where the table's policy says nothing else."""

_NOBODY_INGESTS: LiteralString = """
    SELECT NOT EXISTS (SELECT FROM modak.op_log
        WHERE table_id = %s AND kind = 'ingest' AND phase NOT IN ('committed', 'done', 'abandoned', 'failed'))
"""
_THEIR_OWN = frozenset({"load.damaged", "load.missing", "load.misplaced", "ingest.lines_moved"})
"""What is wrong with a label itself. The store, the lake and this worker may be well again tomorrow."""
_GONE = frozenset({"storage.missing", "storage.not_found"})


@dataclass(frozen=True, slots=True)
class Adopted:
    """What one pass over a table's staged labels did."""

    table: TableName
    labels: int = 0
    rows: int = 0
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Waiting:
    label: Label
    staged: Staged


def adopt(site: Site, epoch: Epoch, name: TableName) -> Adopted:
    """Bring every staged label of a table into the lake, in the name of a leader's epoch."""
    done = Adopted(name)
    try:
        while True:
            state = site.reader.state(name)
            if _has_to_wait(state):
                return done
            batch = _next(site, site.writer(epoch), state)
            if not batch:
                return done
            done = _settle(site, site.writer(epoch), state, batch, done)
    except psycopg.Error as error:
        raise translate(error) from error


def _has_to_wait(state: TableState) -> bool:
    # The rows of an ingest are older than those of a batch that came while it worked, and land first.
    ingesting = any(op.kind == "ingest" and not op.landed for op in state.unfinished)
    return ingesting or state.table.frozen is not None


def _settle(site: Site, writer: CatalogWriter, state: TableState, batch: Sequence[_Waiting], done: Adopted) -> Adopted:
    try:
        rows = _adopt(site, writer, state, batch)
        return replace(done, labels=done.labels + len(batch), rows=done.rows + rows)
    except ModakError as error:
        if error.code not in _THEIR_OWN:
            raise
        if len(batch) > 1:
            # One of them is to blame: each alone, so that it fails alone.
            for one in batch:
                done = _settle(site, writer, site.reader.state(state.table.name), [one], done)
            return done
        label = batch[0].label.label
        _fail(writer, state, label, error)
        return replace(done, failed=(*done.failed, label))


def _fail(writer: CatalogWriter, state: TableState, label: str, error: ModakError) -> None:
    with writer.step() as tx:
        loads.fail(tx.conn, state.table.table_id, label, f"{error.code}: {error.message}")
    reach("adopt.failed")
    log.error("load.poisoned", table=str(state.table.name), label=label, code=error.code, error=error.message)


def _next(site: Site, writer: CatalogWriter, state: TableState) -> list[_Waiting]:
    """The next labels that no key has in common; the first of them always."""
    waiting: list[_Waiting] = []
    with site.connect(autocommit=True) as conn:
        labels = loads.staged(conn, state.table.table_id, MOST_LABELS)
    for label in labels:
        try:
            waiting.append(_Waiting(label, Staged.of(label.files)))
        except Refused as error:
            _fail(writer, state, label.label, error)
    batch: list[_Waiting] = []
    keys = 0
    for one in waiting:
        keys += one.staged.keys.rows
        if batch and (keys > MOST_KEYS or _clashes(site, state, batch, one)):
            break
        batch.append(one)
    return batch


def _clashes(site: Site, state: TableState, batch: Sequence[_Waiting], one: _Waiting) -> bool:
    """Whether a key of `one` is among those of the labels before it."""
    mine = one.staged.keys
    near = [each.staged.keys for each in batch if _overlap(each.staged.keys, mine)]
    if not near:
        return False
    try:
        return _any_common(near, mine)
    except ModakError:
        # Files that cannot be read are found out when the label is adopted alone.
        return True


def _overlap(some: KeyFile, other: KeyFile) -> bool:
    return some.lower <= other.upper and other.lower <= some.upper


def _any_common(several: Sequence[KeyFile], one: KeyFile) -> bool:
    import pyarrow as pa

    from modak.lake.match import KeySet

    batches = list(_read(one))
    if not batches:
        return False
    keys = KeySet([column.combine_chunks() for column in pa.Table.from_batches(batches).columns])
    return any(len(keys.find(batch.columns)) for other in several for batch in _read(other))


def _read(keys: KeyFile) -> Iterator[pa.RecordBatch]:
    """The keys of a label as they were staged; a file that is not what its label says refuses that label."""
    import pyarrow as pa

    from modak.lake.iceberg.output import mapped

    rows = 0
    with _there(keys.uri), mapped(keys.uri) as source:
        try:
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                batch.validate(full=True)
                rows += len(batch)
                yield batch
        # Of a file that is there but damaged, Arrow says any of these.
        except (pa.ArrowException, OSError, ValueError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise Refused("load.damaged", f"{keys.uri} cannot be read: {why}") from error
    if rows != keys.rows:
        raise Refused("load.damaged", f"{keys.uri} has {rows:,} keys, its label says {keys.rows:,}.")


@contextmanager
def _there(uri: str) -> Iterator[None]:
    """A staged file that is gone is the label's own trouble; a store that does not answer is not."""
    try:
        yield
    except ModakError as error:
        if error.code not in _GONE:
            raise
        raise Refused("load.missing", f"The staged file {uri} is gone.") from error


def _adopt(site: Site, writer: CatalogWriter, state: TableState, batch: Sequence[_Waiting]) -> int:
    table = state.table
    op_id: OpId = new_op_id(site.clock)
    folder = data_folder(table.location, op_id)
    labels = [one.label.label for one in batch]
    room = room_of(state)
    plan = {
        "table": [table.name.schema, table.name.name],
        "labels": labels,
        "cut_from": min(one.staged.keys.lower for one in batch),
        "cut_to": min(max(one.staged.keys.upper for one in batch) + 1, room.upper),
    }
    # Before the journal: what a closed store refuses here every round leaves no operation behind each time.
    intake = _intake(site, writer, state)
    _refuse_misplaced(batch, intake)
    _refuse_damaged(batch, intake)
    with oplock.held(site.dsn, op_id):
        Journal(writer).begin(op_id, table.table_id, "adopt", plan, [folder])
        try:
            Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
            files = tuple(_moved(file, folder) for one in batch for file in one.staged.files)
            reach("adopt.files_copied")
            keys = [one.staged.keys for one in batch]
            landing = Landing(site, writer, state, intake, op_id, folder, keys)

            def also(tx: CommitTransaction) -> None:
                tx.require("An ingest has begun since the labels were looked at.", _NOBODY_INGESTS, (table.table_id,))
                tx.steps.append(lambda conn: loads.adopted(conn, table.table_id, labels, op_id))

            def older() -> list[Retired]:
                return [
                    (overlay.superseded(site, table.table_id, intake.shape, [one.staged.keys], seen), seen)
                    for one in batch
                    if (seen := one.label.pg_snapshot) is not None
                ]

            located, _, _ = landing.land(files, (), "adopt", OpPhase.WRITING, also, older)
        except ModakError as error:
            give_up(site, writer, table.location, op_id, error)
            raise
        reach("adopt.landed")
        landed = site.reader.op(op_id)
        assert landed is not None
        tidy_landed(site, writer, site.reader.state(table.name), landed)
    rows = sum(file.rows for file in files)
    log.info("load.adopted", table=str(table.name), labels=len(labels), rows=rows, replaced=located.rows)
    return rows


def _intake(site: Site, writer: CatalogWriter, state: TableState) -> Intake:
    with site.connect(autocommit=True) as conn:
        heap = describe(conn, state.table.name, state.table.tier_key)
    _, shape = shaped(site, writer, state, heap)
    return Intake(shape, room_of(state))


def _refuse_misplaced(batch: Sequence[_Waiting], intake: Intake) -> None:
    for one in batch:
        why = intake.room.refusal(one.staged.keys.lower, one.staged.keys.upper)
        if why is not None:
            raise Refused("load.misplaced", f"Label {one.label.label!r}: {why}.")


def _refuse_damaged(batch: Sequence[_Waiting], intake: Intake) -> None:
    """Before anything rests on them: what finds the keys in the lake would fail for every label at once."""
    for one in batch:
        for keys in _read(one.staged.keys):
            if not set(intake.shape.key_names) <= set(keys.schema.names):
                raise Refused("load.damaged", f"{one.staged.keys.uri} lacks columns of the key.")


def _moved(file: DataFile, folder: str) -> DataFile:
    """A staged file under its place in the table: by a link where that is possible, else by a copy of the store."""
    name = file.path.rpartition(f"/{_stage_of(file.path)}/")[2]
    stage = _stage_of(file.path)
    target = f"{folder}/{stage}/{name}"
    reach("adopt.before_copy")
    source_path, target_path = local_path(file.path), local_path(target)
    if source_path is not None and target_path is not None:
        _link(Path(source_path), Path(target_path), file)
    else:
        with _there(file.path):
            size, version = remote.identity(file.path)
            if size != file.bytes:
                raise Refused("load.damaged", f"{file.path} has {size} bytes, its label says {file.bytes}.")
            remote.copy(file.path, target, version)
    return replace(file, path=target, json=file.json.replace(file.path, target))


def _link(source: Path, target: Path, file: DataFile) -> None:
    try:
        if source.stat().st_size != file.bytes:
            raise Refused("load.damaged", f"{file.path} is not as large as its label says.")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target)
    except FileNotFoundError:
        raise Refused("load.missing", f"The staged file {file.path} is gone.") from None
    except OSError:
        remote.copy(f"file://{source}", f"file://{target}", remote.identity(f"file://{source}")[1])
    for place in (target, target.parent, target.parent.parent):
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _stage_of(path: str) -> str:
    from modak.tables.load.stage import FOLDER

    return path.partition(f"/{FOLDER}/")[2].partition("/")[0]


def sweep(site: Site, grace: timedelta = GRACE) -> int:
    """Remove the folders of stages that nobody needs any more; returns how many."""
    swept = 0
    with site.connect(autocommit=True) as conn:
        for stage in loads.stages_over(conn, grace):
            if not loads.is_over(conn, stage, grace):
                continue
            try:
                reach("load.before_sweep")
                site.store.delete_prefix(stage.folder)
            except ModakError as error:
                # The folders of other profiles do not wait for this one.
                log.warning("load.not_swept", folder=stage.folder, code=error.code, because=error.message)
                continue
            loads.forget_stage(conn, stage.stage_id)
            reach("load.swept")
            swept += 1
    return swept
