"""The pumps of all mirrored tables, each in a thread of its own, for as long as this process leads.

A table that is slow or broken keeps nobody waiting but itself: it backs off and says in `status` what it met. Between
two turns its thread also does the other work of a mirrored table (leaves, heap retention, folding), so that nothing of
one table runs twice at a time. All of it stops when the lead ends, after the step that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from modak.catalog import operators
from modak.catalog.mirrors import read_health
from modak.core.errors import Conflict, ModakError, NotLeader
from modak.runtime import working
from modak.runtime.leader import Leader
from modak.tables.mirror.cycle import mirror_cycle
from modak.tables.mirror.pump.health import Teller, remembered
from modak.tables.mirror.pump.run import Pump, Turn, lag_seconds
from modak.tables.site import Site

log = structlog.get_logger()

LONGEST_BACKOFF_SECONDS = 60.0
PATIENT_TURNS = 10
"""So many races in a row may be lost before it counts as a failure."""
FATAL = frozenset({"spark.gateway_lost"})


@contextmanager
def serving(site: Site, leader: Leader) -> Iterator[None]:
    """Serve every mirrored table while the block runs; new ones are found as they are registered."""
    keeper = Keeper(site, leader)
    keeper.start()
    try:
        yield
    finally:
        keeper.stop()
    if keeper.fatal is not None:
        raise keeper.fatal


class Keeper:
    """Starts a thread for each mirrored table and looks for new ones."""

    def __init__(self, site: Site, leader: Leader) -> None:
        self._site = site
        self._leader = leader
        self._stop = threading.Event()
        self._tables: dict[int, TableThread] = {}
        self._thread = threading.Thread(target=self._loop, name="modak-mirrors", daemon=True)
        self.fatal: ModakError | None = None

    def start(self) -> None:
        """Begin to look for tables."""
        self._thread.start()

    def stop(self) -> None:
        """End all pumps and wait for them."""
        self._stop.set()
        self._thread.join(self._leader.patience())
        for table in list(self._tables.values()):
            table.join(self._leader.patience())

    def stopped(self) -> bool:
        """Whether no new step may begin."""
        return self._stop.is_set() or self._leader.ending

    def _loop(self) -> None:
        while not self.stopped():
            try:
                self._look()
            except ModakError as error:
                log.error("mirrors.failed", code=error.code, error=error.message, hint=error.hint)
            except Exception:
                log.exception("mirrors.crashed")
            self._stop.wait(self._site.settings.tiering.cycle_interval_seconds)

    def _look(self) -> None:
        here = {record.table_id: record for record in self._site.reader.tables() if record.mode == "mirrored"}
        for table_id in here.keys() - self._tables.keys():
            # The lake's catalog is opened here, once; threads would open it several times.
            try:
                self._site.lake.load(here[table_id].lake)
            except ModakError as error:
                # Its own thread will meet the same, and says so in `status`.
                log.warning("mirror.lake_away", table=str(here[table_id].name), because=error.message)
            self._tables[table_id] = TableThread(self._site, self._leader, table_id, self.stopped, self._end)
            self._tables[table_id].start()
        for table_id in [known for known, table in self._tables.items() if not table.is_alive()]:
            self._tables.pop(table_id).join()

    def _end(self, error: ModakError) -> None:
        """What one thread met ends the process: the daemon's loop ends with the lead, and `serving` says why."""
        self.fatal = error
        self._stop.set()
        self._leader.resign()


