"""What is done with one source, in a Spark task or in the driver: scan its keys, write its rows anew, or adopt it.

Each takes one source and writes files of its own below the operation's folder. Memory is bounded by one batch, the
writer's row groups, and for a rewrite by the numbers of the rows that are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.lake.locate import KeyFile
from modak.lake.model import DataFile, Layout
from modak.storage import remote
from modak.tables.ingest.inputs import STDIN, Source
from modak.tables.ingest.plan import SHOWN, Facts
from modak.tables.ingest.rows import Fault, Intake, misplaced, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

_INEXACT = frozenset({"float", "double", "string", "binary", "uuid"})
"""Types of whose bounds a foreign footer may think otherwise: NaN, truncated texts, unsigned bytes."""


@dataclass(frozen=True, slots=True)
class Job:
    """One source's part of an ingest."""

    source: Source
    intake: Intake
    folder: str
    task: str
    layout: Layout
    spec_id: int
    target_bytes: int
    cut: tuple[int, ...]
    facts: Facts | None = None
    left_out: tuple[int, ...] = ()
    """Rows, from 0, whose key comes again later in the input."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """The keys of a source, and what is wrong with its rows."""

    keys: KeyFile
    rows: int
    faults: tuple[Fault, ...] = ()


def scan_keys(job: Job) -> Scanned:
    """Read the key columns of a source and write them down for `locate`."""
    import pyarrow as pa

    from modak.lake.decode import arrow_schema
    from modak.lake.iceberg.locate import KeyWriter

    shape = job.intake.shape
    schema = arrow_schema(shape.keys)
    faults: list[Fault] = []
    rows = 0
    reach("ingest.before_keys")
    with KeyWriter(f"{job.folder}/{job.task}-keys.arrow", schema, shape.tier_key) as keys:
        with _one_version(job.source):
            for found in rows_of(job.source, job.intake, shape.keys):
                wrong = [*found.faults, *misplaced(found, shape.keys, shape.tier_key, job.intake.room)]
                faults += wrong
                rows += len(found.batch)
                if len(faults) >= SHOWN:
                    break
                if not wrong:
                    keys.write(pa.RecordBatch.from_arrays(found.batch.columns, schema=schema))
        made = Scanned(keys.close(), rows, tuple(faults[:SHOWN]))
    reach("ingest.keys_scanned")
    return made


def look_through(source: Source, intake: Intake) -> tuple[Fault, ...]:
    """The first rows of a source that cannot be taken; writes nothing."""
    shape = intake.shape
    faults: list[Fault] = []
    for found in rows_of(source, intake, shape.columns):
        faults += [*found.faults, *misplaced(found, shape.columns, shape.tier_key, intake.room)]
        if len(faults) >= SHOWN:
            break
    return tuple(faults[:SHOWN])


def write_rows(job: Job) -> tuple[tuple[DataFile, ...], tuple[Fault, ...]]:
    """Write the rows of a source as files of the lake, without those that are left out."""
    import numpy as np
    import pyarrow as pa

    from modak.lake.iceberg.files import FileWriter

    shape = job.intake.shape
    gone = np.asarray(sorted(job.left_out), np.int64)
    faults: list[Fault] = []
    at = 0
    reach("ingest.before_rows")
    writer = FileWriter(
        job.folder,
        shape.columns,
        job.layout,
        task=job.task,
        tier_key=shape.tier_key,
        spec_id=job.spec_id,
        target_bytes=job.target_bytes,
        cut=job.cut,
    )
    with writer:
        with _one_version(job.source):
            for found in rows_of(job.source, job.intake, shape.columns):
                faults += [*found.faults, *misplaced(found, shape.columns, shape.tier_key, job.intake.room)]
                size = len(found.batch)
                if faults:
                    if len(faults) >= SHOWN:
                        break
                else:
                    kept = np.ones(size, bool)
                    low, high = np.searchsorted(gone, [at, at + size])
                    kept[gone[low:high] - at] = False
                    batch = found.batch if low == high else found.batch.filter(pa.array(kept))
                    writer.write(pa.RecordBatch.from_arrays(batch.columns, schema=writer.schema))
                at += size
        if faults:
            writer.abort()
            return (), tuple(faults[:SHOWN])
        files = tuple(writer.close())
    reach("ingest.rows_written")
    return files, ()


@contextmanager
def _one_version(source: Source) -> Iterator[None]:
    """Keys, rows and the numbers of rows that are left out are read one after the other: all of what was looked at."""
    import pyarrow as pa

    try:
        yield
    # Of a file that somebody is just writing, Arrow says any of these.
    except (pa.ArrowException, ModakError, OSError):
        _require_unchanged(source)
        raise
    _require_unchanged(source)


def _require_unchanged(source: Source) -> None:
    # A copy of standard input is changed by nobody.
    if source.shown != STDIN and remote.identity(source.uri) != (source.size, source.version):
        raise Conflict(
            "storage.changed",
            f"{source.shown} was written to while it was read.",
            hint="Nothing was changed in the lake; try again when the file is complete.",
            retryable=False,
        )


def adopt_file(job: Job) -> DataFile:
    """Copy a file into the table and describe it by its footer."""
    from modak.lake.iceberg.bounds import data_file
    from modak.lake.iceberg.buckets import one_bucket
    from modak.lake.iceberg.output import parquet_file, storage_errors

    facts, shape = job.facts, job.intake.shape
    assert facts is not None
    assert facts.lower is not None
    assert facts.upper is not None
    known = {column.name: column for column in shape.columns}
    bucket = one_bucket(facts.lower, facts.upper, known[shape.tier_key].type, job.layout, job.cut)
    assert bucket is not None
    target = f"{job.folder}/{bucket.folder(job.layout)}/{job.task}-adopted.parquet"
    reach("ingest.before_adopt")
    # A copy of standard input is known by its content and changed by nobody.
    piped = job.source.shown == STDIN
    seen = remote.identity(job.source.uri)[1] if piped else job.source.version
    remote.copy(job.source.uri, target, seen)
    with storage_errors(target), parquet_file(target) as file:
        made = data_file(
            target,
            job.source.size,
            file.metadata,
            [known[name] for name in file.schema_arrow.names],
            spec_id=job.spec_id,
            partition=bucket.partition(job.layout),
            nan_counts={},
        )
    reach("ingest.adopted")
    return _sober(made, job)


def _sober(made: DataFile, job: Job) -> DataFile:
    """Without bounds that rest on the writer's idea of order: readers would skip rows by them."""
    described: dict[str, Any] = json.loads(made.json)
    doubtful = {column.field_id for column in job.intake.shape.columns if column.type in _INEXACT}
    for side in ("lower-bounds", "upper-bounds"):
        pairs = zip(described[side]["keys"], described[side]["values"], strict=True)
        kept = [(key, value) for key, value in pairs if key not in doubtful]
        described[side] = {"keys": [key for key, _ in kept], "values": [value for _, value in kept]}
    return DataFile(json.dumps(described, ensure_ascii=False), made.rows, made.bytes, made.path)


