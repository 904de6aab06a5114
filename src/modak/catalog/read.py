"""Reading the catalog. This type cannot write: its connections are read only, and pages that show state get only it.

A whole table state is read under one snapshot, so that a planner never sees T of one moment and partitions of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import dict_row

from modak.catalog.records import (
    Cutline,
    Mode,
    OpRecord,
    PartitionRecord,
    Pin,
    Profile,
    StatusRow,
    TableRecord,
    TableState,
)
from modak.core.axis import Axis, Width
from modak.core.errors import Refused
from modak.core.ids import OpId
from modak.core.names import TableName
from modak.core.states import OpPhase, PartitionState
from modak.lake.model import LakeName
from modak.postgres.connect import connect, translate
from modak.postgres.dsn import Dsn
from modak.postgres.pool import Pool

Conn = psycopg.Connection[Any]
Row = Mapping[str, Any]

_CUTLINE: LiteralString = (
    "SELECT *, frontier::text AS frontier, heal_until::text AS heal_until FROM modak.cutline WHERE table_id = %s"
)
_PARTITIONS: LiteralString = """
    SELECT *, sealed_lsn::text AS sealed_lsn, dropped_lsn::text AS dropped_lsn FROM modak.partitions
    WHERE table_id = %s ORDER BY lower_bound NULLS FIRST, partition_id
"""
_PINS: LiteralString = """
    SELECT pin_id, table_id, snapshot_id, t, retention_line, metadata_location, created_at, expires_at, holder,
        generation
    FROM modak.read_pins WHERE table_id = %s AND expires_at > clock_timestamp() ORDER BY pin_id
"""
_UNFINISHED: LiteralString = """
    SELECT * FROM modak.op_log
    WHERE phase NOT IN ('done', 'abandoned', 'failed') AND (table_id = %(table)s OR %(table)s::bigint IS NULL)
    ORDER BY started_at, op_id
