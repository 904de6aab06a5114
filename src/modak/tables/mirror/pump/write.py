"""From folded events to what a commit needs: data files with the rows that are there now, positions of those that were.

Which rows a key has follows from its events: how many rows it had before (none when its first event says that it was
free, else one) and by how many its events change that. Only where that does not decide, because a row came under a key
before another left it, the lake is asked. Keys that were free are not looked for at all: an insert writes no delete.
Memory: one part of the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap64

from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.output import mapped, open_output, storage_errors
from modak.lake.iceberg.scan import scan_file, scan_schema
from modak.lake.model import DataFile, LakeColumn, LakeTable
from modak.tables.mirror.pump.events import ENDS, FRESH, LOOSE, NET, PUT, TIER, image_name, root_name, unknown_name
from modak.tables.mirror.pump.find import Hit, Wanted
from modak.tables.mirror.pump.fold import encode, key_columns, unknown_numbers

Mask = npt.NDArray[np.bool_]
Complete = Callable[[pa.Table], pa.Table]
Find = Callable[[Wanted], Sequence[Hit]]


@dataclass(frozen=True, slots=True)
class Target:
    """The lake table as the batch will find it: its columns, and which attribute each is."""

    columns: tuple[LakeColumn, ...]
    numbers: tuple[int | None, ...]
    lake: LakeTable
    tier_key: str
    folder: str
    target_bytes: int
    cut: tuple[int, ...] = ()

    def writer(self, task: str) -> FileWriter:
        """A writer of the table's data files."""
        return FileWriter(
            self.folder,
            self.columns,
            self.lake.layout,
            task=task,
            tier_key=self.tier_key,
            spec_id=self.lake.spec_id,
            target_bytes=self.target_bytes,
            cut=self.cut,
        )


@dataclass(slots=True)
class Applied:
    """What a batch has become."""

    files: tuple[DataFile, ...] = ()
    gone: dict[str, BitMap64] = field(default_factory=dict)
    """Positions that lose their row, by data file."""
    wanted: list[Wanted] = field(default_factory=list)
    """What was looked for, to be looked for again when the lake has changed meanwhile."""
    upserts: int = 0
    missing: int = 0
    """Rows that should have been in the lake and were not."""

    @property
    def removed(self) -> int:
        """How many rows of the lake lose their place."""
        return sum(len(positions) for positions in self.gone.values())

    def remove(self, hits: Sequence[Hit]) -> None:
        """Take rows away."""
        for hit in hits:
            positions = BitMap64(array("Q", hit.positions.astype(np.uint64).tobytes()))
            self.gone[hit.path] = self.gone.get(hit.path, BitMap64()) | positions


def apply_part(
    events: pa.Table, target: Target, find: Find | None, complete: Complete, applied: Applied
) -> Iterator[pa.RecordBatch]:
    """Decide about every key of a part; gives the rows to write. Without `find` the lake is empty.

    `complete` adds what no change brings.
    """
    flags = _Flags(events)
    ask = flags.loose | ~(flags.fresh & (flags.net == 1))
    wanted = _wanted(events, ask)
    hits = find(wanted) if find is not None and len(wanted) else []
    exists = np.zeros(len(events), bool)
    for hit in hits:
        exists[np.flatnonzero(ask)[hit.keys]] = True
    present = flags.put & np.where(
        flags.loose, flags.ends, np.where(flags.fresh & (flags.net == 0), exists, flags.net + ~flags.fresh > 0)
    )
    applied.remove(hits)
    if find is not None:
        applied.wanted.append(wanted)
        applied.missing += int(np.count_nonzero(~flags.fresh & ~flags.loose & ~exists))
    rows = events.filter(pa.array(present))
    applied.upserts += len(rows)
    if len(rows):
        yield _batch(complete(_known(rows, target, wanted, hits)), target)


class _Flags:
    def __init__(self, events: pa.Table) -> None:
        self.fresh, self.loose, self.put, self.ends = (_mask(events[name]) for name in (FRESH, LOOSE, PUT, ENDS))
        self.net = np.asarray(events[NET])


def _mask(column: pa.ChunkedArray) -> Mask:
    return np.asarray(column.cast(pa.uint8())).astype(bool)


def _wanted(events: pa.Table, ask: Mask) -> Wanted:
    chosen = events.filter(pa.array(ask))
    tiers = chosen[TIER].combine_chunks()
    placed = np.asarray(tiers.is_valid().cast(pa.uint8())).astype(bool) & ~_mask(chosen[LOOSE])
    columns = tuple(
        column if isinstance(column, pa.Array) else column.combine_chunks() for column in key_columns(chosen)
    )
    return Wanted(columns, np.asarray(tiers.fill_null(0)), placed)


