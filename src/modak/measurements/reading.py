"""Reading a measurement: a DataFrame that has every row exactly once, also in the middle of a compaction.

The reader makes itself known, lists files, then manifests, and pins what it found. Windows outside the asked time are
never listed, files whose footer statistics lie outside of it are dropped, and one schema that holds all files without
loss is found from the footers. Spark tasks then read the pinned files, a handful each, with DuckDB.

A frame is lazy, so the files stay for a while after `read` has returned (`hold`). Whoever collects later than that may
meet a file that is gone, and gets an error that says so, never fewer rows.

Memory: the driver holds paths and footer summaries, a task one batch of rows.
"""

from __future__ import annotations

import atexit
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from modak.core.errors import ModakError, UsageError
from modak.measurements.candidates import Seen
from modak.measurements.discover import Source, seen_files
from modak.measurements.footers import Pinned, footers, still_there, utc
from modak.measurements.layout import check_name
from modak.measurements.leases import Lease
from modak.measurements.state import State
from modak.measurements.windows import Level, window_of
from modak.storage.objects import Meta, Objects

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

HOLD = timedelta(hours=1)
_TASK_BYTES = 64 << 20
_TASK_FILES = 500
_FOOTERS_PER_TASK = 200
_BATCH_ROWS = 1 << 16
_TASK_MEMORY = 512 << 20
_log = structlog.get_logger()


@dataclass(frozen=True)
class _Share:
    """What one task reads."""

    objects: Objects
    files: tuple[Pinned, ...]
    schema: bytes
    start: datetime | None
    end: datetime | None


def read(
    spark: SparkSession,
    store: Objects | State | str,
    database: str,
    measurement: str,
    start: datetime | None = None,
    end: datetime | None = None,
    *,
    hold: timedelta = HOLD,
    unreadable: Literal["fail", "skip"] = "fail",
) -> DataFrame:
    """The rows of a measurement with start ≤ time < end; naive bounds are UTC.

    Files that are corrupt, or do not fit to the others, are an error, or with `unreadable="skip"` a warning.
    """
    check_name("database", database)
    check_name("measurement", measurement)
    start, end = utc(start), utc(end)
    if start is not None and end is not None and end < start:
        raise UsageError("measurements.range", f"{end} is before {start}.", hint="Give the earlier bound first.")
    state = store if isinstance(store, State) else State(Objects.of(store) if isinstance(store, str) else store)
    lease = state.lease()
    try:
        frame = _frame(spark, state, Source(database, measurement), start, end, skipping=unreadable == "skip")
    except BaseException:
        lease.release()
        raise
    _hold(lease, hold)
    return frame


def visible_files(
    state: State, source: Source, start: datetime | None = None, end: datetime | None = None
) -> list[Seen]:
    """The files that count, by path alone; the caller holds a lease."""
    listed = (file for prefix in _prefixes(source, start, end) for file in seen_files(state.objects, source, prefix))
    within = [file for file in listed if _overlaps(file, start, end)]
    account = state.account(source)
    return [file for file in account.visible(within, source.folder) if _overlaps(file, start, end)]


def _frame(
    spark: SparkSession, state: State, source: Source, start: datetime | None, end: datetime | None, *, skipping: bool
) -> DataFrame:
    import pyarrow as pa

    from modak.measurements.types import Footer, unify
    from modak.spark.distribute import distribute

    files = [file.meta for file in visible_files(state, source, start, end)]
    parts = [files[at : at + _FOOTERS_PER_TASK] for at in range(0, len(files), _FOOTERS_PER_TASK)]
    work = [(state.objects, tuple(part)) for part in parts]
    # A few footers are read sooner than Spark has started a task.
    answers = [footers(item) for item in work] if len(work) <= 1 else distribute(spark, footers, work)
    pinned = [each for answer in answers for each in answer]
    broken = [(each.meta.path, each.problem) for each in pinned if each.problem]
    unified = unify(
        [
            Footer(each.meta.path, each.rows, pa.ipc.read_schema(pa.py_buffer(each.schema)), ())
            for each in pinned
            if not each.problem
        ]
    )
    odd = {path: f"{path} cannot be read: {problem}" for path, problem in broken}
    odd.update({path: f"{path} does not fit to the other files: {reason}" for path, reason in unified.aside})
    if odd and not skipping:
        raise ModakError(
            "measurements.unreadable" if broken else "measurements.conflict",
            f"{next(iter(odd.values()))} ({len(odd)} such files).",
            hint="modak-worker measurements verify lists them all; move them out of the store, or read with "
            'unreadable="skip".',
        )
    for told in odd.values():
        _log.warning("measurements.file_skipped", reason=told)
    pinned = [each for each in pinned if each.meta.path not in odd]
    wanted = spark_schema(unified.schema if pinned else _empty_schema())
    chosen = [each for each in pinned if _may_hold(each, start, end)]
    return rows_frame(spark, state.objects, wanted, chosen, start, end)


