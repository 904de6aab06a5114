"""The pump of one mirrored table: read what has committed, fold, write, commit, confirm; turn after turn.

Exactly once: F moves in the transaction that makes the rows visible, changes before F are passed over, and the server
is told only afterwards. While there is more to read than one batch, a batch lands in a thread beside the reading of the
next (`lander.py`). After any error nothing is remembered: the next turn reads again from F. Memory is bounded by what
may wait (`plan.py`, `buffer.py`) and one piece of the stream.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa
import structlog

from modak.catalog.lease import Epoch
from modak.catalog.mirrors import complete_until, follow_name
from modak.catalog.records import TableRecord, TableState
from modak.core import underway
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres.changes.batch import Changes, Piece
from modak.postgres.changes.lsn import read_lsn
from modak.postgres.changes.peek import Feed
from modak.postgres.changes.slot import evict
from modak.postgres.changes.source import ChangeSource, Limits
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.tables.mirror.identity import ensure_identity
from modak.tables.mirror.names import publication_name, slot_name
from modak.tables.mirror.pump.buffer import Buffer
from modak.tables.mirror.pump.columns import Columns, identity_of, name_of
from modak.tables.mirror.pump.commit import DEFINITION, move_frontier
from modak.tables.mirror.pump.events import events_of
from modak.tables.mirror.pump.evolve import RECOPY, known_columns
from modak.tables.mirror.pump.flush import Flusher
from modak.tables.mirror.pump.lander import Lander, Landing
from modak.tables.mirror.pump.plan import Pace
from modak.tables.mirror.reanchor import healing_trouble, history_trouble, reanchor, trouble_of
from modak.tables.mirror.replication import look_at_slot, marks_of
from modak.tables.mirror.unfit import Unfit
from modak.tables.site import Site

log = structlog.get_logger()

LONGEST_READ = 3600.0
IDLE_SECONDS = 10.0
"""How often an idle table's frontier follows the WAL of others."""
BATCH_BYTES = 4 << 20
PEEK_MESSAGES = 1_000_000
_ANEW = frozenset(
    {
        "slot.lost",
        "changes.publication_lost",
        "mirror.no_identity",
        "mirror.unchanged_values",
        "mirror.definition",
        # Of a column that was changed back since the change stream still brings the other type.
        "evolve.type_changed",
    }
)
"""What only a comparison of heap and lake can heal."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did."""

    changes: int = 0
    flushes: int = 0
    seconds: float = 0.0
    reanchored: bool = False
    waits_for: str | None = None
    """Why nothing was read."""