"""

__all__ = [
    "CatalogReader",
    "Cutline",
    "OpRecord",
    "PartitionRecord",
    "Pin",
    "Profile",
    "StatusRow",
    "TableRecord",
    "TableState",
]


class CatalogReader:
    """Looks at the catalog, by connections of its own or within a transaction of the caller."""

    def __init__(self, source: Dsn | Pool | Conn) -> None:
        self._source = source

    def tables(self) -> list[TableRecord]:
        """All registered tables, by name."""
        rows = self._rows("SELECT * FROM modak.tables ORDER BY schema_name, table_name")
        return [_table(row) for row in rows]

    def table(self, name: TableName) -> TableRecord | None:
        """The registered table of that name."""
        query: LiteralString = "SELECT * FROM modak.tables WHERE schema_name = %s AND table_name = %s"
        return next((_table(row) for row in self._rows(query, (name.schema, name.name))), None)

    def state(self, name: TableName) -> TableState:
        """Everything about one table, under one snapshot."""
        with self._session() as conn:
            here = CatalogReader(conn)
            table = here.table(name)
            if table is None:
                raise Refused(
                    "catalog.not_registered",
                    f"{name} is not registered.",
                    hint=f"Register it with: modak-worker register --table {name} --pk … --tier-key …",
                )
            cutline = here.cutline(table.table_id)
            if cutline is None:
                raise Refused("catalog.no_cutline", f"{name} has no cut-line: its registration has not finished.")
            return TableState(
                table=table,
                cutline=cutline,
                partitions=here.partitions(table.table_id),
                pins=here.live_pins(table.table_id),
                unfinished=here.unfinished_ops(table.table_id),
                staged_loads=here.staged_loads(table.table_id),
            )

    def cutline(self, table_id: int) -> Cutline | None:
        """The lines of a table."""
        rows = self._rows(_CUTLINE, (table_id,))
        return next((_cutline(row) for row in rows), None)

    def partitions(self, table_id: int) -> tuple[PartitionRecord, ...]:
        """All partitions of a table, dropped ones too, from the oldest to the newest."""
        return tuple(_partition(row) for row in self._rows(_PARTITIONS, (table_id,)))

    def live_pins(self, table_id: int) -> tuple[Pin, ...]:
        """Pins that have not expired."""
        return tuple(Pin(**row) for row in self._rows(_PINS, (table_id,)))

    def delta_backlog(self, table_id: int) -> int:
        """Delta rows that are not folded; reads them all, so it is no part of the state that every step asks for."""
        query: LiteralString = "SELECT count(*) AS n FROM modak.delta WHERE table_id = %s AND folded_into IS NULL"
        return int(self._rows(query, (table_id,))[0]["n"])

    def staged_loads(self, table_id: int) -> int:
        """Labels whose files wait to be adopted."""
        query: LiteralString = "SELECT count(*) AS n FROM modak.load_labels WHERE table_id = %s AND state = 'staged'"
        return int(self._rows(query, (table_id,))[0]["n"])

    def op(self, op_id: OpId) -> OpRecord | None:
        """One operation of the journal."""
        return next((_op(row) for row in self._rows("SELECT * FROM modak.op_log WHERE op_id = %s", (op_id,))), None)

    def unfinished_ops(self, table_id: int | None = None) -> tuple[OpRecord, ...]:
        """Operations that still have something to do or to tidy, oldest first; of one table or of all."""
        return tuple(_op(row) for row in self._rows(_UNFINISHED, {"table": table_id}))

    def history(self, table_id: int, limit: int = 50) -> tuple[OpRecord, ...]:
        """The latest operations of a table, newest first."""
        query: LiteralString = "SELECT * FROM modak.op_log WHERE table_id = %s ORDER BY started_at DESC LIMIT %s"
        return tuple(_op(row) for row in self._rows(query, (table_id, limit)))

    def status(self) -> list[StatusRow]:
        """`modak.status`, by name."""
        query: LiteralString = (
            "SELECT *, mirror_frontier::text AS mirror_frontier FROM modak.status ORDER BY schema_name, table_name"
        )
        return [_status(row) for row in self._rows(query)]

    def profiles(self) -> list[Profile]:
        """All storage profiles, by name."""
        query: LiteralString = (
            "SELECT profile_id, name, warehouse, format, config, credentials_ref, is_default"
            " FROM modak.storage_profiles ORDER BY name"
        )
        return [Profile(**row) for row in self._rows(query)]

    def profile(self, name: str | None = None) -> Profile:
        """The named storage profile, or the default one."""
        for each in self.profiles():
            if each.name == name or (name is None and each.is_default):
                return each
        raise Refused(
            "catalog.no_profile",
            f"There is no storage profile {name!r}.",
            hint="List them with: modak-worker profile list",
        )

    def _rows(self, query: LiteralString, params: tuple[Any, ...] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        try:
            with self._session() as conn, conn.cursor(row_factory=dict_row) as cursor:
                return cursor.execute(query, params or None).fetchall()
        except psycopg.Error as error:
            raise translate(error) from error

    @contextmanager
    def _session(self) -> Iterator[Conn]:
        if not isinstance(self._source, Dsn | Pool):
            yield self._source
            return
        with connect(self._source) if isinstance(self._source, Dsn) else self._source.connection() as conn:
            conn.read_only = True
            conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            yield conn


def _table(row: Row) -> TableRecord:
    amount = row["partition_width"]
    return TableRecord(
        table_id=row["table_id"],
        name=TableName(row["schema_name"], row["table_name"]),
        relid=row["relid"],
        mode=cast("Mode", row["mode"]),
        pk_columns=tuple(row["pk_columns"]),
        pk_attnums=tuple(row["pk_attnums"]),
        tier_key=row["tier_key"],
        tier_attnum=row["tier_attnum"],
        axis=Axis(row["axis"]),
        width=None if amount is None else Width(amount, row["width_months"], row["width_zone"]),
        profile_id=row["profile_id"],
        lake=LakeName(tuple(row["lake_namespace"].split(".")), row["lake_name"]),
        location=row["location"],
        layout=row["layout"],
        keep_heap=row["keep_heap"],
        heap_retention=row["heap_retention"],
        lake_retention=row["lake_retention"],
        chunk_rows=row["chunk_rows"],
        numeric_as=row["numeric_as"],
        maintenance_policy=row["maintenance_policy"],
        frozen=row["frozen"],
        created_at=row["created_at"],
    )


def _cutline(row: Row) -> Cutline:
    return Cutline(**row)


def _partition(row: Row) -> PartitionRecord:
    return PartitionRecord(
        partition_id=row["partition_id"],
        table_id=row["table_id"],
        name=row["partition_name"],
        lower=row["lower_bound"],
        upper=row["upper_bound"],
        state=PartitionState(row["state"]),
        leaf_oid=row["leaf_oid"],
        leaf_schema=row["leaf_schema"],
        relfilenode=row["relfilenode"],
        trigger_oid=row["trigger_oid"],
        problem=row["problem"],
        updated_at=row["updated_at"],
        attachment=row["attachment"],
        sealed_lsn=row["sealed_lsn"],
        dropped_lsn=row["dropped_lsn"],
    )


def _op(row: Row) -> OpRecord:
    return OpRecord(
        **{
            **row,
            "op_id": OpId(row["op_id"]),
            "phase": OpPhase(row["phase"]),
            "folders": tuple(row["folders"]),
            "xact_id": None if row["xact_id"] is None else int(row["xact_id"]),
        }
    )


def _status(row: Row) -> StatusRow:
    rest = {key: value for key, value in row.items() if key not in ("schema_name", "table_name", "axis", "problems")}
    return StatusRow(
        name=TableName(row["schema_name"], row["table_name"]),
        axis=Axis(row["axis"]),
        problems=tuple(row["problems"]),
        **rest,
    )
