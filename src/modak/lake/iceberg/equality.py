"""Foreign equality deletes: read once, gathered into few Arrow files, and applied while data files are rewritten.

We write none ourselves. A delete applies to files of its partition (or to all, when its spec has no partition) whose
data is older than it, and NULL equals NULL. Twenty thousand small delete files become a handful of key files, each made
by one task; a rewriting task holds the keys of its partitions only.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.lake.decode import arrow_schema
from modak.lake.iceberg.output import mapped, open_output
from modak.lake.iceberg.read import partition_of
from modak.lake.iceberg.scan import scan_file
from modak.lake.match import KeySet
from modak.lake.model import EqualityDeletes, LakeColumn, LakeFile
from modak.lake.rewrite import DeletedKeys, Gathering

GATHERED_FILES = 2_000
"""Delete files per task: each costs about a millisecond to open."""
_SEQUENCE = "_deleted_at"


def plan_gathering(
    deletes: Iterable[EqualityDeletes], columns: Sequence[LakeColumn], folder: str
) -> list[tuple[tuple[int, tuple[object, ...], tuple[int, ...]], Gathering]]:
    """Tasks that gather delete files by partition and columns."""
    groups: dict[tuple[int, tuple[object, ...], tuple[int, ...]], list[EqualityDeletes]] = defaultdict(list)
    for each in deletes:
        groups[each.spec_id, each.partition, tuple(sorted(each.field_ids))].append(each)
    by_id = {column.field_id: column for column in columns}
    tasks: list[tuple[tuple[int, tuple[object, ...], tuple[int, ...]], Gathering]] = []
    for key, files in groups.items():
        missing = [number for number in key[2] if number not in by_id]
        if missing:
            raise ModakError(
                "lake.equality_column",
                f"Foreign equality deletes name column {missing[0]}, which the table no longer has.",
                hint="Let the tool that wrote them compact the table.",
            )
        wanted = tuple(by_id[number] for number in key[2])
        for start in range(0, len(files), GATHERED_FILES):
            uri = f"{folder}/deleted-{len(tasks):05d}.arrow"
            tasks.append((key, Gathering(tuple(files[start : start + GATHERED_FILES]), wanted, uri)))
    return tasks


def gather(task: Gathering) -> int:
    """Inside a task: write the values of some delete files into one Arrow file; how many."""
    reach("rewrite.before_gather")
    schema = arrow_schema(task.columns).append(pa.field(_SEQUENCE, pa.int64()))
    output = open_output(task.uri)
    rows = 0
    try:
        with pa.ipc.new_file(output.stream, schema) as file:
            for batch in _merged(task, schema):
                file.write_batch(batch)
                rows += len(batch)
        output.commit()
    except BaseException:
        output.discard()
        raise
    reach("rewrite.after_gather")
    return rows


def _merged(task: Gathering, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.RecordBatch] = []
    size = 0
    for found in task.files:
        for batch in scan_file(found.path, task.columns):
            numbers = pa.repeat(pa.scalar(found.sequence_number, pa.int64()), len(batch))
            waiting.append(pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=schema))
            size += len(batch)
        if size >= 1 << 18:
            yield from pa.Table.from_batches(waiting, schema).combine_chunks().to_batches()
            waiting, size = [], 0
    if waiting:
        yield from pa.Table.from_batches(waiting, schema).combine_chunks().to_batches()


def applicable(deleted: Iterable[DeletedKeys], files: Iterable[LakeFile]) -> tuple[DeletedKeys, ...]:
    """Those of the gathered keys that rows of these files can be hidden by."""
    places = {_place(found) for found in files}
    return tuple(each for each in deleted if each.everywhere or (each.spec_id, each.partition) in places)


def _place(found: LakeFile) -> tuple[int, tuple[object, ...]]:
    """The spec of a file and its partition."""
    entry: dict[str, Any] = json.loads(found.file.json)
    return entry["spec-id"], partition_of(entry)


class Hidden:
    """All keys that a task's files can be hidden by."""

    def __init__(self, deleted: Sequence[DeletedKeys]) -> None:
        self._sets = [(each, _load(each)) for each in deleted if each.rows]
        self._made: dict[tuple[int, int], Keys] = {}

    def of(self, found: LakeFile) -> tuple[Keys, ...]:
        """The keys that are gone from a file, one set per set of columns."""
        place = _place(found)
        chosen = []
        for number, (each, table) in enumerate(self._sets):
            if not (each.everywhere or (each.spec_id, each.partition) == place):
                continue
            later = np.asarray(table.column(_SEQUENCE)) > (found.sequence_number or 0)
            count = int(np.count_nonzero(later))
            if not count:
                continue
            # Ordered by age, so the number of later ones says which they are.
            if (number, count) not in self._made:
                self._made = {key: made for key, made in self._made.items() if key[0] != number}
                self._made[number, count] = Keys(each.columns, table.filter(pa.array(later)))
            chosen.append(self._made[number, count])
        return tuple(chosen)


class Keys:
    """Deleted values of some columns, NULL among them, to be found in batches."""

    def __init__(self, columns: Sequence[LakeColumn], table: pa.Table) -> None:
        self._names = [column.name for column in columns]
        keys = [table.column(name).combine_chunks() for name in self._names]
        self._fills = [_some(key) for key in keys]
        self._set = KeySet(self._plain(keys))

    def without(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch that are not deleted."""
        gone = self._set.find(self._plain([batch.column(name) for name in self._names]))
        if not len(gone):
            return batch
        kept = np.ones(len(batch), bool)
        kept[gone] = False
        return batch.filter(pa.array(kept))

    def _plain(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Columns without NULL: whether it is one, and a value that stands in for it."""
        plain: list[pa.Array] = []
        for column, fill in zip(columns, self._fills, strict=True):
            values = column.storage if isinstance(column, pa.ExtensionArray) else column
            plain.append(pc.cast(values.is_null(), pa.int8()))
            if fill is not None:
                plain.append(pc.fill_null(values, fill) if values.null_count else values)
        return plain


def _some(column: pa.Array) -> Any:
    values = column.storage if isinstance(column, pa.ExtensionArray) else column
    there = values.drop_null()
    return there[0] if len(there) else None


def _load(deleted: DeletedKeys) -> pa.Table:
    tables = []
    for uri in deleted.uris:
        with mapped(uri) as source:
            tables.append(pa.ipc.open_file(source).read_all())
    return pa.concat_tables(tables).sort_by(_SEQUENCE)
