"""A plain table beside the tiered one that gets the same writes: what the two halves together must equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from modak.postgres.connect import connect
from tests.tables.events import Events, Row

Conn = psycopg.Connection[Any]


@dataclass
class Shadowed:
    """`public.events` and `public.model`; a write happens to both in one transaction, or to neither."""

    events: Events

    @classmethod
    def of(cls, events: Events) -> Shadowed:
        events.sql("CREATE TABLE public.model (id bigint, ts bigint, body text, PRIMARY KEY (id, ts))")
        events.sql("INSERT INTO public.model SELECT * FROM public.events")
        return cls(events)

    @contextmanager
    def session(self) -> Iterator[Conn]:
        conn = connect(self.events.site.dsn, application="a user")
        try:
            yield conn
        finally:
            conn.close()

    def insert(self, conn: Conn, rows: Sequence[Row]) -> None:
        conn.cursor().executemany("INSERT INTO public.events VALUES (%s, %s, %s)", rows)
        self.insert_model(conn, rows)

    def copy(self, conn: Conn, rows: Sequence[Row]) -> None:
        with conn.cursor().copy("COPY public.events FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        self.insert_model(conn, rows)

    def change(self, conn: Conn, action: str, key: int, ts: int) -> bool:
        """`SET …` or `DELETE` one row, if the heap has it: a row that only the lake has is not there for plain SQL."""
        where = f"WHERE id = {key} AND ts = {ts}"
        found = conn.execute(f"SELECT 1 FROM public.events {where} FOR UPDATE").fetchone()
        for table in ("events", "model") if found else ("events",):
            head = f"DELETE FROM public.{table}" if action == "DELETE" else f"UPDATE public.{table} {action}"
            conn.execute(f"{head} {where}")
        return found is not None

    def insert_model(self, conn: Conn, rows: Sequence[Row]) -> None:
        """What somebody has written to the tiered table alone."""
        # Below the heap an insert means upsert.
        conn.cursor().executemany(
            "INSERT INTO public.model VALUES (%s, %s, %s) ON CONFLICT (id, ts) DO UPDATE SET body = excluded.body", rows
        )

    def verify(self) -> None:
        """Heap from T on, and lake with the delta below it, are exactly what was written."""
        heap, cold = self.events.heap(), self.events.cold()
        wanted = set(self.events.sql("SELECT * FROM public.model"))
        both = heap | cold
        assert (sorted(both - wanted)[:10], sorted(wanted - both)[:10]) == ([], []), "not what was written"
        assert len(heap) + len(cold) == len(wanted), "a row is on both sides of the seam"
        (strays,) = self.events.sql("SELECT count(*) FROM ONLY public.events_modak_spill")
        assert strays == (0,)
