"""Messages of pgoutput made by hand, tables that are followed for real, and a replay of decoded changes."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from modak.core.names import TableName
from modak.postgres.changes.batch import Changes, Image, Old, Op, Piece, Truncation
from modak.postgres.changes.lookup import CatalogTypes
from modak.postgres.changes.peek import Feed, Peek
from modak.postgres.changes.publication import create_publication, write_full_rows
from modak.postgres.changes.slot import created_slot, usable_slot
from modak.postgres.changes.stream import ReplicationStream
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.model import PgType
from tests.lake.every_type import plain

UNCHANGED = object()
INT4, INT8, TEXT = 23, 20, 25
_KNOWN = {INT4: PgType("int4", "scalar"), INT8: PgType("int8", "scalar"), TEXT: PgType("text", "scalar")}


def types(wanted: Sequence[tuple[int, int]]) -> list[PgType]:
    """The few types that messages made by hand use."""
    return [_KNOWN[oid] for oid, _ in wanted]


def begin(commit_lsn: int, xid: int = 7, time: int = 0) -> bytes:
    return b"B" + struct.pack(">QqI", commit_lsn, time, xid)


def commit(commit_lsn: int, end_lsn: int, time: int = 0) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, commit_lsn, end_lsn, time)


def relation(oid: int, name: str, columns: Sequence[tuple[str, int]], key: int = 1, xid: int | None = None) -> bytes:
    body = struct.pack(">I", oid) + b"public\0" + name.encode() + b"\0d" + struct.pack(">H", len(columns))
    for at, (column, kind) in enumerate(columns):
        body += bytes([at < key]) + column.encode() + b"\0" + struct.pack(">Ii", kind, -1)
    return b"R" + _prefix(xid) + body


def insert(oid: int, row: Sequence[Any], xid: int | None = None) -> bytes:
    return b"I" + _prefix(xid) + struct.pack(">I", oid) + b"N" + _tuple(row)


def update(oid: int, row: Sequence[Any], old: Sequence[Any] | None = None, kind: str = "O") -> bytes:
    before = b"" if old is None else kind.encode() + _tuple(old)
    return b"U" + struct.pack(">I", oid) + before + b"N" + _tuple(row)


def delete(oid: int, old: Sequence[Any], kind: str = "O") -> bytes:
    return b"D" + struct.pack(">I", oid) + kind.encode() + _tuple(old)


def truncate(oids: Sequence[int], options: int = 0) -> bytes:
    return b"T" + struct.pack(f">IB{len(oids)}I", len(oids), options, *oids)


def _prefix(xid: int | None) -> bytes:
    return b"" if xid is None else struct.pack(">I", xid)


def _tuple(row: Sequence[Any]) -> bytes:
    """Numbers travel in binary form (eight bytes), texts as text."""
    body = struct.pack(">H", len(row))
    for value in row:
        match value:
            case None:
                body += b"n"
            case int():
                body += b"b" + struct.pack(">Iq", 8, value)
            case str():
                body += b"t" + struct.pack(">I", len(value.encode())) + value.encode()
            case _:
                body += b"u"
    return body


@dataclass(frozen=True)
class Followed:
    """A database with a publication and a slot of the same name."""

    dsn: Dsn
    name: str

    def feed(self, *, binary: bool) -> Feed:
        return Feed(self.dsn, self.name, (self.name,), binary)

    def types(self) -> CatalogTypes:
        return CatalogTypes(lambda: connect(self.dsn, autocommit=True))

    def upto(self) -> int:
        with connect(self.dsn, autocommit=True) as conn:
            return usable_slot(conn, self.name).flush_lsn

    def peeked(self, *, binary: bool, after: int = 0, batch_bytes: int = 1 << 20) -> list[Piece]:
        return list(Peek(self.feed(binary=binary), self.types(), self.upto(), after, batch_bytes=batch_bytes))

    def streamed(self, folder: Path, *, binary: bool, memory_bytes: int = 1 << 20, after: int = 0) -> list[Piece]:
        feed = self.feed(binary=binary)
        self._wait_until_free()
        with ReplicationStream(
            feed, self.types(), folder, memory_bytes=memory_bytes, after=after, batch_bytes=100_000
        ) as stream:
            pieces = list(stream.read(self.upto(), 60.0))
        self._wait_until_free()
        return pieces

    def _wait_until_free(self) -> None:
        """The server notices the end of a stream a moment after its reader has gone."""
        deadline = time.monotonic() + 30
        with connect(self.dsn, autocommit=True) as conn:
            while usable_slot(conn, self.name).active_pid is not None and time.monotonic() < deadline:
                time.sleep(0.02)


@contextmanager
def followed(dsn: Dsn, name: str, *tables: str, full: bool = True) -> Iterator[Followed]:
    """Publish tables and make a slot; the database's own end removes both."""
    names = [TableName("public", table) for table in tables]
    with connect(dsn, autocommit=True) as conn:
        assert create_publication(conn, name, names)
        if full:
            assert [write_full_rows(conn, each) for each in names] == [()] * len(names)
    with created_slot(dsn, name):
        pass
    yield Followed(dsn, name)