def _known(rows: pa.Table, target: Target, wanted: Wanted, hits: Sequence[Hit]) -> pa.Table:
    """The rows with values that Postgres did not send taken from the lake."""
    for number in unknown_numbers(rows):
        at = next(at for at, each in enumerate(target.numbers) if each == number)
        marks = np.flatnonzero(_mask(rows[unknown_name(number)]))
        roots = [rows[root_name(key)].combine_chunks().take(pa.array(marks)) for key in range(len(wanted.columns))]
        values = _from_lake(target.columns[at], roots, wanted, hits)
        name = image_name(number)
        column = rows[name].combine_chunks()
        take = np.arange(len(column))
        take[marks] = len(column) + np.arange(len(marks))
        both = pa.concat_arrays([column, _as(values, column.type)])
        rows = rows.set_column(rows.column_names.index(name), name, both.take(pa.array(take)))
    return rows


def _from_lake(column: LakeColumn, roots: Sequence[pa.Array], wanted: Wanted, hits: Sequence[Hit]) -> pa.Array:
    size = len(wanted)
    codes, count = encode([pa.concat_arrays([key, root]) for key, root in zip(wanted.columns, roots, strict=True)])
    of_code = np.full(count, -1, np.int64)
    of_code[codes[:size]] = np.arange(size)
    asked = of_code[codes[size:]]
    values: list[pa.Array] = []
    place = np.full(size, -1, np.int64)
    needed = np.zeros(size + 1, bool)
    needed[asked] = True
    needed[-1] = False
    before = 0
    for hit in hits:
        mine = needed[hit.keys]
        if not mine.any():
            continue
        found = pa.Table.from_batches(list(scan_file(hit.path, [column])), scan_schema([column]))
        values.append(found.column(0).combine_chunks().take(pa.array(hit.positions[mine])))
        place[hit.keys[mine]] = before + np.arange(int(mine.sum()))
        before += int(mine.sum())
    if np.any(asked < 0) or np.any(place[asked] < 0):
        raise Refused(
            "mirror.unchanged_values",
            f"Postgres did not send unchanged values of column {column.name}, and the lake does not have their rows.",
            hint="The table is compared with the lake anew. REPLICA IDENTITY FULL avoids it; leave it as it is.",
        )
    return pa.concat_arrays(values).take(pa.array(place[asked]))


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type == kind else array.cast(kind)


def _batch(rows: pa.Table, target: Target) -> pa.RecordBatch:
    schema = scan_schema(target.columns)
    arrays = []
    for column, number, about in zip(target.columns, target.numbers, schema, strict=True):
        name = None if number is None else image_name(number)
        if name is None or name not in rows.column_names:
            arrays.append(pa.nulls(len(rows), about.type))
        else:
            arrays.append(_typed(rows[name].combine_chunks(), about.type))
        if column.required and arrays[-1].null_count:
            raise ModakError(
                "types.null",
                f"Column {column.name} holds NULL, but it is part of the key of the lake table.",
                hint="Set it NOT NULL again in Postgres.",
            )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_list(kind):
        # The same but for the field ids of the elements.
        return pa.Array.from_buffers(
            kind, len(array), array.buffers()[:2], array.null_count, array.offset, children=[array.values]
        )
    return array.cast(kind)


@dataclass(frozen=True, slots=True)
class Rows:
    """One task's rows, in an Arrow file of the operation's folder."""

    uri: str
    target: Target
    task: str


def keep_rows(uri: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
    """Write rows for a task to find; returns how many there were."""
    reach("pump.before_rows")
    output = open_output(uri)
    count = 0
    try:
        with storage_errors(uri):
            file = pa.ipc.new_file(output.stream, schema)
            for batch in batches:
                file.write_batch(batch)
                count += len(batch)
            file.close()
        output.commit()
    except BaseException:
        output.discard()
        raise
    reach("pump.rows_kept")
    return count


def write_rows(item: Rows) -> list[DataFile]:
    """Inside a task: turn rows into data files."""
    writer = item.target.writer(item.task)
    with writer, mapped(item.uri) as source:
        reader = pa.ipc.open_file(source)
        for at in range(reader.num_record_batches):
            batch = reader.get_batch(at)
            writer.write(pa.RecordBatch.from_arrays(batch.columns, schema=writer.schema))
        reach("pump.task_read")
        made = writer.close()
    reach("pump.task_written")
    return made
