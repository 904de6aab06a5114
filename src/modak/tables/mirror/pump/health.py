"""How a pump is doing, for `status` and the log: what it last met, its lag, and the WAL that waits because of it.

WAL that nobody confirms fills the server's disk. From a limit on the guard warns; by policy it gives up the slot, and
then either waits for somebody (`pause`) or has the table compared and followed anew (`reanchor`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
import structlog

from modak.catalog.mirrors import MirrorHealth, note_health, note_pause
from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres.changes.lsn import read_lsn
from modak.postgres.changes.slot import SlotState, drop_slot, evict, slot_state
from modak.postgres.connect import connect
from modak.tables.site import Site

log = structlog.get_logger()

TELL_SECONDS = 2.0


@dataclass(slots=True)
class Teller:
    """Writes the health of one table down, every other second and whenever it turns."""

    site: Site
    table_id: int
    slot: str
    paused: str | None = None
    _flushes: int = 0
    _changes: int = 0
    _told: float = -1e9
    _error: str | None = None
    _warned: set[str] = field(default_factory=set)

    def flushed(self, flushes: int, changes: int) -> None:
        """Commits have landed."""
        self._flushes += flushes
        self._changes += changes

    def tell(self, frontier: str, lag_seconds: float, error: ModakError | None) -> SlotState | None:
        """Write down how it goes, unless that was just done; the slot as it was seen then."""
        said = None if error is None else f"{error.code}: {error.message}" + (f" {error.hint}" if error.hint else "")
        now = self.site.clock.monotonic()
        if now - self._told < TELL_SECONDS and said == self._error:
            return None
        with connect(self.site.dsn, autocommit=True, application="modak mirror") as conn:
            slot = slot_state(conn, self.slot)
            flush = slot.flush_lsn if slot is not None else _flush_lsn(conn)
            note_health(
                conn,
                MirrorHealth(
                    table_id=self.table_id,
                    error=said,
                    lag_bytes=max(0, flush - read_lsn(frontier)),
                    lag_seconds=lag_seconds,
                    retained_bytes=0 if slot is None else slot.retained_bytes,
                    slot_active=slot is not None and slot.active_pid is not None,
                    paused=self.paused,
                    flushes=self._flushes,
                    changes=self._changes,
                ),
            )
        self._flushes = self._changes = 0
        self._told, self._error = now, said
        return slot

    def guard(
        self, name: TableName, slot: SlotState, limit: int, policy: str, let_go: Callable[[], None] = lambda: None
    ) -> bool:
        """Look at the WAL that the slot keeps; whether the slot was given up because of it."""
        if slot.retained_bytes <= limit:
            self._warned.discard("retained")
            return False
        about: dict[str, Any] = {"table": str(name), "retained_bytes": slot.retained_bytes, "limit_bytes": limit}
        if "retained" not in self._warned:
            log.warning("mirror.slot_retains", policy=policy, **about)
            self._warned.add("retained")
        if policy == "warn":
            return False
        let_go()
        with connect(self.site.dsn, autocommit=True, application="modak mirror") as conn:
            reach("pump.before_giving_up")
            if policy == "pause":
                # Before the slot goes: whoever finds none, and no reason for that, makes a new one.
                self.paused = (
                    f"The slot kept {slot.retained_bytes:,} bytes of WAL, more than {limit:,}, and was given up."
                )
                note_pause(conn, self.table_id, self.paused)
            evict(conn, self.slot)
            drop_slot(conn, self.slot)
            reach("pump.gave_up")
        log.error("mirror.slot_given_up", policy=policy, **about)
        if policy == "pause":
            self._told = -1e9
        return True


def remembered(health: MirrorHealth | None, policy: str) -> str | None:
    """Why a table is paused, as long as the policy says that it should be."""
    return health.paused if health is not None and policy == "pause" else None


def _flush_lsn(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    return read_lsn(row[0]) if row else 0
