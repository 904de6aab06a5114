"""What the decoder gives: changes of one table in one version of its definition, as Arrow columns.

A piece holds the changes of some transactions, or a part of one, in memory; the reader decides how large a piece is.
The images of a row are read from the wire column by column when they are asked for, so that a column nobody looks at
costs nothing. A piece keeps its part of the wire alive until it is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modak.postgres.changes.cells import Cells
from modak.postgres.changes.columns import arrow_type, read_column
from modak.postgres.changes.relation import Relation
from modak.postgres.changes.wire import Places, Wire


class Op(IntEnum):
    """What happened to a row."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3


class Old(IntEnum):
    """How much of the old row a change brings; of a key, the other columns are null without being NULL."""

    NOTHING = 0
    KEY = 1
    FULL = 2


HEADER = pa.schema(
    [
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("old", pa.uint8(), nullable=False),
        pa.field("commit_lsn", pa.uint64(), nullable=False),
        pa.field("end_lsn", pa.uint64()),
        pa.field("commit_time", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("xid", pa.uint32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
    ]
)
"""One row per change. `end_lsn` is null while the end of the transaction has not been read; `position` counts the
changes of a transaction, over all its tables."""


@dataclass(slots=True)
class Image:
    """One side of changes: the rows after, or before. It has a row for every change; `rows` says which exist."""

    relation: Relation
    wire: Wire
    cells: list[Cells]
    rows: Places | None
    """Which changes have this side, in ascending order; None means all."""
    length: int
    _read: dict[int, pa.Array] = field(default_factory=dict)
    _spread: pa.Array | None = None
    """For every change the place of its row among those that exist, or null."""

    def compact(self, column: int) -> pa.Array:
        """The values of the rows that exist. What Postgres did not send is null here too: see `unchanged`."""
        found = self._read.get(column)
        if found is None:
            about = self.relation.columns[column]
            found = self._read[column] = read_column(self.wire, self.cells[column], about.type, about.name)
        return found

    def column(self, column: int) -> pa.Array:
        """The values, one for every change."""
        values = self.compact(column)
        if self.rows is None:
            return values
        if self._spread is None:
            places = np.zeros(self.length, np.int32)
            places[self.rows] = np.arange(len(self.rows), dtype=np.int32)
            absent = np.ones(self.length, bool)
            absent[self.rows] = False
            self._spread = pa.array(places, mask=absent)
        return values.take(self._spread)

    def unchanged(self, column: int) -> pa.Array | None:
        """Which changes kept a TOAST value that Postgres did not send; None when there is none."""
        marks = self.cells[column].unchanged
        if marks is None:
            return None
        every = np.zeros(self.length, bool)
        every[slice(None) if self.rows is None else self.rows] = marks
        return pa.array(every)

    def batch(self) -> pa.RecordBatch:
        """All columns, one row for every change."""
        columns = range(len(self.relation.columns))
        return pa.RecordBatch.from_arrays([self.column(at) for at in columns], schema=schema_of(self.relation))


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of one table, in the order in which they happened.

    `version` counts how often Postgres has announced the table in this session. A higher one tells that its definition
    was touched at this point of the WAL, even when it looks the same: a column dropped and added again under its name.
    """

    relation: Relation
    version: int
    header: pa.RecordBatch
    new: Image | None
    old: Image | None

    def __len__(self) -> int:
        return int(self.header.num_rows)

    def completed(self, column: int) -> tuple[pa.Array, pa.Array | None]:
        """The new values, those that were not sent taken from a whole old row; and a mark for what is still unknown."""
        if self.new is None:
            raise ValueError("these changes have no new rows")
        values, unchanged = self.new.column(column), self.new.unchanged(column)
        if unchanged is None or self.old is None:
            return values, unchanged
        old = self.old.column(column)
        whole = pc.and_(unchanged, pc.equal(self.header["old"], pa.scalar(Old.FULL, pa.uint8())))
        # Postgres calls an old row whole by the identity of the root, also where a partition wrote its key alone. A
        # value that was not sent is a stored one and never NULL, so that NULL is none that was written down.
        known = pc.and_(whole, old.is_valid())
        return _either(known, old, values), pc.and_not(unchanged, known)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tables that one TRUNCATE emptied; the changes of a piece that stand before it happened before it."""

    relations: tuple[Relation, ...]
    cascade: bool
    restart_identity: bool
    commit_lsn: int
    position: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A bounded part of the change stream.

    Items of one table are in their order; between tables the headers tell. `frontier` is the end LSN of the last
    transaction that is complete with this piece, None when it completes none; `unfinished` says that the next piece
    goes on with a transaction of this one.
    """

    items: tuple[Changes | Truncation, ...]
    frontier: int | None
    unfinished: bool

    @property
    def rows(self) -> int:
        """How many row changes it holds."""
        return sum(len(item) for item in self.items if isinstance(item, Changes))


def schema_of(relation: Relation) -> pa.Schema:
    """The Arrow schema of a table's images."""
    return pa.schema([pa.field(column.name, arrow_type(column.type)) for column in relation.columns])


def _either(first: pa.Array, these: pa.Array, others: pa.Array) -> pa.Array:
    # Not if_else, which knows no extension types.
    choice = np.arange(len(these)) + np.where(np.asarray(first.cast(pa.int8())) == 1, 0, len(these))
    return pa.concat_arrays([these, others]).take(pa.array(choice))
