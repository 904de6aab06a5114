"""Sorted rows into files: repeated rows are dropped, files roll at the target size, what was written is read again.

Every row carries a hash behind its sort keys, so equal rows come out next to each other, and only neighbours with equal
hashes are compared, column by column. A missing value equals a missing value, NaN equals NaN, -0.0 equals 0.0.

Memory: two row groups, one that is filled and one that is written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from modak.core.faults import reach
from modak.measurements.engine import quoted
from modak.measurements.types import TAGS_KEY, TIME

ROW_HASH = "modak_row_hash"
"""The column of the hash, as long as rows are sorted."""
MOST_ROWS = 1 << 19
_LEAST_ROWS = 1 << 12
_GROUPS_PER_FILE = 8
_SAMPLE = 100_000
_REPEATED = 8
"""A value that comes so often on average is worth an entry in a dictionary."""
_VALUES = 16
"""How many times the values of the first row group a later one may have."""
_FEW_VALUES = 1024


@dataclass(frozen=True)
class MergedFile:
    """One output, still local."""

    file: Path
    size: int
    rows: int
    sha256: str


def neighbours(schema: pa.Schema) -> str:
    """The end of an order in which equal rows are neighbours.

    Nested values come after the hash, which is the same for a missing one and an empty one.
    """
    return ", ".join([ROW_HASH, *(quoted(each.name) for each in schema if pa.types.is_nested(each.type))])


def distinct(
    engine: duckdb.DuckDBPyConnection, rows: Iterator[pa.RecordBatch], writer: RollingWriter
) -> Iterator[pa.RecordBatch]:
    """Sorted rows without those that repeat the one before; how many there were is told to the writer."""
    last: pa.RecordBatch | None = None
    beside = engine.cursor()
    for batch in rows:
        if batch.num_rows == 0:
            continue
        again = _repeats(beside, batch, last)
        last = batch.slice(batch.num_rows - 1)
        kept = batch.drop_columns([ROW_HASH])
        if again is not None:
            kept = kept.filter(pc.invert(again))
            writer.duplicates += batch.num_rows - kept.num_rows
        yield kept


def _repeats(engine: duckdb.DuckDBPyConnection, rows: pa.RecordBatch, last: pa.RecordBatch | None) -> pa.Array | None:
    """Which rows say the same as the row before them, the first one's being `last`; `None` if none does."""
    import numpy as np

    hashes = rows.column(ROW_HASH).to_numpy(zero_copy_only=False)
    before_first = last.column(ROW_HASH).to_numpy(zero_copy_only=False) if last is not None else hashes[:0]
    suspects = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
    across = last is not None and before_first[0] == hashes[0]
    if not len(suspects) and not across:
        return None
    befores, afters = [rows.take(pa.array(suspects - 1))], [rows.take(pa.array(suspects))]
    if across:
        assert last is not None
        befores, afters, suspects = [last, *befores], [rows.slice(0, 1), *afters], np.concatenate([[0], suspects])
    names = [name for name in rows.schema.names if name != ROW_HASH]
    same = " AND ".join(f"b.{quoted(name)} IS NOT DISTINCT FROM a.{quoted(name)}" for name in names)
    engine.register("modak_before", pa.Table.from_batches(befores))
    engine.register("modak_after", pa.Table.from_batches(afters))
    found = engine.execute(
        f"SELECT {same} AS same FROM modak_before AS b POSITIONAL JOIN modak_after AS a"  # noqa: S608 - quoted names
    ).to_arrow_table()
    repeats = np.zeros(rows.num_rows, dtype=bool)
    repeats[suspects] = found["same"].to_numpy()
    return pa.array(repeats)


