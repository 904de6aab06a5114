"""One data file against what the table's metadata says about it, and its live rows.

Runs inside tasks. Size, row count, the bounds of the tier key and the deletion vector are checked on the way of reading
the rows, so that no file is opened for the checks alone. A file that cannot be read is a finding; storage that is not
reachable at all is an error, because it proves nothing about the file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from modak.core.errors import ModakError
from modak.lake.iceberg.output import parquet_file, size_of, storage_errors
from modak.lake.iceberg.scan import scan_file
from modak.lake.iceberg.vectors import read_vector
from modak.lake.model import LakeFile
from modak.tables.verify.fingerprint import axis_values
from modak.tables.verify.report import Finding
from modak.tables.verify.shape import Shape

_UNREADABLE = frozenset({"storage.missing", "lake.file_type", "lake.vector_damaged"})


def live_batches(file: LakeFile, shape: Shape, findings: list[Finding]) -> Iterator[pa.RecordBatch]:
    """The rows of a file that are not deleted; what is wrong with it goes to `findings`."""
    path = file.file.path
    try:
        _footer(file, findings)
        deleted = _deleted(file, findings)
        low, high = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        for batch in scan_file(path, shape.columns, deleted=deleted):
            if not len(batch):
                continue
            values = axis_values(batch.column(shape.tier))
            low, high = min(low, int(values.min())), max(high, int(values.max()))
            yield batch
        _bounds(file, low, high, findings)
    except pa.ArrowException as error:
        findings.append(Finding("file.unreadable", f"{path} cannot be read: {_first(error)}"))
    except ModakError as error:
        if error.code in _UNREADABLE or (error.code == "storage.failed" and _damaged(error)):
            findings.append(Finding("file.unreadable", f"{path} cannot be read: {error.message}"))
            return
        raise


def _footer(file: LakeFile, findings: list[Finding]) -> None:
    path = file.file.path
    with storage_errors(path):
        size = size_of(path)
        with parquet_file(path) as opened:
            rows = opened.metadata.num_rows
    if size != file.file.bytes:
        findings.append(Finding("file.size", f"{path} has {size} bytes, its manifest says {file.file.bytes}."))
    if rows != file.file.rows:
        findings.append(Finding("file.rows", f"{path} has {rows} rows, its manifest says {file.file.rows}."))


def _deleted(file: LakeFile, findings: list[Finding]) -> BitMap64 | None:
    path = file.file.path
    if file.foreign_deletes:
        what = f"{path} has {file.foreign_deletes} delete files of another tool, whose effect is not looked at."
        findings.append(Finding("file.foreign_deletes", what))
    if len(file.vectors) > 1:
        findings.append(Finding("file.vectors", f"{path} has {len(file.vectors)} deletion vectors; one is allowed."))
    gone = BitMap64()
    for vector in file.vectors:
        positions = read_vector(vector)
        if len(positions) != vector.rows:
            what = f"{vector.path} deletes {len(positions)} rows, its manifest says {vector.rows}."
            findings.append(Finding("vector.rows", what))
        if positions and positions.max() >= file.file.rows:
            what = f"{vector.path} deletes position {positions.max()} of {path}, which has {file.file.rows} rows."
            findings.append(Finding("vector.range", what))
            positions &= BitMap64(range(file.file.rows))
        gone |= positions
    return gone or None


def _bounds(file: LakeFile, low: int, high: int, findings: list[Finding]) -> None:
    """Readers skip a file by its bounds: too narrow ones lose rows, too wide ones only cost time."""
    if low > high:
        return
    narrow = (file.lower is not None and low < file.lower) or (file.upper is not None and high > file.upper)
    if narrow:
        told = f"[{file.lower}, {file.upper}]"
        what = f"{file.file.path} holds tier keys {low} to {high}, its manifest says {told}."
        findings.append(Finding("file.bounds", what))


def _damaged(error: ModakError) -> bool:
    # Arrow reports a file that is not Parquet as an operating system error without a number.
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno is None


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
