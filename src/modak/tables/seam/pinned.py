"""One point in time over one or more tables: pins, then one exported snapshot, both kept until the readers are done.

The pins are committed first, so that no deleting pass can overtake them. Then one REPEATABLE READ transaction locks the
partitions that may be read (ACCESS SHARE, before its snapshot) and exports the snapshot under which every heap and
delta scan runs; partitions below T are not locked, so that they can go meanwhile. A pin names T, S, R and the
generation; together with any later snapshot of Postgres that is one consistent picture. A thread renews the pins and
keeps the transaction alive. When either is lost, the reads fail; they never return less.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import psycopg
import structlog

from modak.catalog import pins
from modak.catalog.delta import Rename
from modak.catalog.records import PartitionRecord, Pin, TableRecord, TableState
from modak.core.axis import TierKey
from modak.core.errors import ModakError, UsageError
from modak.core.names import TableName
from modak.postgres.connect import GUARDS, connect, session_sql, translate
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.postgres.snapshot import begin_snapshot
from modak.tables.evolve import waiting_renames
from modak.tables.seam.columns import Shape, shape_of
from modak.tables.seam.plan import Span, leaves_of
from modak.tables.seam.reader import Access, Reader, admit
from modak.tables.seam.streams import ended
from modak.tables.site import Site

log = structlog.get_logger()

LIFETIME_SECONDS = 60.0
"""How long a pin outlives its reader. Renewed at a third of it."""
LOCK_MILLIS = 10_000
LARGE_DELTA = 1_000_000
"""Counting the delta stops here: more than this is simply a lot."""

_DELTA_SIZE = """
SELECT count(*), coalesce(sum(pg_column_size(d.payload)), 0)::bigint FROM (
    SELECT payload FROM modak.delta
    WHERE table_id = %(table)s AND tier_key < %(t)s AND (%(r)s::bigint IS NULL OR tier_key >= %(r)s)
        AND (folded_generation IS NULL OR folded_generation > %(generation)s)
    LIMIT %(limit)s
) d
"""
_POINTER = "SELECT metadata_location FROM modak.cutline WHERE table_id = %s"
_DELTA = TableName("modak", "delta")
_open: WeakSet[Point] = WeakSet()


@dataclass(frozen=True, slots=True)
class DeltaSize:
    """How much lies over the pinned lake state."""

    rows: int
    bytes: int
    pages: int
    table_bytes: int


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A table at the point: its lines, and the heap as it was described under the snapshot."""

    record: TableRecord
    pin: Pin
    heap: PgTable
    shape: Shape
    delta: DeltaSize


