"""Builders: a range-partitioned table that is registered without any lake."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from modak.catalog import capture, moves
from modak.catalog.records import Cutline, NewPartition, TableConfig
from modak.core.axis import Axis, Width
from modak.core.names import TableName
from modak.lake.model import LakeName
from modak.postgres.bounds import to_axis

Conn = psycopg.Connection[Any]

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Built:
    """A registered table of the test."""

    table_id: int
    name: TableName
    leaves: tuple[int, ...]

    @property
    def ident(self) -> sql.Identifier:
        return sql.Identifier(self.name.schema, self.name.name)

    def leaf(self, number: int) -> sql.Identifier:
        return sql.Identifier(self.name.schema, f"{self.name.name}_{number}")


def config(name: TableName, relid: int, **changes: Any) -> TableConfig:
    """A tiered registration with plain values."""
    plain: dict[str, Any] = {
        "name": name,
        "relid": relid,
        "mode": "tiered",
        "pk_columns": ("id",),
        "pk_attnums": (1,),
        "tier_key": "ts",
        "tier_attnum": 2,
        "axis": Axis.INTEGER,
        "width": Width(100),
        "profile_id": 1,
        "lake": LakeName(("modak", name.schema), name.name),
        "location": f"file:///lake/{name.name}",
    }
    return TableConfig(**{**plain, **changes})


def build(
    conn: Conn,
    columns: str = "id bigint, ts bigint, body text",
    *,
    pk: Sequence[str] = ("id",),
    tier: str = "ts",
    axis: Axis = Axis.INTEGER,
    bounds: Sequence[tuple[str, str]] = (("0", "100"), ("100", "200"), ("200", "300")),
    t: int | None = 0,
    watch: Sequence[int] = (),
) -> Built:
    """Create, partition and register a table; put the capture trigger on the leaves numbered in `watch`."""
    name = TableName("public", f"events_{next(_NUMBERS)}")
    ident = sql.Identifier(name.schema, name.name)
    keys = list(dict.fromkeys([*pk, tier]))
    conn.execute(
        sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({})) PARTITION BY RANGE ({})").format(
            ident,
            sql.SQL(columns),
            sql.SQL(", ").join(map(sql.Identifier, keys)),
            sql.Identifier(tier),
        )
    )
    leaves: list[int] = []
    partitions: list[NewPartition] = []
    for number, (lower, upper) in enumerate(bounds):
        leaf = sql.Identifier(name.schema, f"{name.name}_{number}")
        conn.execute(
            sql.SQL("CREATE TABLE {} PARTITION OF {} FOR VALUES FROM ({}) TO ({})").format(
                leaf, ident, sql.Literal(lower), sql.Literal(upper)
            )
        )
        oid = scalar(conn, "SELECT %s::regclass::oid", f"{name.schema}.{name.name}_{number}")
        leaves.append(oid)
        low, high = to_axis(conn, axis, [lower, upper])
        partitions.append(
            NewPartition(
                name=f"{name.name}_{number}",
                lower=low,
                upper=high,
                leaf_oid=oid,
                leaf_schema=name.schema,
            )
        )
    relid = scalar(conn, "SELECT %s::regclass::oid", f"{name.schema}.{name.name}")
    numbers = dict(conn.execute("SELECT attname, attnum FROM pg_attribute WHERE attrelid = %s", (relid,)).fetchall())
    table_id = moves.register(
        conn,
        config(
            name,
            relid,
            pk_columns=tuple(pk),
            pk_attnums=tuple(numbers[column] for column in pk),
            tier_key=tier,
            tier_attnum=numbers[tier],
            axis=axis,
        ),
    )
    moves.begin_cutline(conn, Cutline(table_id=table_id, t=t, snapshot_id=1, metadata_location="file:///lake/m1.json"))
    moves.add_partitions(conn, table_id, partitions)
    for number in watch:
        capture.install(conn, table_id, leaves[number])
    return Built(table_id, name, tuple(leaves))


def scalar(conn: Conn, query: str, *params: Any) -> Any:
    """The first column of the first row."""
    row = conn.execute(query, params).fetchone()
    assert row is not None
    return row[0]


def delta(conn: Conn, table: Built) -> dict[tuple[str, int], dict[str, str | None] | None]:
    """The delta of a table: identity → image, None for a tombstone."""
    rows = conn.execute(
        "SELECT pk, tier_key, op, payload FROM modak.delta WHERE table_id = %s ORDER BY version", (table.table_id,)
    ).fetchall()
    assert all((op == 1) == (payload is not None) for _, _, op, payload in rows)
    return {(pk, key): payload for pk, key, _, payload in rows}


def heap(conn: Conn, table: Built, columns: str = "*") -> list[tuple[Any, ...]]:
    """What the heap shows."""
    query = sql.SQL("SELECT {} FROM {} ORDER BY 1").format(sql.SQL(columns), table.ident)
    return conn.execute(query).fetchall()
