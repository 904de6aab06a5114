"""Events that wait for their commit: in memory up to a limit, then folded, and then in a file, sorted into buckets.

A transaction can be larger than memory. When more rows or bytes wait than may, they are folded; if that does not help,
they go to a file, bucket after bucket, each with its keys. Later a bucket of all files is folded by itself, a large one
a share of its keys at a time, so that memory is bounded by the limits, whatever the transaction and however wide its
rows. The files lie in a private folder and go with the next batch; what a crash left there is removed by the next one
who opens it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.tables.mirror.pump.events import key_name, root_name
from modak.tables.mirror.pump.fold import buckets, fold, joined, unknown_numbers

BUCKETS = 32
MOST_BYTES = 256 << 20
"""So much may wait in memory, however few rows it is."""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    edges: tuple[int, ...]
    """The number of the first batch of each bucket, and in the end how many batches there are."""
    sizes: tuple[int, ...]
    """Bytes of each bucket."""


@dataclass(slots=True)
class Buffer:
    """The events of one batch."""

    folder: Path
    changes: int = 0
    """Row changes taken in since it was empty."""
    truncated: bool = False
    """Everything that was there before is gone, in the lake too."""
    shown: dict[int, pa.Scalar] = field(default_factory=dict)
    """What rows from before a column show in it, by attribute number."""
    _tables: list[pa.Table] = field(default_factory=list)
    _waiting: int = 0
    _bytes: int = 0
    _files: list[_File] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.folder.exists():
            self._remove()

    @property
    def spilled(self) -> bool:
        """Whether a part of the batch is on disk."""
        return bool(self._files)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not self.changes and not self.truncated

    @property
    def is_large(self) -> bool:
        """Whether so much is in memory that with another batch like this one it is all that may be."""
        return self._bytes >= MOST_BYTES // 2

    def add(self, events: pa.Table, changes: int, most: int) -> None:
        """Take the events of so many changes; at most so many rows, and `MOST_BYTES`, stay in memory."""
        self.changes += changes
        self._tables.append(events)
        self._waiting += len(events)
        self._bytes += events.nbytes
        if self._waiting > most or self._bytes > MOST_BYTES:
            folded = fold(joined(self._tables, self.shown))
            self._tables, self._waiting, self._bytes = [folded], len(folded), folded.nbytes
            # Half, so that a batch near the limit is not folded again for every piece.
            if self._waiting > most // 2 or self.is_large:
                self._spill(folded)

    def truncate(self) -> None:
        """The table was emptied: nothing from before counts."""
        changes = self.changes
        self.clear()
        self.changes, self.truncated = changes, True

    def clear(self) -> None:
        """Forget everything."""
        self._tables, self._waiting, self._bytes, self.changes, self.truncated = [], 0, 0, 0, False
        self.shown = {}
        if self._files:
            self._remove()
        self._files = []

    def parts(self) -> Iterator[pa.Table]:
        """The folded events, each key in one part; one part when everything fits into memory."""
        if not self._files:
            if self._tables:
                yield fold(joined(self._tables, self.shown))
            return
        if self._tables:
            self._spill(fold(joined(self._tables, self.shown)))
        for bucket in range(BUCKETS):
            shares = 1 + sum(file.sizes[bucket] for file in self._files) // MOST_BYTES
            for share in range(shares):
                with _disk():
                    read = (_shared(_read(file, bucket), share, shares) for file in self._files)
                    tables = [table for table in read if len(table)]
                if tables:
                    yield fold(joined(tables, self.shown))

    def _remove(self) -> None:
        reach("pump.clearing")
        shutil.rmtree(self.folder, ignore_errors=True)
        reach("pump.cleared")

    def _spill(self, folded: pa.Table) -> None:
        _refuse_distant_roots(folded)
        place = buckets(folded, BUCKETS)
        order = np.argsort(place, kind="stable")
        bounds = np.searchsorted(place[order], np.arange(BUCKETS + 1)).tolist()
        edges, sizes = [0], []
        path = self.folder / f"{len(self._files):06d}.arrow"
        reach("pump.spilling")
        with _disk():
            if not self._files:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir(mode=0o700, parents=True)
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, folded.schema) as file:
                for low, high in pairwise(bounds):
                    some = folded.take(pa.array(order[low:high]))
                    batches = some.to_batches()
                    for batch in batches:
                        file.write_batch(batch)
                    edges.append(edges[-1] + len(batches))
                    sizes.append(some.nbytes)
        reach("pump.spilled")
        self._files.append(_File(path, tuple(edges), tuple(sizes)))
        self._tables, self._waiting, self._bytes = [], 0, 0


def _read(file: _File, bucket: int) -> pa.Table:
    with pa.OSFile(str(file.path), "rb") as source:
        reader = pa.ipc.open_file(source)
        batches = [reader.get_batch(at) for at in range(file.edges[bucket], file.edges[bucket + 1])]
        return pa.Table.from_batches(batches, reader.schema)


def _shared(events: pa.Table, share: int, shares: int) -> pa.Table:
    """Of the events of a bucket those whose keys belong to a share of it."""
    if shares == 1:
        return events
    return events.filter(pa.array(buckets(events, BUCKETS * shares) // BUCKETS == share))


def _refuse_distant_roots(folded: pa.Table) -> None:
    """A value that only stands under the old key of a row cannot be found from another bucket."""
    numbers = unknown_numbers(folded)
    if not numbers:
        return
    for at in range(sum(name[0] == "r" and name[1:].isdigit() for name in folded.column_names)):
        marks = [folded[f"u{number}"] for number in numbers]
        unknown = marks[0]
        for more in marks[1:]:
            unknown = pc.or_(unknown, more)
        moved = pc.and_(unknown, pc.not_equal(_plain(folded[key_name(at)]), _plain(folded[root_name(at)])))
        if pc.any(moved).as_py():
            raise Refused(
                "mirror.unchanged_values",
                "A large transaction changes primary keys of rows whose long values Postgres did not send.",
                hint="The table is compared with the lake anew. REPLICA IDENTITY FULL avoids it; leave it as it is.",
            )


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    # No kernel compares extension types such as uuid.
    return column.cast(column.type.storage_type) if isinstance(column.type, pa.BaseExtensionType) else column


@contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModakError(
            "mirror.spool",
            f"A large transaction cannot be kept on disk: {error.strerror or error}.",
            hint="Free space where MODAK_HOME is; the transaction is read again.",
            retryable=True,
        ) from error