class TableThread(threading.Thread):
    """Follows one table until the lead ends or the table is no longer mirrored."""

    def __init__(
        self,
        site: Site,
        leader: Leader,
        table_id: int,
        stopped: Callable[[], bool],
        fatal: Callable[[ModakError], None],
    ) -> None:
        super().__init__(name=f"modak-mirror-{table_id}", daemon=True)
        self._site = site
        self._leader = leader
        self._table_id = table_id
        self._stopped = stopped
        self._fatal = fatal
        self._failures = 0
        self._lost = 0
        self._cycled = self._looked = -1e9
        self._held_back = False
        self._table = str(table_id)

    def run(self) -> None:
        """Turn after turn."""
        with Pump(self._site, self._leader.epoch, self._table_id) as pump:
            teller = Teller(self._site, self._table_id, pump.slot)
            while not self._stopped() and (record := pump.record()) is not None:
                self._table = str(record.name)
                self._rest(self._step(pump, teller))
            working.well("mirror", self._table)

    def _step(self, pump: Pump, teller: Teller) -> float:
        """One turn; how long to wait before the next."""
        error: ModakError | None = None
        pause = 0.0
        try:
            if self._is_held_back() or self._is_paused(teller):
                pause = self._site.settings.tiering.cycle_interval_seconds
            else:
                with working.doing("mirror", self._table):
                    turn = pump.turn(self._stopped)
                    teller.flushed(turn.flushes, turn.changes)
                    self._cycle(pump, turn)
                working.well("mirror", self._table)
                self._failures = self._lost = 0
                pause = pump.pace.pause(turn.seconds, turn.changes)
        except NotLeader:
            return 0.5
        except Conflict as lost:
            # Maintenance or a fold moved the lines meanwhile: the next turn begins from what is there now.
            self._lost += 1
            if self._lost < PATIENT_TURNS:
                log.info("mirror.again", table_id=self._table_id, because=lost.code)
                return 0.1
            error, pause = lost, self._failed(lost)
        except ModakError as trouble:
            if trouble.code in FATAL:
                self._fatal(trouble)
                return 0.0
            error, pause = trouble, self._failed(trouble)
        except Exception as crash:
            log.exception("mirror.crashed", table_id=self._table_id)
            error = ModakError("mirror.crashed", f"{type(crash).__name__}: {crash}", retryable=True)
            pause = self._failed(error)
        self._tell(pump, teller, error)
        return pause

    def _is_held_back(self) -> bool:
        """Whether an operator has paused the table; what was read before stays in the WAL."""
        now = self._site.clock.monotonic()
        if now - self._looked >= self._site.settings.tiering.cycle_interval_seconds:
            with self._site.connect(autocommit=True) as conn:
                self._held_back = self._table_id in operators.pauses(conn)
            self._looked = now
        return self._held_back

    def _is_paused(self, teller: Teller) -> bool:
        policy = self._site.settings.mirror.slot_policy
        if policy != "pause":
            teller.paused = None
        elif teller.paused is None:
            with self._site.connect(autocommit=True) as conn:
                teller.paused = remembered(read_health(conn).get(self._table_id), policy)
        return teller.paused is not None

    def _cycle(self, pump: Pump, turn: Turn) -> None:
        now = self._site.clock.monotonic()
        record = pump.record()
        if record is None or turn.waits_for == "copying":
            return
        if now - self._cycled >= self._site.settings.tiering.cycle_interval_seconds:
            self._cycled = now
            mirror_cycle(self._site, self._leader.epoch, record.name)

    def _failed(self, error: ModakError) -> float:
        base = self._site.settings.tiering.cycle_interval_seconds
        pause = min(base * 2.0 ** min(self._failures, 20), LONGEST_BACKOFF_SECONDS)
        self._failures += 1
        working.failed("mirror", self._table, error, pause)
        log.error(
            "mirror.failed",
            table_id=self._table_id,
            code=error.code,
            error=error.message,
            hint=error.hint,
            again_in_seconds=round(pause, 1),
        )
        return pause

    def _tell(self, pump: Pump, teller: Teller, error: ModakError | None) -> None:
        try:
            line = self._site.reader.cutline(self._table_id)
            record = pump.record()
            if line is None or line.frontier is None or record is None:
                return
            slot = teller.tell(line.frontier, lag_seconds(self._site, pump), error)
            chosen = self._site.settings.mirror
            if slot is not None and not slot.lost:
                teller.guard(record.name, slot, chosen.slot_warn_bytes, chosen.slot_policy, pump.close)
        except ModakError as trouble:
            log.warning("mirror.untold", table_id=self._table_id, because=trouble.code)

    def _rest(self, seconds: float) -> None:
        deadline = self._site.clock.monotonic() + seconds
        while not self._stopped():
            left = deadline - self._site.clock.monotonic()
            if left <= 0:
                return
            self._site.clock.sleep(min(left, 0.1))