class Point:
    """A point in time that several reads share. Close it, or it ends by itself after being idle."""

    snapshot: str
    """The exported snapshot's id, for the tasks."""

    def __init__(
        self,
        site: Site,
        names: Iterable[TableName],
        *,
        lifetime_seconds: float = LIFETIME_SECONDS,
        reader: Reader | None = None,
    ) -> None:
        if lifetime_seconds <= 0:
            raise UsageError("seam.lifetime", f"A pin cannot live for {lifetime_seconds} seconds.")
        self.site = site
        self.reader = reader or Reader(site.dsn)
        self.tables: dict[TableName, PinnedTable] = {}
        self._lifetime = lifetime_seconds
        self._pins: list[Pin] = []
        self._renames: dict[TableName, tuple[Rename, ...]] = {}
        self._conn: psycopg.Connection[Any] | None = None
        self._ended = threading.Event()
        self._lost: ModakError | None = None
        self._busy: Callable[[], bool] = lambda: True
        self._idle_seconds: float | None = None
        self._last_busy = 0.0
        self._on_close: Callable[[], None] = lambda: None
        # Whoever is told of the end may close in turn.
        self._closing = threading.RLock()
        self._take(tuple(dict.fromkeys(names)))
        self._keeper = threading.Thread(target=self._keep, name="modak-seam-pin", daemon=True)
        self._keeper.start()
        _open.add(self)

    @property
    def access(self) -> Access:
        """How the tasks enter Postgres; the snapshot and the pins are always the worker's."""
        return self.reader.access(self.snapshot)

    def end_when_idle(self, seconds: float, busy: Callable[[], bool], then: Callable[[], None]) -> None:
        """Close by itself once nothing was busy for so long."""
        self._busy, self._on_close = busy, then
        self._last_busy, self._idle_seconds = self.site.clock.monotonic(), seconds

    def table(self, name: TableName) -> PinnedTable:
        """One of the tables; raises when the point is not held any more."""
        self.check()
        found = self.tables.get(name)
        if found is None:
            known = ", ".join(map(str, self.tables))
            raise UsageError(
                "seam.not_pinned",
                f"{name} is not part of this snapshot.",
                hint=f"Name all tables when it begins; it holds: {known}.",
            )
        return found

    def renames(self, table: PinnedTable) -> tuple[Rename, ...]:
        """The renames of columns that the delta has not followed yet, as the point sees it."""
        self.check()
        assert self._conn is not None
        name = table.record.name
        if name not in self._renames:
            try:
                self._renames[name] = waiting_renames(self.site, self._conn, table.record, table.heap)
            except psycopg.Error as error:
                raise translate(error) from error
        return self._renames[name]

    def check(self) -> None:
        """Raise if the point has ended or was lost."""
        if self._lost is not None:
            raise self._lost
        if self._ended.is_set():
            raise ended()

    def close(self) -> None:
        """Release everything, and fail if the point did not hold until now."""
        with self._closing:
            if self._ended.is_set():
                return
            self._ended.set()
            held = self._lost is None and self._pulse()
            self._release_snapshot()
            kept = self._release_pins()
            self._on_close()
        if self._lost is not None:
            raise self._lost
        if not held or not kept:
            raise lost("its connection ended" if not held else "a pin lapsed")

    def abandon(self) -> None:
        """Release everything without asking whether it held: whoever read has failed already."""
        try:
            self.close()
        except ModakError as error:
            log.debug("seam.abandoned", because=error.code)

    def _take(self, names: Sequence[TableName]) -> None:
        try:
            states = [self.site.reader.state(name) for name in names]
            admit(self.reader, [state.table for state in states])
            for name in names:
                self._pins.append(pins.begin(self.site.dsn, name, self._lifetime))
            self._conn = connect(self.site.dsn, autocommit=True, application="modak read")
            self._begin(self._conn, list(zip(states, self._pins, strict=True)))
        except psycopg.Error as error:
            self._give_up()
            raise translate(error) from error
        except BaseException:
            self._give_up()
            raise

    def _begin(self, conn: psycopg.Connection[Any], tables: Sequence[tuple[TableState, Pin]]) -> None:
        limits = {"lock_timeout": f"{LOCK_MILLIS}ms", "statement_timeout": str(self.reader.statement_millis)}
        conn.execute(session_sql({**GUARDS, **limits}))
        cold = {part.leaf_oid for state, pin in tables for part in state.living() if _below(part, pin.t)}
        if not self._described(conn, tables, cold):
            # A partition is not where the catalog has it; then none is left out.
            conn.execute("ROLLBACK")
            self._described(conn, tables, set())

    def _described(
        self, conn: psycopg.Connection[Any], tables: Sequence[tuple[TableState, Pin]], spared: set[int]
    ) -> bool:
        """Take the snapshot and the shape of the tables under it; False if a spared partition would have to be read."""
        # The delta is locked too, because its rows are read by page.
        self.snapshot = begin_snapshot(conn, [state.table.name for state, _ in tables], _DELTA, spared=spared)
        for state, pin in tables:
            record = state.table
            heap = describe(conn, record.name, record.tier_key)
            if heap.oid != record.relid:
                raise ModakError("seam.table_replaced", f"{record.name} is not the table that was registered.")
            if any(leaf.oid in spared for leaf in leaves_of(heap.leaves, Span(pin.t, None))):
                return False
            table = PinnedTable(record, pin, heap, shape_of(record, heap), _delta_size(conn, pin))
            self.tables[record.name] = table
            if table.delta.rows and _moved(conn, pin):
                # The lake has gone on between pin and snapshot, and nobody keeps the metadata in between for us.
                self.renames(table)
        return True

    def _keep(self) -> None:
        waited = 0.0
        pause = min(self._lifetime / 3, 15.0)
        while not self._ended.wait(min(pause, 1.0)):
            if self._is_idle():
                self.abandon()
                return
            waited += min(pause, 1.0)
            if waited < pause:
                continue
            waited = 0.0
            if not self._pulse():
                self._lose("its connection ended")
            elif not self._renew():
                self._lose("a pin lapsed")
            else:
                continue
            return

    def _is_idle(self) -> bool:
        if self._idle_seconds is None:
            return False
        now = self.site.clock.monotonic()
        try:
            self._last_busy = now if self._busy() else self._last_busy
        except Exception:
            # A JVM that is gone runs no job.
            self._last_busy = self._last_busy or now
        return now - self._last_busy >= self._idle_seconds

    def _renew(self) -> bool:
        try:
            with connect(self.site.dsn, application="modak pin") as conn:
                renewed = [pins.renew(conn, pin.pin_id, self._lifetime) for pin in self._pins]
                return all(renewed)
        except (ModakError, psycopg.Error) as error:
            # Postgres may be away for a moment; whether that was too long the next renewal will tell.
            log.warning("seam.renewal_failed", because=getattr(error, "code", type(error).__name__))
            return True

    def _pulse(self) -> bool:
        try:
            if self._conn is None or self._conn.closed:
                return False
            self._conn.execute("SELECT 1")
        except psycopg.Error:
            return False
        return True

    def _lose(self, why: str) -> None:
        if not self._ended.is_set():
            log.warning("seam.lost", tables=[str(name) for name in self.tables], because=why)
            self._lost = lost(why)
            # The tasks join by the snapshot: without it they fail instead of reading a state that nobody protects.
            self._release_snapshot()

    def _release_snapshot(self) -> None:
        if self._conn is not None:
            self._conn.close()

    def _release_pins(self) -> bool:
        if not self._pins:
            return True
        try:
            with connect(self.site.dsn, application="modak pin") as conn:
                held = [pins.end(conn, pin.pin_id) for pin in self._pins]
                return all(held)
        except psycopg.Error as error:
            raise translate(error) from error

    def _give_up(self) -> None:
        self._ended.set()
        self._release_snapshot()
        try:
            self._release_pins()
        except ModakError as error:
            log.debug("seam.abandoned", because=error.code)