def rows_of(image: Image, only: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """The rows of an image as values that compare; what was not sent is UNCHANGED."""
    columns = {}
    for at, column in enumerate(image.relation.columns):
        if only is not None and column.name not in only:
            continue
        values: list[Any] = plain(image.column(at))
        marks = image.unchanged(at)
        for row, marked in enumerate(marks.to_pylist() if marks is not None else ()):
            if marked:
                assert values[row] is None
                values[row] = UNCHANGED
        columns[column.name] = values
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def replay(pieces: Iterable[Piece], table: str, key: Sequence[str] = ("k",)) -> dict[Any, dict[str, Any]]:
    """What the table holds after all changes, by key; values that were not sent come from the row before."""
    rows: dict[Any, dict[str, Any]] = {}
    for item in (item for piece in pieces for item in piece.items):
        if isinstance(item, Truncation):
            if table in {relation.name.name for relation in item.relations}:
                rows.clear()
        elif item.relation.name.name == table:
            _apply(rows, item, key)
    return rows


def _apply(rows: dict[Any, dict[str, Any]], changes: Changes, key: Sequence[str]) -> None:
    news = rows_of(changes.new) if changes.new else [None] * len(changes)
    olds = rows_of(changes.old) if changes.old else [None] * len(changes)
    header = changes.header.to_pydict()
    for op, sent, new, old in zip(header["op"], header["old"], news, olds, strict=True):
        gone = {}
        if op != Op.INSERT:
            named = old if sent != Old.NOTHING else new
            gone = rows.pop(tuple(named[part] for part in key))
            if sent == Old.FULL:
                both = set(gone) & set(old)
                assert {name: gone[name] for name in both} == {name: old[name] for name in both}
        if op != Op.DELETE:
            known = {name: gone.get(name) if value is UNCHANGED else value for name, value in new.items()}
            rows[tuple(known[part] for part in key)] = known


def table_rows(heap: pa.Table, key: Sequence[str] = ("k",)) -> dict[Any, dict[str, Any]]:
    """The rows of a table as `replay` gives them."""
    columns = {name: plain(heap.column(name)) for name in heap.column_names}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {tuple(row[part] for part in key): row for row in rows}


def headers(pieces: Iterable[Piece]) -> list[tuple[Any, ...]]:
    """Every change with its table, in the order of commits and positions, without end LSNs."""
    found = []
    for item in (item for piece in pieces for item in piece.items):
        if isinstance(item, Truncation):
            names = tuple(relation.name.name for relation in item.relations)
            found.append((item.commit_lsn, item.position, "truncate", names))
            continue
        head = item.header.to_pydict()
        found += [
            (lsn, position, op, old, xid, time, item.relation.name.name)
            for lsn, position, op, old, xid, time in zip(
                *(head[name] for name in ("commit_lsn", "position", "op", "old", "xid", "commit_time")), strict=True
            )
        ]
    return sorted(found, key=lambda row: row[:2])
