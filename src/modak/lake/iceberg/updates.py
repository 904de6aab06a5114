"""One change at a time into an open Iceberg transaction, each ended by its own commit (into memory only).

Building an update can fail only for our own mistakes; committing it runs Iceberg's validations, and what they raise
means that somebody changed the table since the plan was made, or that the change itself is not possible. Which of the
two depends on the kind of change and is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from modak.core.errors import Conflict, ModakError, Refused
from modak.lake.changes import (
    AddColumn,
    Append,
    Change,
    CreateTag,
    DeleteRange,
    DropColumn,
    ExpireSnapshots,
    MakeOptional,
    Overwrite,
    Range,
    RemoveTag,
    RenameColumn,
    Rewrite,
    RewriteManifests,
    RowDelta,
    SchemaChange,
    SetProperties,
    SnapshotChange,
    WidenColumn,
)
from modak.lake.iceberg.java import Java, JavaFailure, plainly
from modak.lake.iceberg.output import is_local
from modak.lake.iceberg.read import expression, partition_text
from modak.lake.iceberg.schema import java_type, literal
from modak.lake.model import KIND, OP_ID, DataFile, EqualityDeletes, Vector

Described = DataFile | Vector | EqualityDeletes

_DATA = ".DataFile"
_DELETES = ".DeleteFile"
_FOREVER = 2**63 - 1
_FEW_HERE, _FEW_AFAR = 200, 4
_INVALID = ("ValidationException", "CommitFailedException", "IllegalArgumentException")
_MISFITS = ("Cannot append file with rows that do not match", "Cannot delete file where some, but not all")


class Updates:
    """The changes of one operation, applied to one transaction."""

    def __init__(self, java: Java, transaction: Any, op_id: str, kind: str | None) -> None:
        self._java = java
        self._transaction = transaction
        self._op_id = op_id
        self._kind = kind
        self._specs = transaction.table().specs()
        self._few = self._has_few_manifests()

    def apply(self, change: Change) -> None:
        """Apply one change; raises `Conflict` when the table is not what the change was planned on."""
        try:
            with self._java.failures():
                update = self._build(change)
        except JavaFailure as failure:
            raise self._unbuildable(change, failure) from failure
        try:
            with self._java.failures():
                update.commit()
        except JavaFailure as failure:
            raise _meaning(change, failure) from failure

    def _build(self, change: Change) -> Any:
        if isinstance(change, SnapshotChange):
            return self._files(change)
        if isinstance(change, SchemaChange):
            return self._schema(change)
        match change:
            case SetProperties():
                return self._properties(change)
            case CreateTag(name, snapshot_id):
                manage = self._transaction.manageSnapshots()
                # Said explicitly, because a table property could otherwise let the tag lapse.
                return manage.createTag(name, snapshot_id).setMaxRefAgeMs(name, _FOREVER)
            case RemoveTag(name):
                return self._transaction.manageSnapshots().removeTag(name)
            case ExpireSnapshots():
                return self._expire(change.ids)

    def _files(self, change: SnapshotChange) -> Any:
        match change:
            case Append(files):
                return self._feed(self._signed("newAppend", "append"), ".AppendFiles", "appendFile", _DATA, files)
            case RowDelta():
                return self._row_delta(change)
            case Rewrite():
                return self._rewrite(change)
            case RewriteManifests():
                return self._rewrite_manifests(change)
            case DeleteRange(column, lower, upper):
                filter_ = expression(self._java, Range(column, lower, upper))
                return self._signed("newDelete", "delete").deleteFromRowFilter(filter_)
            case Overwrite():
                return self._overwrite(change)

    def _properties(self, change: SetProperties) -> Any:
        update = self._transaction.updateProperties()
        for key, value in change.values.items():
            update.set(key, value)
        for key in change.removed:
            update.remove(key)
        return update

    def _row_delta(self, change: RowDelta) -> Any:
        update = self._signed("newRowDelta", "row-delta")
        self._feed(update, ".RowDelta", "removeDeletes", _DELETES, change.removed_vectors)
        self._feed(update, ".RowDelta", "addDeletes", _DELETES, change.vectors)
        self._feed(update, ".RowDelta", "addRows", _DATA, change.rows)
        if change.validate_from is not None:
            update.validateFromSnapshot(change.validate_from)
        needed = sorted({*change.data_files_exist, *(vector.data_file for vector in change.vectors)})
        if needed:
            update.validateDataFilesExist(self._java.strings(needed))
        # Otherwise a foreign delete of the data file goes unnoticed.
        update.validateDeletedFiles()
        if change.no_new_rows_in is not None:
            update.conflictDetectionFilter(expression(self._java, change.no_new_rows_in))
            update.validateNoConflictingDataFiles()
        return update

    def _rewrite(self, change: Rewrite) -> Any:
        number = change.data_sequence_number
        if number is None:
            base = self._transaction.table().snapshot(change.validate_from)
            if base is None:
                raise Conflict("lake.changed_underneath", f"Snapshot {change.validate_from} has been expired.")
            number = int(base.sequenceNumber())
        update = self._signed("newRewrite", "rewrite")
        self._feed(update, ".RewriteFiles", "deleteFile", _DATA, change.removed)
        self._feed(update, ".RewriteFiles", "addFile", _DATA, change.added)
        self._feed(update, ".RewriteFiles", "deleteFile", _DELETES, change.removed_deletes)
        self._feed(update, ".RewriteFiles", "addFile", _DELETES, change.vectors)
        return update.dataSequenceNumber(number).validateFromSnapshot(change.validate_from)

    def _rewrite_manifests(self, change: RewriteManifests) -> Any:
        clusters = self._java.jvm.java.util.HashMap()
        for partition, cluster in change.clusters.items():
            clusters.put(partition, cluster)
        any_ = "java.lang.Object"
        lookup = self._java.method("java.util.Map", "getOrDefault", any_, any_, any_).bindTo(clusters)
        # A partition that came after they were listed; the commit is tried again then, or it lands beside the others.
        lookup = self._java.bind(lookup, 1, "new")
        cluster_of = self._java.after(partition_text(self._java), lookup)
        return self._signed("rewriteManifests", "manifests").clusterBy(self._java.function(cluster_of))

    def _overwrite(self, change: Overwrite) -> Any:
        filter_ = expression(self._java, Range(change.column, change.lower, change.upper))
        update = self._signed("newOverwrite", "overwrite").overwriteByRowFilter(filter_)
        self._feed(update, ".OverwriteFiles", "addFile", _DATA, change.files)
        if change.validate_from is not None:
            update.validateFromSnapshot(change.validate_from).conflictDetectionFilter(filter_)
            update.validateNoConflictingData().validateNoConflictingDeletes()
        return update.validateAddedFilesMatchOverwriteFilter()

    def _expire(self, ids: Iterable[int]) -> Any:
        # Without a cut-off of its own the update would also expire by age; without ids it would trust the incremental
        # clean-up, which names files that are still in use; and without the last word it deletes files at once.
        update = self._transaction.expireSnapshots().expireOlderThan(0).cleanExpiredFiles(False)
        by_id = self._java.method(".ExpireSnapshots", "expireSnapshotId", ".ExpireSnapshots", "long").bindTo(update)
        number = self._java.static("java.lang.Long", "parseLong", "long", "java.lang.String")
        self._java.strings(map(str, ids)).stream().forEach(self._java.consumer(self._java.after(number, by_id)))
        return update

    def _schema(self, change: SchemaChange) -> Any:
        update = self._transaction.updateSchema()
        match change:
            case AddColumn(name, type_text, None):
                return update.addColumn(name, java_type(self._java, type_text))
            case AddColumn(name, type_text, str(default)):
                kind = java_type(self._java, type_text)
                return update.addColumn(name, kind, literal(self._java, kind, type_text, default))
            case RenameColumn(name, new_name):
                return update.renameColumn(name, new_name)
            case DropColumn(name):
                return update.deleteColumn(name)
            case WidenColumn(name, type_text):
                return update.updateColumn(name, java_type(self._java, type_text))
            case MakeOptional(name):
                return update.makeColumnOptional(name)

    def _signed(self, producer: str, kind: str) -> Any:
        update = getattr(self._transaction, producer)()
        update = update.set(OP_ID, self._op_id).set(KIND, self._kind or kind)
        return update.scanManifestsWith(self._java.here) if self._few else update

    def _has_few_manifests(self) -> bool:
        """Whether manifests are quicker looked through one by one.

        Iceberg asks its own pool every ten milliseconds whether it is done, at each of the five steps of a commit: for
        a small table that is most of the time which the commit takes.
        """
        table = self._transaction.table()
        snapshot = table.currentSnapshot()
        few = _FEW_HERE if is_local(str(table.location())) else _FEW_AFAR
        return snapshot is None or int(snapshot.allManifests(table.io()).size()) <= few

    def _feed(self, update: Any, owner: str, method: str, kind: str, files: Sequence[Described]) -> Any:
        if files:
            handle = self._java.method(owner, method, owner, kind).bindTo(update)
            self._java.feed(files, self._specs, self._java.consumer(handle))
        return update

    def _unbuildable(self, change: Change, failure: JavaFailure) -> ModakError:
        if isinstance(change, SchemaChange):
            return _meaning(change, failure)
        if isinstance(change, CreateTag | RemoveTag) and failure.simple_name in _INVALID:
            return _meaning(change, failure)
        return plainly(failure, f"preparing {type(change).__name__}")


def _meaning(change: Change, failure: JavaFailure) -> ModakError:
    """What a failed validation means for this kind of change."""
    if failure.simple_name not in _INVALID:
        return plainly(failure, f"preparing {type(change).__name__}")
    if isinstance(change, SchemaChange):
        return Refused("lake.schema", f"The lake table's columns cannot be changed so: {failure.message}")
    if isinstance(change, DeleteRange | Overwrite) and failure.message.startswith(_MISFITS):
        return Refused(
            "lake.partial_file",
            f"A file lies only partly in the range: {failure.message}",
            hint="Ranges are removed by whole files; align them to the lake's partitions or rewrite the file first.",
        )
    return Conflict(
        "lake.changed_underneath",
        f"The lake table changed since the operation was planned: {failure.message}",
        hint="It is planned again from the new state.",
    )
