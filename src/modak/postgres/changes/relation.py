"""What Postgres says about a table in its change stream: columns with their types, at a position of the WAL.

The stream names types by number; whoever opens the session says what they are (`lookup.py`). No I/O, and a few values
per column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from modak.core.names import TableName
from modak.postgres.changes.wire import Wire
from modak.postgres.model import PgType

Identity = Literal["default", "nothing", "full", "index"]

_IDENTITIES: Mapping[str, Identity] = {"d": "default", "n": "nothing", "f": "full", "i": "index"}

TypeLookup = Callable[[Sequence[tuple[int, int]]], Sequence[PgType]]
"""From pairs of type number and modifier to types."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as announced; `key` says that it is part of the replica identity."""

    name: str
    type: PgType
    type_oid: int
    typmod: int
    key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as it was at a position of the WAL. The stream has no column numbers, only names in their order."""

    oid: int
    name: TableName
    identity: Identity
    columns: tuple[RelationColumn, ...]


def read_relation(wire: Wire, at: int, types: TypeLookup) -> Relation:
    """The body of a Relation message."""
    oid = _number(wire, at, 4)
    schema, at = wire.text(at + 4)
    name, at = wire.text(at)
    identity, count = _IDENTITIES[chr(wire.bytes[at])], _number(wire, at + 1, 2)
    at += 3
    rows = []
    for _ in range(count):
        key = bool(wire.bytes[at] & 1)
        column, at = wire.text(at + 1)
        typmod = _number(wire, at + 4, 4)
        rows.append((column, key, _number(wire, at, 4), typmod - 2**32 if typmod >= 2**31 else typmod))
        at += 8
    found = types([(type_oid, typmod) for _, _, type_oid, typmod in rows])
    columns = tuple(
        RelationColumn(column, kind, type_oid, typmod, key)
        for (column, key, type_oid, typmod), kind in zip(rows, found, strict=True)
    )
    # An empty schema means pg_catalog.
    return Relation(oid, TableName(schema or "pg_catalog", name), identity, columns)


def _number(wire: Wire, at: int, width: int) -> int:
    return int.from_bytes(wire.bytes[at : at + width].tobytes(), "big")