class RollingWriter:
    """Writes sorted batches into files that roll at the target size."""

    def __init__(
        self,
        work: Path,
        target_bytes: int,
        schema: pa.Schema,
        *,
        keys: Sequence[str],
        tags: Sequence[str],
        group_rows: int,
    ) -> None:
        self.files: list[Path] = []
        self.duplicates = 0
        self._work = work
        self._target = target_bytes
        self._schema = schema.with_metadata({TAGS_KEY: ",".join(tags).encode()} if tags else None)
        self._keys = tuple(keys)
        self._tags = tuple(tags)
        self._options: dict[str, Any] = {}
        self._group_rows = group_rows
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="measurements-writer")
        self._writing: Future[None] | None = None
        self._open: pq.ParquetWriter | None = None
        self._sink: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Take a batch; full row groups go out."""
        self._held.append(batch.cast(self._schema))
        self._held_rows += batch.num_rows
        if self._held_rows >= self._group_rows:
            self._flush()

    def close(self) -> None:
        """Write what is held, and end the last file."""
        try:
            if self._held_rows:
                self._flush()
            self._settle()
            self._end()
        finally:
            self._pool.shutdown()

    def _flush(self) -> None:
        """Give a row group to the thread that writes; the sort goes on meanwhile."""
        self._settle()
        group = pa.Table.from_batches(self._held, self._schema)
        self._held, self._held_rows = [], 0
        self._writing = self._pool.submit(self._put, group)

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _put(self, group: pa.Table) -> None:
        if not self._options:
            self._options = writer_options(group, self._keys, self._tags)
        if self._open is None:
            self._begin()
        assert self._open is not None
        self._open.write_table(group, row_group_size=group.num_rows)
        if self._sink.tell() >= self._target:
            self._end()

    def _begin(self) -> None:
        file = self._work / f"out-{len(self.files):04d}.parquet"
        self._sink = pa.OSFile(str(file), "wb")
        self._open = pq.ParquetWriter(self._sink, self._schema, **self._options)
        self.files.append(file)

    def _end(self) -> None:
        if self._open is not None:
            self._open.close()
            self._sink.close()
            self._open = None
            reach("merge.file_written")


def writer_options(sample: pa.Table, keys: Sequence[str], tags: Sequence[str]) -> dict[str, Any]:
    """How outputs are written: zstd, statistics for everything, dictionaries for columns that repeat their values in a
    sample, bloom filters for tags.
    """
    schema = sample.schema
    texts = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_binary(field.type)]
    repeating = [field.name for field in schema if field.name in texts or _repeats_itself(sample[field.name])]
    bloom = {tag: {"ndv": _values_at_most(sample[tag])} for tag in tags if tag in texts}
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": repeating or False,
        "write_statistics": True,
        "write_page_index": True,
        "sorting_columns": [pq.SortingColumn(schema.get_field_index(name), nulls_first=True) for name in (*keys, TIME)],
        "bloom_filter_options": bloom or None,
    }


def _values_at_most(column: pa.ChunkedArray) -> int:
    """How many values a bloom filter of a row group makes room for.

    It shrinks to what it needs by itself; one for a million values, as it would be, takes longer than the rest of the
    group.
    """
    return int(min(pc.count_distinct(column).as_py() * _VALUES + _FEW_VALUES, max(len(column), _FEW_VALUES)))


def _repeats_itself(column: pa.ChunkedArray) -> bool:
    """Whether a column of numbers has few values, so that a dictionary makes it smaller and faster to write."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return False
    return bool(pc.count_distinct(column.slice(0, _SAMPLE)).as_py() * _REPEATED <= min(len(column), _SAMPLE))


def finished(file: Path) -> MergedFile:
    """The output, read again from what lies on disk now."""
    digest = hashlib.sha256()
    with file.open("rb") as written:
        while piece := written.read(1 << 20):
            digest.update(piece)
        os.fsync(written.fileno())
    return MergedFile(file, file.stat().st_size, pq.read_metadata(file).num_rows, digest.hexdigest())


def rows_per_group(input_bytes: int, rows: int, target_bytes: int) -> int:
    """Rows of a row group: a fraction of a file, so that files end near the target."""
    per_row = max(input_bytes / max(rows, 1), 1)
    return int(min(max(target_bytes / per_row / _GROUPS_PER_FILE, _LEAST_ROWS), MOST_ROWS))