class Pump:
    """Follows one table in the name of a leader's epoch. Use it from one thread; close it in the end."""

    def __init__(self, site: Site, epoch: Epoch, table_id: int) -> None:
        self._site = site
        self._epoch = epoch
        self._writer = site.writer(epoch)
        self.table_id = table_id
        self.slot = slot_name(table_id, site.dsn.dbname)
        self._home = home = site.settings.home.path / "mirror" / self.slot
        chosen = site.settings.mirror
        self.pace = Pace(chosen.batch, chosen.flush_millis / 1000)
        self._buffer, self._other = Buffer(home / "batch"), Buffer(home / "other")
        self._lander = Lander(f"modak-landing-{table_id}")
        self._flusher = Flusher(site, self._writer, home / "keys")
        self._source = ChangeSource(
            Feed(site.dsn, self.slot, (publication_name(table_id),)),
            home / "spool",
            Limits(batch_bytes=BATCH_BYTES, peek_messages=PEEK_MESSAGES),
        )
        self._columns: Columns | None = None
        self._frontier = 0
        self._landed = 0
        """The end of what has landed in this turn and is not confirmed yet."""
        self._open_rows = 0
        self._last_commit = site.clock.monotonic()
        self._idle_since = site.clock.monotonic()
        self._looked_after: float | None = None
        self._confirmed = 0
        """Where the slot stood when it was last looked at."""
        self._unfit = Unfit(site)
        with site.connect(autocommit=True) as conn:
            self.complete_at = complete_until(conn, table_id) or site.clock.now()
        """When the lake last had everything that had committed by then, also if that was another worker's doing."""

    def close(self) -> None:
        """Let go of the slot and of what was read; what is kept on the local disk goes with a table that is gone."""
        try:
            self._forget()
            self._lander.close()
            if self.record() is None:
                shutil.rmtree(self._home, ignore_errors=True)
        except ModakError as error:
            # A server that is away ends our session by itself.
            log.info("mirror.not_closed", slot=self.slot, because=error.code)

    def __enter__(self) -> Pump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(self) -> TableRecord | None:
        """The table, if it is still registered and mirrored."""
        found = next((each for each in self._site.reader.tables() if each.table_id == self.table_id), None)
        return found if found is not None and found.mode == "mirrored" else None

    def turn(self, stopped: Callable[[], bool] = lambda: False) -> Turn:
        """Bring everything that has committed by now into the lake."""
        started, now = self._site.clock.monotonic(), self._site.clock.now()
        try:
            done = self._turn(stopped)
        except psycopg.Error as error:
            self._forget()
            raise translate(error) from error
        except ModakError as error:
            self._forget()
            if error.code == "slot.held":
                return self._evicted(error)
            record = self.record()
            if record is None or not (error.code in _ANEW or self._unfit.is_corrected(record, error)):
                raise
            return self._anew(record, error.message)
        except BaseException:
            self._forget()
            raise
        if done.waits_for is None and not stopped():
            self.complete_at = now
        return replace(done, seconds=self._site.clock.monotonic() - started)

    def _turn(self, stopped: Callable[[], bool]) -> Turn:
        record = self.record()
        if record is None:
            return Turn(waits_for="not mirrored")
        line = self._site.reader.cutline(self.table_id)
        if line is None or line.frontier is None:
            return Turn(waits_for="copying")
        heap: PgTable | None = None
        if self._is_due():
            record, heap = self._look_after(record)
            trouble = history_trouble(self._site, line) or line.lake_props.get(RECOPY)
            if trouble:
                return self._anew(record, str(trouble))
            self._looked_after = self._site.clock.monotonic()
        state = self._site.reader.state(record.name)
        if state.table.frozen is not None:
            raise Refused("lake.frozen", f"Publication is frozen by a foreign snapshot: {state.table.frozen}.")
        trouble = state.cutline.lake_props.get(RECOPY) or healing_trouble(self._site, record, state.cutline)
        if trouble:
            return self._anew(record, str(trouble))
        return self._read(state, stopped, heap)

    def _read(self, state: TableState, stopped: Callable[[], bool], heap: PgTable | None = None) -> Turn:
        """Read and land what has committed; `heap` is the table as it was right before, where somebody looked."""
        assert state.cutline.frontier is not None
        after = read_lsn(state.cutline.frontier)
        if self._columns is None:
            self._columns = Columns(self._site, state.table, self._before(state))
        self._columns.restart()
        self._frontier, self._landed, self._open_rows, flushes, changes, unfinished = 0, 0, 0, 0, 0, False
        for piece in self._pieces(state, after):
            open_part = self._take(state, piece)
            unfinished = piece.unfinished
            changes += piece.rows
            # With a piece that ends a transaction, everything that waits is complete.
            if open_part is not None and piece.frontier is not None and self._is_full():
                state = self._land_beside(state)
                flushes += 1
            self._keep(open_part or [])
            if stopped():
                # What is complete lands; the rest is read again by whoever comes next.
                break
        state = self._settled(state)
        if unfinished:
            self._confirm(self._landed)
            self._forget()
            return Turn(changes, flushes)
        # What was given is all there was before this position.
        self._frontier = max(self._frontier, self._source.safe_lsn)
        if not self._buffer.empty:
            self._note(self._land(state, self._buffer, self._columns, self._frontier))
            self._confirm(self._landed)
            flushes += 1
        elif self._landed:
            self._confirm(self._landed)
        elif self._confirmed < self._frontier <= after:
            # Landed before a crash and not confirmed: a peek that ends here would give the same for ever.
            self._confirm(self._frontier)
        elif heap is not None and not (changes or flushes or stopped()) and self._follow_columns(state, heap):
            flushes += 1
        else:
            self._idle(state, after)
        return Turn(changes, flushes)

    def _pieces(self, state: TableState, after: int) -> Iterator[Piece]:
        """What the slot gives, once it is sure that it begins at F.

        Only what is asked after the server has begun tells: a slot that somebody has made anew begins later, and says
        nothing of it.
        """
        pieces = self._source.read(after, LONGEST_READ, marks_of(state.cutline))
        first = next(pieces, None)
        self._require_slot(state)
        if first is not None:
            yield first
            yield from pieces

    def _require_slot(self, state: TableState) -> None:
        slot = look_at_slot(self._site, state.table)
        trouble = trouble_of(slot, state.cutline.frontier)
        if trouble is not None:
            raise Refused("slot.lost", f"{state.table.name}: {trouble}.", hint="Anchor the table anew.")
        self._confirmed = (slot and slot.confirmed_lsn) or 0

    def _follow_columns(self, state: TableState, heap: PgTable) -> bool:
        """Columns that changed without a row after them: nothing lies between F and what was read, so they hold now."""
        if not self._flusher.follow(state, heap):
            return False
        state = self._site.reader.state(state.table.name)
        move_frontier(self._writer, state.cutline, self._frontier, {each.attnum: each.name for each in heap.columns})
        self._columns = None
        self._confirm(self._frontier)
        return True

    def _before(self, state: TableState) -> dict[int, str]:
        kept = state.cutline.lake_props.get(DEFINITION)
        if kept and kept["at"] == state.cutline.frontier:
            return {int(number): name for number, name in kept["columns"].items()}
        return known_columns(self._flusher.lake(state), state.table.relid)

    def _take(self, state: TableState, piece: Piece) -> list[tuple[pa.Table, int]] | None:
        """Take what is complete in a piece into the buffer; the events of a transaction that still goes on come back.

        Nothing comes back, and all is taken, where the two cannot be told apart: the table changed in that transaction.
        """
        assert self._columns is not None
        self._frontier = max(self._frontier, piece.frontier or 0)
        record, heal = state.table, state.cutline.heal_until
        definition, whole = self._columns.seen, True
        open_part: list[tuple[pa.Table, int]] = []
        self._open_rows = self._open_rows if piece.frontier is None else 0
        for item in piece.items:
            if isinstance(item, Changes):
                if item.relation.oid != record.relid or not len(item):
                    continue
                xid = item.header["xid"][0].as_py()
                seen, shown = self._columns.at(item.relation, item.version, xid)
                whole, definition = whole and (definition is None or seen is definition), seen
                self._buffer.shown |= shown
                # A streamed transaction knows its end before all of it has been read.
                count = 0 if piece.frontier is None else len(item) - item.header["end_lsn"].null_count
                self._open_rows += len(item) - count
                events, ended = events_of(item, seen.shape, 0 if heal is None else read_lsn(heal), count)
                if not whole:
                    open_part = self._keep(open_part)
                    ended, count = len(events), len(item)
                if count:
                    self._buffer.add(events.slice(0, ended), count, self._room())
                if count < len(item):
                    open_part.append((events.slice(ended), len(item) - count))
            elif any(relation.oid == record.relid for relation in item.relations):
                open_part, whole = [], False
                self._truncated(record)
        return open_part if whole else None

    def _keep(self, parts: list[tuple[pa.Table, int]]) -> list[tuple[pa.Table, int]]:
        for events, count in parts:
            self._buffer.add(events, count, self._room())
        return []

    def _room(self) -> int:
        """Rows that may wait in memory: many small transactions, or so much of one that is not complete."""
        most = self._site.settings.mirror.max_buffered_rows
        return most if self._open_rows > most else max(most, self.pace.most_waiting)

    def _truncated(self, record: TableRecord) -> None:
        if record.heap_retention is not None:
            raise Refused(
                "mirror.truncated",
                f"{record.name} was truncated, but its lake holds rows that the heap has retired.",
                hint="TRUNCATE is not followed under heap retention: delete the rows instead, or unregister the table.",
            )
        self._buffer.truncate()

    def _is_full(self) -> bool:
        waiting = self._buffer.changes
        if self._buffer.is_large:
            return True
        if self._lander.busy:
            # Half, so that both batches together are no more than may wait.
            return waiting >= self.pace.most_waiting // 2
        return self.pace.is_full(waiting, self._site.clock.monotonic() - self._last_commit)

    def _land_beside(self, state: TableState) -> TableState:
        """Hand what waits to the thread, as soon as that has landed the batch before; the state after that one."""
        assert self._columns is not None
        state = self._settled(state)
        batch, self._buffer = self._buffer, self._other
        self._other = batch
        # As the table is here; the reading goes on.
        columns, frontier = copy(self._columns), self._frontier
        self._last_commit = self._site.clock.monotonic()
        self._lander.begin(lambda: self._land(state, batch, columns, frontier))
        return state

    def _settled(self, state: TableState) -> TableState:
        """Wait for the batch that lands, if there is one; the state afterwards."""
        landing = self._lander.finish()
        if landing is None:
            return state
        self._note(landing)
        if self._source.way == "stream":
            # A peek is confirmed once, at its end: the server reads all of its WAL again for that.
            self._confirm(self._landed)
        return landing.state

    def _land(self, state: TableState, batch: Buffer, columns: Columns, frontier: int) -> Landing:
        """Commit a batch that ends at a position; in either thread."""
        started = self._site.clock.monotonic()
        changes = batch.changes
        try:
            after = self._flusher.flush(state, batch, columns, frontier)
        finally:
            # Two threads land: what one has left to tidy, the other may.
            underway.let_go()
        batch.clear()
        seconds = self._site.clock.monotonic() - started
        log.info("mirror.flushed", table=str(state.table.name), changes=changes, seconds=round(seconds, 3))
        return Landing(after, frontier, seconds)

    def _note(self, landing: Landing) -> None:
        self._landed = landing.frontier
        self._idle_since = self._site.clock.monotonic()
        self._last_commit = max(self._last_commit, self._idle_since - landing.seconds)
        self.pace = replace(self.pace, commit_seconds=landing.seconds)

    def _idle(self, state: TableState, after: int) -> None:
        """Without changes of its own a table must not hold up WAL: its frontier follows that of others."""
        now = self._site.clock.monotonic()
        if self._frontier <= after or now - self._idle_since < IDLE_SECONDS:
            return
        columns = self._columns.before if self._columns is not None else {}
        move_frontier(self._writer, state.cutline, self._frontier, columns)
        self._confirm(self._frontier)
        self._flusher.tidy(state)
        self._idle_since = now

    def _confirm(self, lsn: int) -> None:
        reach("pump.before_confirm")
        self._source.confirm(lsn)
        reach("pump.confirmed")

    def _is_due(self) -> bool:
        pause = self._site.settings.tiering.cycle_interval_seconds
        return self._looked_after is None or self._site.clock.monotonic() - self._looked_after >= pause

    def _look_after(self, record: TableRecord) -> tuple[TableRecord, PgTable]:
        """What has to be looked at now and then: the table's name and key, and that Postgres writes whole old rows."""
        with self._site.connect(autocommit=True) as conn:
            record = self._as_named_now(conn, record)
            ensure_identity(conn, record, self._writer.hold)
            heap = describe(conn, record.name, record.tier_key)
        # The change stream does not announce another primary key: no column is another one.
        identity_of(record, heap)
        return record, heap

    def _as_named_now(self, conn: psycopg.Connection[Any], record: TableRecord) -> TableRecord:
        name = name_of(conn, record)
        return record if name == record.name else self._renamed(record, name)

    def _renamed(self, record: TableRecord, name: TableName) -> TableRecord:
        reach("pump.before_rename")
        with self._writer.step() as tx:
            follow_name(tx.conn, self.table_id, name)
        reach("pump.renamed")
        log.info("mirror.table_renamed", table=str(name), was=str(record.name))
        self._forget()
        return replace(record, name=name)

    def _evicted(self, error: ModakError) -> Turn:
        with self._site.connect(autocommit=True) as conn:
            pid = evict(conn, self.slot)
        log.warning("mirror.holder_evicted", slot=self.slot, pid=pid, because=error.message)
        return Turn(waits_for="evicted the holder of the slot")

    def _anew(self, record: TableRecord, why: str) -> Turn:
        log.warning("mirror.reanchoring", table=str(record.name), because=why)
        self._forget()
        with self._site.connect(autocommit=True) as conn:
            record = self._as_named_now(conn, record)
        reanchor(self._site, self._epoch, record)
        return Turn(reanchored=True)

    def _forget(self) -> None:
        self._lander.abandon()
        self._buffer.clear()
        self._other.clear()
        self._columns = None
        self._looked_after = None
        self._flusher.forget()
        self._source.reset()


def lag_seconds(site: Site, pump: Pump) -> float:
    """How long ago the lake had everything."""
    return max(0.0, (site.clock.now() - pump.complete_at).total_seconds())
