"""More files than should be open at a time: brought together, some thousands after the other, in a few larger ones.

The engine keeps a reader for every file of a query until the query ends, so its memory would grow with their number.
What is gathered is not sorted yet and keeps every row; the footers of the inputs go on telling how many there must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from modak.measurements.codes import rows_of
from modak.measurements.types import Group, Unified

AT_ONCE = 2_000
"""Files that one query reads; a reader takes about 16 KB for three columns, and 35 KB for a hundred."""


def gathered(
    engine: duckdb.DuckDBPyConnection, unified: Unified, inputs: Mapping[str, Path], folder: Path, batch_rows: int
) -> tuple[Unified, Mapping[str, Path]]:
    """The same rows in fewer files below a folder; as they are where one query can read them all."""
    if sum(len(group.paths) for group in unified.groups) <= AT_ONCE:
        return unified, inputs
    folder.mkdir(exist_ok=True)
    groups, files = [], {}
    for number, some in enumerate(_slices(unified.groups)):
        file = folder / f"{number:06d}.parquet"
        # A column that no file here has is left out: alone, a nested one would get a wrong type.
        had = {field.name for group in some for field in group.schema if not pa.types.is_null(field.type)}
        schema = pa.schema([field for field in unified.schema if field.name in had])
        given = [[str(inputs[path]) for path in group.paths] for group in some]
        rows = engine.execute(rows_of(some, schema), given).to_arrow_reader(batch_rows)
        with pq.ParquetWriter(file, schema, compression="zstd", compression_level=1, write_statistics=False) as writer:
            for batch in _read(rows):
                writer.write_batch(batch.cast(schema))
        files[file.name] = file
        groups.append(Group(schema, (file.name,), pq.read_metadata(file).num_rows))
    return replace(unified, groups=tuple(groups)), files


def _read(rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """The rows; what goes wrong in the middle of them comes from the engine, though Arrow tells it."""
    try:
        yield from rows
    except (pa.ArrowException, OSError) as error:
        kind = duckdb.OutOfMemoryException if "Out of Memory" in str(error) else duckdb.Error
        raise kind(str(error)) from error


def _slices(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """The files of all groups, so many at a time; files of one schema stay together."""
    listed = [(number, path) for number, group in enumerate(groups) for path in group.paths]
    for start in range(0, len(listed), AT_ONCE):
        yield [
            Group(groups[number].schema, tuple(path for _, path in pairs), 0)
            for number, pairs in groupby(listed[start : start + AT_ONCE], key=itemgetter(0))
        ]
