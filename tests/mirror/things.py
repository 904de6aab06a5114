"""The tables that copy, retention and anchoring are tried on, and what Postgres and the lake say of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from modak.core.names import TableName
from modak.postgres.changes.slot import SlotState
from modak.runtime.leader import Leader
from modak.tables.mirror.cycle import MirrorReport, mirror_cycle
from modak.tables.mirror.names import publication_name
from modak.tables.mirror.pump import run as pumping
from modak.tables.mirror.replication import look_at_slot
from modak.tables.registration.register import Registered, register
from modak.tables.registration.request import RegisterRequest
from modak.tables.registration.unregister import Unregistered, unregister
from modak.tables.site import Site
from tests.tables.readers import duckdb_rows

Row = tuple[Any, ...]


@dataclass
class Things:
    """`public.things(id, ts, body)`, plain or in range partitions of width 100."""

    site: Site
    name: TableName
    pk: tuple[str, ...] = ("id",)

    @classmethod
    def plain(cls, site: Site, rows: int = 100, name: str = "things") -> Things:
        made = cls(site, TableName("public", name))
        made.sql(f"CREATE TABLE public.{name} (id bigint PRIMARY KEY, ts bigint NOT NULL, body text)")
        made.fill(0, rows)
        return made

    @classmethod
    def ranged(cls, site: Site, rows: int = 250, partitions: int = 3, name: str = "things") -> Things:
        made = cls(site, TableName("public", name))
        made.sql(
            f"CREATE TABLE public.{name} (id bigint, ts bigint NOT NULL, body text, PRIMARY KEY (id, ts))"
            " PARTITION BY RANGE (ts)"
        )
        for at in range(partitions):
            made.add_partition(at * 100)
        made.fill(0, rows)
        return made

    def add_partition(self, lower: int) -> None:
        leaf = f"{self.name.name}_{lower}"
        self.sql(f"CREATE TABLE public.{leaf} PARTITION OF {self.name} FOR VALUES FROM ({lower}) TO ({lower + 100})")

    def fill(self, low: int, high: int) -> None:
        if high > low:
            self.sql(f"INSERT INTO {self.name} SELECT i, i, 'row ' || i FROM generate_series({low}, {high - 1}) AS i")

    def sql(self, statement: str) -> list[Row]:
        with self.site.connect(autocommit=True) as conn:
            conn.execute("SET lock_timeout = '60s'")
            cursor = conn.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def request(self, **more: Any) -> RegisterRequest:
        return RegisterRequest(self.name, self.pk, "ts", mode="mirrored", **more)

    def register(self, **more: Any) -> Registered:
        return register(self.site, self.request(**more))

    def unregister(self, **more: Any) -> Unregistered:
        return unregister(self.site, self.name, **more)

    @property
    def state(self) -> Any:
        return self.site.reader.state(self.name)

    @property
    def slot(self) -> SlotState | None:
        return look_at_slot(self.site, self.state.table)

    @property
    def publication(self) -> str:
        return publication_name(self.state.table.table_id)

    def lose_slot(self) -> None:
        slot = self.slot
        assert slot is not None
        self.sql(f"SELECT pg_drop_replication_slot('{slot.name}')")

    def pump(self, leader: Leader) -> None:
        """Follow the changes until there are none, and let the frontier come to the end of the WAL."""
        self._pump_until(leader, threading.Event())

    def _pump_until(self, leader: Leader, stop: threading.Event) -> None:
        idle = patch.object(pumping, "IDLE_SECONDS", 0.0)
        with idle, closing(pumping.Pump(self.site, leader.epoch, self.state.table.table_id)) as pump:
            while pump.turn().changes and not stop.is_set():
                pass

    @contextmanager
    def followed(self, leader: Leader) -> Iterator[None]:
        """While a block runs, somebody pumps."""
        stop = threading.Event()

        def follow() -> None:
            while not stop.is_set():
                self._pump_until(leader, stop)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60)

    def cycle(self, leader: Leader) -> MirrorReport:
        return mirror_cycle(self.site, leader.epoch, self.name)

    def heap(self) -> list[Row]:
        return sorted(self.sql(f"SELECT * FROM {self.name}"))

    def lake(self) -> list[Row]:
        """The published rows, as DuckDB reads them."""
        line = self.state.cutline
        if line.snapshot_id is None:
            return []
        return sorted(tuple(row.values()) for row in duckdb_rows(line.metadata_location))

    def snapshots(self) -> int:
        lake = self.site.lake.load(self.state.table.lake)
        assert lake is not None
        return lake.snapshot_count

    def chunks(self) -> list[Row]:
        return self.sql(
            "SELECT chunk, first_pk, last_pk, state, rows FROM modak.copy_progress JOIN modak.tables t USING (table_id)"
            f" WHERE t.table_name = '{self.name.name}' ORDER BY chunk"
        )

    def identities(self) -> dict[str, str]:
        return dict(
            self.sql(
                "SELECT c.relname::text, c.relreplident::text FROM pg_partition_tree("
                f"'{self.name}') p JOIN pg_class c ON c.oid = p.relid"
                if self.sql(f"SELECT 1 FROM pg_partitioned_table WHERE partrelid = '{self.name}'::regclass")
                else f"SELECT relname::text, relreplident::text FROM pg_class WHERE oid = '{self.name}'::regclass"
            )
        )
