"""The table most scenarios use, what is in it, and what the lake and the delta make of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.tables.registration.register import Registered, register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.run import TieringReport, tier
from tests.tables.readers import duckdb_rows

Row = tuple[Any, ...]


@dataclass
class Events:
    """`public.events(id, ts, body)`, or one of another name and schema, ranged by ts in widths of 100."""

    site: Site
    name: TableName

    @classmethod
    def create(
        cls, site: Site, partitions: int = 3, last: int = 250, name: str = "events", schema: str = "public"
    ) -> Events:
        events = cls(site, TableName(schema, name))
        events.sql(
            f"CREATE TABLE {schema}.{name} (id bigint, ts bigint, body text, PRIMARY KEY (id, ts))"
            " PARTITION BY RANGE (ts)"
        )
        for at in range(partitions):
            events.add_partition(at * 100)
        if last >= 0:
            events.sql(f"INSERT INTO {schema}.{name} SELECT i, i, 'row ' || i FROM generate_series(0, {last}) AS i")
        return events

    def sql(self, statement: str) -> list[Row]:
        with self.site.connect(autocommit=True) as conn:
            # Whoever holds a lock for so long is in the way of the application too.
            conn.execute("SET lock_timeout = '60s'")
            cursor = conn.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def add_partition(self, lower: int, width: int = 100) -> None:
        name = f"{self.name.schema}.{self.name.name}_{lower}"
        self.sql(f"CREATE TABLE {name} PARTITION OF {self.name} FOR VALUES FROM ({lower}) TO ({lower + width})")

    def register(self) -> Registered:
        return register(self.site, RegisterRequest(self.name, ("id",), "ts"))

    def tier(self, leader: Leader) -> TieringReport:
        return tier(self.site, leader.epoch, self.name)

    def heap(self) -> set[Row]:
        """Rows at or above the cut-line, which only the heap has."""
        t = self.site.reader.state(self.name).cutline.t
        return set(self.sql(f"SELECT * FROM {self.name} WHERE ts >= {t}"))

    def lake(self) -> list[Row]:
        """Rows of the published snapshot: as Spark reads them where the test has a session, else as DuckDB does."""
        state = self.site.reader.state(self.name)
        if state.cutline.snapshot_id is None:
            return []
        if "spark" not in vars(self.site):
            return [tuple(row.values()) for row in duckdb_rows(state.cutline.metadata_location)]
        frame = self.site.spark.sql(
            f"SELECT * FROM modak.modak.{self.name.schema}.{self.name.name} VERSION AS OF {state.cutline.snapshot_id}"
        )
        return [tuple(row) for row in frame.collect()]

    def delta(self) -> dict[tuple[str, int], dict[str, str] | None]:
        """Identity → image (None: a tombstone), below the cut-line."""
        state = self.site.reader.state(self.name)
        rows = self.sql(
            f"SELECT pk, tier_key, op, payload FROM modak.delta WHERE table_id = {state.table.table_id}"
            f" AND tier_key < {state.cutline.t}"
        )
        return {
            (pk, key): (payload if isinstance(payload, dict) else json.loads(payload)) if op == 1 else None
            for pk, key, op, payload in rows
        }

    def cold(self) -> set[Row]:
        """Lake with the delta laid over it: what a seam read shows below the cut-line."""
        delta = self.delta()
        rows = self.lake()
        assert len(rows) == len(set(rows)), "a row is in the lake twice"
        kept = {row for row in rows if (str(row[0]), row[1]) not in delta}
        return kept | {(int(d["id"]), int(d["ts"]), d["body"]) for d in delta.values() if d is not None}

    def everything(self) -> set[Row]:
        """The whole table, across the seam."""
        return self.heap() | self.cold()

    def snapshots(self) -> int:
        lake = self.site.lake.load(self.site.reader.state(self.name).table.lake)
        assert lake is not None
        return lake.snapshot_count
