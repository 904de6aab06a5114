"""The kernel of every rewrite: read some data files, leave out what is deleted, write them anew as one.

Runs in the driver for small tables and in Spark tasks for others, one bin after another. New files carry the row ids
and the last change of every row, so a rewrite is invisible to whoever follows rows. That also answers the race with
deletes: a row that is deleted while its file is being rewritten is found in the new file by its row id and hidden
there by a vector in the very commit that swaps the files. Memory is bounded by one batch, one row group of output and
the positions deleted in one file; sorting spills to disk.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.lake.iceberg.equality import Hidden
from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.output import parquet_file, storage_errors
from modak.lake.iceberg.scan import POSITION, scan_file
from modak.lake.iceberg.vectors import read_vector, vector_uri, write_vector
from modak.lake.model import DataFile, LakeColumn, LakeFile, Vector
from modak.lake.rewrite import Bin, Rewriting, Rewritten

ROW_ID = LakeColumn("_row_id", "long", field_id=2147483540)
SEQUENCE = LakeColumn("_last_updated_sequence_number", "long", field_id=2147483539)
# Row ids are consecutive: packed as differences they cost next to nothing. Only readers of format 3 look at them.
_ENCODINGS = {ROW_ID.name: "DELTA_BINARY_PACKED"}


def rewrite_bins(task: Rewriting) -> tuple[Rewritten, ...]:
    """Inside a task: write every bin anew."""
    hidden = Hidden(task.deleted)
    return tuple(_rewrite(task, number, one, hidden) for number, one in enumerate(task.bins))


def _rewrite(task: Rewriting, number: int, one: Bin, hidden: Hidden) -> Rewritten:
    reach("rewrite.bin_started")
    lineage = all(first_row_id(found) is not None for found in one.files)
    columns = [*task.columns, *([ROW_ID, SEQUENCE] if lineage else [])]
    writer = FileWriter(
        task.folder,
        columns,
        task.layout,
        task=f"{task.task}-{number:05d}",
        tier_key=task.tier_key,
        spec_id=task.spec_id,
        target_bytes=task.target_bytes,
        low_cardinality=frozenset({*_dictionaries(one.files[0].file.path), SEQUENCE.name}),
        cut=task.cut,
        encodings=_ENCODINGS if lineage else None,
    )
    with writer:
        for batch in _ordered(task, writer.schema, _rows(task, one, lineage, hidden)):
            writer.write(batch)
        files = writer.close()
    reach("rewrite.bin_written")
    return Rewritten(one, tuple(files))


def _rows(task: Rewriting, one: Bin, lineage: bool, hidden: Hidden) -> Iterator[pa.RecordBatch]:
    for found in one.files:
        columns = [*task.columns, *([ROW_ID, SEQUENCE] if lineage else [])]
        keys = hidden.of(found) if found.foreign_deletes else ()
        scan = scan_file(found.file.path, columns, deleted=deleted_in(found.vectors), with_positions=True)
        for batch in _sound(found.file.path, scan):
            kept = batch
            for wanted in keys:
                kept = wanted.without(kept)
            if len(kept):
                yield _lineaged(kept, found, len(columns)) if lineage else kept.select(range(len(columns)))


def _sound(path: str, scan: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from scan
    except pa.ArrowException as error:
        first = (str(error).splitlines() or [""])[0]
        raise ModakError(
            "lake.file_damaged",
            f"{path} cannot be read: {first}",
            hint="modak-worker verify tells what is damaged; restore the file from a backup.",
        ) from error


def _lineaged(batch: pa.RecordBatch, found: LakeFile, width: int) -> pa.RecordBatch:
    """The rows with the ids and last changes that they have, their own or inherited from the file."""
    first = first_row_id(found)
    assert first is not None
    ids = pc.coalesce(batch.column(width - 2), pc.add(batch.column(POSITION), first))
    changed = pc.coalesce(batch.column(width - 1), pa.scalar(found.sequence_number or 0, pa.int64()))
    arrays = [*batch.columns[: width - 2], ids, changed]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([batch.schema.field(at) for at in range(width)]))


def _ordered(task: Rewriting, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if not task.sort and not task.zorder:
        return batches
    from modak.spark.sorting import sorted_batches

    return sorted_batches(batches, schema, task.sort, task.zorder)


def deleted_in(vectors: Iterable[Vector]) -> BitMap64:
    """The positions that some vectors hide."""
    found = BitMap64()
    for vector in vectors:
        found |= read_vector(vector)
    return found


def first_row_id(found: LakeFile) -> int | None:
    """The row id of a file's first row, where the table has row lineage."""
    entry: dict[str, Any] = json.loads(found.file.json)
    number = entry.get("first-row-id")
    return None if number is None else int(number)


def carried_over(then: LakeFile, now: LakeFile) -> Any:
    """The row ids (ascending) of what was deleted in a file since it was read."""
    positions = _array(deleted_in(now.vectors) - deleted_in(then.vectors))
    first = first_row_id(then)
    assert first is not None
    if not len(positions):
        return positions
    found: list[Any] = []
    start = 0
    for batch in scan_file(then.file.path, [ROW_ID], batch_rows=1 << 20):
        low, high = np.searchsorted(positions, [start, start + len(batch)])
        own = batch.column(0).take(pa.array(positions[low:high] - start))
        found.append(np.asarray(pc.coalesce(own, pa.array(positions[low:high] + first))))
        start += len(batch)
    return np.sort(np.concatenate(found))


def hide(files: Sequence[DataFile], row_ids: Any, folder: str, task: str) -> Iterator[Vector]:
    """Vectors for the rows of new files that carry one of the row ids (ascending)."""
    if not len(row_ids):
        return
    for file in files:
        places: list[Any] = []
        for batch in scan_file(file.path, [ROW_ID], with_positions=True, batch_rows=1 << 20):
            ids = np.asarray(batch.column(0))
            at = np.minimum(np.searchsorted(row_ids, ids), len(row_ids) - 1)
            places.append(np.asarray(batch.column(1))[row_ids[at] == ids])
        gone = np.concatenate(places) if places else np.empty(0, np.int64)
        if len(gone):
            bits = BitMap64(array("Q", gone.astype(np.uint64).tobytes()))
            yield write_vector(vector_uri(folder, task), bits, file)


def _array(bits: BitMap64) -> Any:
    return np.frombuffer(bits.to_array(), np.uint64).astype(np.int64) if bits else np.empty(0, np.int64)


def _dictionaries(path: str) -> set[str]:
    """Columns that are worth a dictionary, by what the first file of a bin has."""
    try:
        with storage_errors(path), parquet_file(path) as file:
            metadata = file.metadata
    except pa.ArrowException:
        # Reading its rows says what is wrong with it.
        return set()
    if not metadata.num_row_groups:
        return set()
    group = metadata.row_group(0)
    chunks = (group.column(at) for at in range(metadata.num_columns))
    return {chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page}