def rows_frame(
    spark: SparkSession,
    objects: Objects,
    wanted: pa.Schema,
    files: Iterable[Pinned],
    start: datetime | None = None,
    end: datetime | None = None,
) -> DataFrame:
    """The rows of pinned files under one schema, a handful of files per task."""
    from pyspark.sql.pandas.types import from_arrow_schema

    of_arrow: Any = from_arrow_schema
    shape = of_arrow(wanted, prefer_timestamp_ntz=True)
    schema = wanted.serialize().to_pybytes()
    items = tuple(_Share(objects, tuple(share), schema, start, end) for share in _shares(files))
    if not items:
        return spark.createDataFrame([], shape)

    def run(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from _rows(items[number])

    # The items travel inside the pickled function: no plan or user interface shows the keys of a bucket.
    return frame_of(spark.range(0, len(items), 1, len(items)), run, shape)


def frame_of(given: DataFrame, run: Callable[..., Any], shape: Any) -> DataFrame:
    """`DataFrame.mapInArrow`, which asks for pandas by mistake: neither side of it uses any."""
    from pyspark.sql import DataFrame
    from pyspark.sql.udf import UserDefinedFunction
    from pyspark.util import PythonEvalType

    made = UserDefinedFunction(run, shape, name="measurement", evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    call: Any = made(*(given[name] for name in given.columns))
    java: Any = given._jdf
    return DataFrame(java.mapInArrow(call._jc, False, None), given.sparkSession)


def _rows(share: _Share) -> Iterator[pa.RecordBatch]:
    """The rows of a share, file by file; runs in a task."""
    import pyarrow as pa

    from modak.measurements.engine import columns, opened

    wanted = pa.ipc.read_schema(pa.py_buffer(share.schema))
    bounds = [(share.start, ">="), (share.end, "<")]
    test = " AND ".join(f'"time" {sign} ?' for bound, sign in bounds if bound is not None) or "true"
    with tempfile.TemporaryDirectory(prefix="modak-read-") as name:
        folder = Path(name)
        with opened(folder, _TASK_MEMORY, 1) as engine:
            for pinned in share.files:
                file = _local(share.objects, pinned.meta, folder)
                have = pa.ipc.read_schema(pa.py_buffer(pinned.schema))
                statement = (
                    f"SELECT * FROM (SELECT {columns(have, wanted)} FROM read_parquet(?, hive_partitioning=false))"  # noqa: S608
                    f" WHERE {test}"
                )
                given = [str(file), *(bound for bound, _ in bounds if bound is not None)]
                for batch in engine.execute(statement, given).to_arrow_reader(_BATCH_ROWS):
                    yield batch.cast(wanted)


def _local(objects: Objects, meta: Meta, folder: Path) -> Path:
    """The file on this machine, if it is still the version that was pinned."""
    place = folder / "file.parquet"
    local = objects.local(meta.path)
    if local is None:
        still_there(meta, lambda: objects.fetch(meta.path, place))
        return place
    still_there(meta, lambda: objects.head(meta.path))
    place.unlink(missing_ok=True)
    place.symlink_to(local)
    return place


def _may_hold(pinned: Pinned, start: datetime | None, end: datetime | None) -> bool:
    if pinned.rows == 0:
        return False
    # Statistics can be rounded to the microsecond below; a second more costs nothing.
    slack = timedelta(seconds=1)
    before = start is not None and pinned.latest is not None and pinned.latest + slack < start
    after = end is not None and pinned.earliest is not None and pinned.earliest - slack >= end
    return not before and not after


def _overlaps(file: Seen, start: datetime | None, end: datetime | None) -> bool:
    window = file.place.window
    return (start is None or window.end > start) and (end is None or window.start < end)


def _prefixes(source: Source, start: datetime | None, end: datetime | None) -> list[str]:
    """The folders to list: those of the months asked for, or all."""
    if start is None or end is None:
        return [source.folder]
    folders: list[str] = []
    month = window_of(Level.MONTH, start)
    while month.start < end or not folders:
        folders.append(f"{source.folder}/{month.folder}")
        month = window_of(Level.MONTH, month.end)
    return folders


def _shares(pinned: Iterable[Pinned]) -> Iterator[list[Pinned]]:
    share: list[Pinned] = []
    size = 0
    for each in pinned:
        if share and (size + each.meta.size > _TASK_BYTES or len(share) >= _TASK_FILES):
            yield share
            share, size = [], 0
        share.append(each)
        size += each.meta.size
    if share:
        yield share


def spark_schema(schema: pa.Schema) -> pa.Schema:
    """The schema without what Spark has no word for: unsigned numbers widen, the largest become decimals."""
    import pyarrow as pa

    wider = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.decimal128(20, 0),
    }
    return pa.schema([pa.field(each.name, wider.get(each.type, each.type)) for each in schema])


def _empty_schema() -> pa.Schema:
    import pyarrow as pa

    from modak.measurements.types import TIME, TIME_TYPE

    return pa.schema([(TIME, TIME_TYPE)])


_holding: set[Lease] = set()


def _hold(lease: Lease, hold: timedelta) -> None:
    """Keep the lease for a while, and no longer than this process lives."""
    _holding.add(lease)
    timer = threading.Timer(hold.total_seconds(), _let_go, [lease])
    timer.daemon = True
    timer.start()


def _let_go(lease: Lease) -> None:
    _holding.discard(lease)
    lease.release()


@atexit.register
def release_all() -> None:
    """Give up the files of all frames that this process has made."""
    for lease in list(_holding):
        _let_go(lease)