def key_batches(files: list[KeyFile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The keys of all files with the numbers of file and row, for finding those that repeat."""
    import numpy as np
    import pyarrow as pa

    from modak.lake.iceberg.output import mapped

    for number, one in enumerate(files):
        at = 0
        if not one.rows:
            continue
        with mapped(one.uri) as source:
            reader = pa.ipc.open_file(source)
            for index in range(reader.num_record_batches):
                batch = reader.get_batch(index)
                places = pa.array(np.arange(at, at + len(batch), dtype=np.int64))
                file = pa.array(np.full(len(batch), number, np.int64))
                columns = [_storage(column) for column in batch.columns]
                yield pa.RecordBatch.from_arrays([*columns, file, places], schema=schema)
                at += len(batch)


def key_schema(job_schema: pa.Schema) -> pa.Schema:
    """The schema of `key_batches`."""
    import pyarrow as pa

    from modak.spark.duplicates import FILE, ROW

    plain = [pa.field(one.name, _plain_type(one.type)) for one in job_schema]
    return pa.schema([*plain, pa.field(FILE, pa.int64()), pa.field(ROW, pa.int64())])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage(column: pa.Array) -> pa.Array:
    import pyarrow as pa

    return column.storage if isinstance(column, pa.ExtensionArray) else column
