"""What a Postgres table is, as values: columns, types, leaves. Filled by `describe.py`, read by planners."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modak.core.axis import Axis
from modak.core.names import TableName

TypeKind = Literal["scalar", "array", "enum", "composite", "range", "other"]

_AXES = {
    "int2": Axis.INTEGER,
    "int4": Axis.INTEGER,
    "int8": Axis.INTEGER,
    "date": Axis.DATE,
    "timestamp": Axis.TIMESTAMP,
    "timestamptz": Axis.TIMESTAMPTZ,
}


@dataclass(frozen=True, slots=True)
class PgType:
    """A type with domains resolved; `precision` is also the length of varchar and the digits of a timestamp."""

    name: str
    kind: TypeKind
    precision: int | None = None
    scale: int | None = None
    element: PgType | None = None
    collation_deterministic: bool = True


@dataclass(frozen=True, slots=True)
class PgColumn:
    """A column. `missing_value` is what rows older than it show, `default_value` a constant default; both as text."""

    name: str
    attnum: int
    type: PgType
    not_null: bool
    default: str | None
    default_constant: bool
    default_value: str | None
    missing_value: str | None
    generated: bool
    n_distinct: float | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """A partition of the table. Bounds are axis values; `None` is MINVALUE or MAXVALUE."""

    oid: int
    schema: str
    name: str
    lower: int | None
    upper: int | None
    is_default: bool
    relfilenode: int
    pages: int
    bytes: int
    rows_estimate: float
    detach_pending: bool
    kind: str
    is_spill: bool

    @property
    def table_name(self) -> TableName:
        """Schema and name."""
        return TableName(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class PgTable:
    """A table as the catalog shows it now.

    `privileges` holds what the current user has: owner, owner_of_partitions, select, select_partitions, insert, update,
    delete, truncate, trigger, usage_of_schema, create_in_schema, create_in_database, superuser, replication.
    """

    name: TableName
    oid: int
    owner: str
    relkind: str
    persistence: str
    partition_strategy: str | None
    partition_columns: tuple[str, ...]
    columns: tuple[PgColumn, ...]
    primary_key: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    inheritance_children: tuple[str, ...]
    inbound_foreign_keys: tuple[str, ...]
    privileges: frozenset[str]
    row_security: bool
    relfilenode: int
    pages: int
    bytes: int
    rows_estimate: float
    time_zone: str

    def column(self, name: str) -> PgColumn | None:
        """The column of that name."""
        return next((column for column in self.columns if column.name == name), None)


def axis_of(pgtype: PgType) -> Axis | None:
    """The tier-key axis of a type, if it can be a tier key."""
    return _AXES.get(pgtype.name) if pgtype.kind == "scalar" else None
