"""The lake's rows by key: read only the key columns of the files that can hold them, join, write deletion vectors.

Runs after the keys are written and before the commit. `Locator.at` may be asked again when somebody else has committed
meanwhile: files that are as they were keep their result, only the others are read. A task holds the keys of its files'
ranges and one batch of the lake; the driver one entry per file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from modak.core.axis import TierKey
from modak.core.faults import reach
from modak.lake.changes import Range
from modak.lake.iceberg.output import mapped, open_output, storage_errors
from modak.lake.iceberg.scan import POSITION, scan_file
from modak.lake.iceberg.vectors import read_vector, vector_uri, write_vector
from modak.lake.locate import KeyFile, Located, LocatedFile, Lookup, overlaps, plan_lookups
from modak.lake.match import KeySet, is_cheap
from modak.lake.model import LakeColumn, LakeFile, LakeName

SCAN_ROWS = 1_048_576
"""Rows of key columns per batch: a larger one asks the keys less often."""

_LAST = 2**63 - 1

Run = Callable[[Sequence[Lookup]], Sequence[tuple[LocatedFile, ...]]]
"""Applies `look_up` to tasks: in this process, or in Spark."""


class Files(Protocol):
    """The part of a lake that locating needs."""

    def files(
        self, name: LakeName, snapshot_id: int, *, column: str | None = None, rows: Range | None = None
    ) -> Iterator[LakeFile]:
        """The data files of a snapshot."""
        ...


class Locator:
    """Finds one set of keys in a table, at the snapshot that is asked for."""

    def __init__(
        self,
        lake: Files,
        name: LakeName,
        keys: Sequence[KeyFile],
        columns: Sequence[LakeColumn],
        tier_key: str,
        folder: str,
        run: Run,
        *,
        least_tasks: int = 1,
    ) -> None:
        self._lake = lake
        self._name = name
        self._keys = tuple(one for one in keys if one.rows)
        self._columns = tuple(columns)
        self._tier_key = tier_key
        self._folder = folder
        self._run = run
        self._least_tasks = least_tasks
        self._known: dict[tuple[str, tuple[str, ...]], LocatedFile] = {}
        self._latest: Located | None = None
        self._files: tuple[int, list[LakeFile]] | None = None
        self._rounds = 0

    def at(self, snapshot_id: int | None) -> Located:
        """Every row of the snapshot with one of the keys."""
        if snapshot_id is None or not self._keys:
            return Located(snapshot_id)
        if self._latest is None or self._latest.snapshot_id != snapshot_id:
            self._latest = self._located(snapshot_id)
        return self._latest

    def rows_at(self, snapshot_id: int | None) -> int:
        """How many rows of the snapshot `at` would look through."""
        if snapshot_id is None or not self._keys:
            return 0
        return sum(found.file.rows for found in self._listed(snapshot_id) if _as_seen(found) not in self._known)

    def _listed(self, snapshot_id: int) -> list[LakeFile]:
        if self._files is None or self._files[0] != snapshot_id:
            low, high = min(one.lower for one in self._keys), max(one.upper for one in self._keys)
            rows = Range(self._tier_key, low, _past(high))
            listed = self._lake.files(self._name, snapshot_id, column=self._tier_key, rows=rows)
            here = [found for found in listed if any(overlaps(found, one) for one in self._keys)]
            self._files = (snapshot_id, here)
        return self._files[1]

    def _located(self, snapshot_id: int) -> Located:
        here = self._listed(snapshot_id)
        unknown = [found for found in here if _as_seen(found) not in self._known]
        tasks = plan_lookups(
            unknown,
            self._keys,
            self._columns,
            self._tier_key,
            self._folder,
            least_tasks=self._least_tasks,
            prefix=f"locate{self._rounds}",
        )
        self._rounds += 1
        for task, results in zip(tasks, self._run(tasks) if tasks else (), strict=True):
            for found, result in zip(task.files, results, strict=True):
                self._known[_as_seen(found)] = result
        return Located(snapshot_id, tuple(self._known[_as_seen(found)] for found in here))


def look_up(task: Lookup) -> tuple[LocatedFile, ...]:
    """Inside a task: find the keys in each file and write its new vector."""
    keys = _Keys(task)
    return tuple(_in_file(task, found, keys) for found in task.files)


class _Keys:
    """The keys that the files of a task can hold; text keys are narrowed to those of each file, because asking costs
    by their number."""

    def __init__(self, task: Lookup) -> None:
        self._columns = _load(task.keys, task.columns)
        at = next(number for number, column in enumerate(task.columns) if column.name == task.tier_key)
        self._tier_keys = _axis(self._columns[at])
        lowers, uppers = [found.lower for found in task.files], [found.upper for found in task.files]
        inside = self._within(
            None if None in lowers else min(low for low in lowers if low is not None),
            None if None in uppers else max(up for up in uppers if up is not None),
        )
        self._columns = [column.filter(pa.array(inside)) for column in self._columns]
        self._tier_keys = self._tier_keys[inside]
        self._all: KeySet | None = None
        if is_cheap(self._columns):
            self._all = KeySet(self._columns)

    def of(self, found: LakeFile) -> tuple[KeySet, TierKey, TierKey] | None:
        """The keys that a file can hold, with the range of their tier keys."""
        inside = self._within(found.lower, found.upper)
        tier_keys = self._tier_keys[inside]
        if not len(tier_keys):
            return None
        wanted = self._all or KeySet([column.filter(pa.array(inside)) for column in self._columns])
        return wanted, int(tier_keys.min()), int(tier_keys.max())

    def _within(self, lower: TierKey | None, upper: TierKey | None) -> Any:
        inside = np.ones(len(self._tier_keys), bool)
        if lower is not None:
            inside &= self._tier_keys >= lower
        if upper is not None:
            inside &= self._tier_keys <= upper
        return inside


class KeyWriter:
    """Writes one file of keys for tasks to find; batches have the key columns, and NULL is not a key."""

    def __init__(self, uri: str, schema: pa.Schema, tier_key: str) -> None:
        reach("locate.before_keys")
        self._tier_key = tier_key
        self._output = open_output(uri)
        self._file = pa.ipc.new_file(self._output.stream, schema)
        self._rows = 0
        self._lows: list[int] = []
        self._highs: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Take the keys of a batch."""
        if not len(batch):
            return
        with storage_errors(self._output.uri):
            self._file.write_batch(batch)
        keys = _axis(batch.column(self._tier_key))
        self._rows += len(batch)
        self._lows.append(int(keys.min()))
        self._highs.append(int(keys.max()))

    def close(self) -> KeyFile:
        """Finish the file and describe it."""
        with storage_errors(self._output.uri):
            self._file.close()
        self._output.commit()
        reach("locate.keys_written")
        return KeyFile(self._output.uri, self._rows, min(self._lows, default=0), max(self._highs, default=0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._output.discard()


def _in_file(task: Lookup, found: LakeFile, keys: _Keys) -> LocatedFile:
    chosen = keys.of(found)
    if chosen is None:
        return LocatedFile(found.file.path, 0)
    wanted, low, high = chosen
    positions: list[np.ndarray] = []
    scan = scan_file(
        found.file.path,
        task.columns,
        with_positions=True,
        batch_rows=SCAN_ROWS,
        rows=Range(task.tier_key, low, _past(high)),
    )
    for batch in scan:
        rows = wanted.find(batch.columns[: len(task.columns)])
        if len(rows):
            positions.append(np.asarray(batch.column(POSITION))[rows])
    if not positions:
        return LocatedFile(found.file.path, 0)
    deleted = BitMap64()
    for vector in found.vectors:
        deleted |= read_vector(vector)
    # Few rows are found among many: taking the deleted ones out here spares a copy of every column.
    new = BitMap64(array("Q", np.concatenate(positions).astype(np.uint64).tobytes())) - deleted
    if not new:
        return LocatedFile(found.file.path, 0)
    vector = write_vector(vector_uri(task.folder, task.task), deleted | new, found.file)
    return LocatedFile(found.file.path, len(new), vector, found.vectors)


def _past(key: TierKey) -> TierKey | None:
    """The end of a range that includes a key; the last key there is has none."""
    return key + 1 if key < _LAST else None


def _load(files: Sequence[KeyFile], columns: Sequence[LakeColumn]) -> list[pa.Array]:
    tables = []
    for one in files:
        with mapped(one.uri) as source:
            tables.append(pa.ipc.open_file(source).read_all())
    whole = pa.concat_tables(tables)
    return [_combined(whole.column(column.name)) for column in columns]


def _combined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _axis(column: pa.Array) -> np.ndarray:
    """Tier keys as axis values."""
    plain = column.cast(pa.int32()) if pa.types.is_date32(column.type) else column
    return np.asarray(plain.cast(pa.int64()))


def _as_seen(found: LakeFile) -> tuple[str, tuple[str, ...]]:
    # A file may get another vector without changing itself; then its positions have to be united anew.
    return found.file.path, tuple(vector.json for vector in found.vectors)