def lost(why: str) -> ModakError:
    """The failure of a read whose point in time was not protected to the end."""
    return ModakError(
        "seam.snapshot_lost",
        f"The snapshot of this read was lost: {why}.",
        hint="What was read may be incomplete; read again.",
        retryable=True,
    )


def _below(part: PartitionRecord, t: TierKey | None) -> bool:
    """Whether a partition lies below the cut-line, where rows are read from the lake."""
    return t is not None and part.upper is not None and part.upper <= t


def _moved(conn: psycopg.Connection[Any], pin: Pin) -> bool:
    here = conn.execute(_POINTER, (pin.table_id,)).fetchone()
    return here is not None and here[0] != pin.metadata_location


def _delta_size(conn: psycopg.Connection[Any], pin: Pin) -> DeltaSize:
    if pin.t is None:
        return DeltaSize(0, 0, 0, 0)
    row = conn.execute(
        _DELTA_SIZE,
        {
            "table": pin.table_id,
            "t": pin.t,
            "r": pin.retention_line,
            "generation": pin.generation,
            "limit": LARGE_DELTA + 1,
        },
    ).fetchone()
    place = conn.execute(
        "SELECT pg_relation_size('modak.delta') / current_setting('block_size')::int8, pg_table_size('modak.delta')"
    ).fetchone()
    assert row is not None
    assert place is not None
    return DeltaSize(row[0], row[1], place[0], place[1])


@atexit.register
def _close_all() -> None:
    for point in tuple(_open):
        point.abandon()
