"""A mirrored table for pump tests: make it, register it, change it, and see whether lake and heap are the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from modak.catalog.lease import Epoch
from modak.core.names import TableName
from modak.tables.mirror.cycle import MirrorReport, mirror_cycle
from modak.tables.mirror.pump import run
from modak.tables.mirror.pump.run import Pump, Turn
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from tests.tables.readers import duckdb_rows, plain

COLUMNS = "id bigint PRIMARY KEY, ts bigint NOT NULL, body text"


@dataclass
class Mirrored:
    """One table and its pump."""

    site: Site
    epoch: Epoch
    name: TableName
    pumps: list[Pump] = field(default_factory=list)
    known_id: int = 0

    @classmethod
    def create(
        cls,
        site: Site,
        epoch: Epoch,
        columns: str = COLUMNS,
        name: str = "things",
        pk: tuple[str, ...] = ("id",),
        rows: str | None = None,
        more: str = "",
        before: str | None = None,
        **options: Any,
    ) -> Mirrored:
        made = cls(site, epoch, TableName("public", name))
        made.sql(f"CREATE TABLE public.{name} ({columns}) {more}")
        if rows:
            made.sql(f"INSERT INTO public.{name} {rows}")
        if before:
            made.sql(before)
        made.register(pk, **options)
        made.known_id = next(each for each in site.reader.tables() if each.name == made.name).table_id
        return made

    def register(self, pk: tuple[str, ...] = ("id",), **options: Any) -> None:
        register(self.site, RegisterRequest(self.name, pk, "ts", mode="mirrored", **options))

    def sql(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in a transaction of its own; @ is the table."""
        with self.site.connect(autocommit=True) as conn:
            conn.execute("SET lock_timeout = '60s'")
            cursor = None
            for statement in statements:
                cursor = conn.execute(statement.replace("@", str(self.name)))
            return cursor.fetchall() if cursor is not None and cursor.description else []

    def together(self, *statements: str) -> None:
        """Run statements in one transaction; @ is the table."""
        with self.site.connect() as conn:
            for statement in statements:
                conn.execute(statement.replace("@", str(self.name)))
            conn.commit()

    def pump(self, *, fresh: bool = False) -> Turn:
        """One turn; `fresh` as a worker that has just started would do it."""
        if fresh:
            self.close()
        if not self.pumps:
            self.pumps.append(Pump(self.site, self.epoch, self.known_id))
        return self.pumps[0].turn()

    def cycle(self) -> MirrorReport:
        """Look after the table between two turns."""
        return mirror_cycle(self.site, self.epoch, self.name)

    def cycles(self) -> list[str]:
        """Turns and looks until what was noted has been compared; what was noted."""
        noted: list[str] = []
        with patch.object(run, "IDLE_SECONDS", 0.0):
            for _ in range(3):
                noted += self.cycle().noted
                self.sql("SELECT pg_logical_emit_message(true, 'modak', 'something happens')")
                self.pump()
        return [*noted, *self.cycle().noted]

    def close(self) -> None:
        while self.pumps:
            self.pumps.pop().close()

    def remove(self) -> None:
        """Free its slot and let nobody look after it any more."""
        self.close()
        for pid, slot in self.sql(
            f"SELECT active_pid, slot_name FROM pg_replication_slots WHERE slot_name LIKE '%\\_{self.known_id}'"
        ):
            if pid is not None:
                self.sql(f"SELECT pg_terminate_backend({pid})")
            self.sql(f"SELECT pg_drop_replication_slot('{slot}')")
        # Whoever serves all tables of the site would else try to anchor this one anew, in later tests.
        self.sql(f"DELETE FROM modak.tables WHERE table_id = {self.known_id}")

    def heap(self) -> list[dict[str, Any]]:
        with self.site.connect(autocommit=True) as conn, conn.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {self.name}")
            names = [column.name for column in cursor.description or ()]
            rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        return sorted(rows, key=lambda row: (row["id"], str(sorted(map(str, row.items())))))

    def lake(self) -> list[dict[str, Any]]:
        state = self.site.reader.state(self.name)
        return [] if state.cutline.snapshot_id is None else duckdb_rows(state.cutline.metadata_location)

    def is_same(self) -> bool:
        """Whether the lake has exactly the rows of the heap; shows both when not."""
        here, there = self.heap(), self.lake()
        if here != there:
            print("heap only:", [row for row in here if row not in there][:10])
            print("lake only:", [row for row in there if row not in here][:10])
        return here == there


__all__ = ["COLUMNS", "Mirrored", "plain"]
