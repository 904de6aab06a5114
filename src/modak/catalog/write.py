"""The one place that moves state, and the one transaction that makes a lake commit visible.

A flow collects its changes in a `with` block; nothing is sent before the block ends. Then one short READ COMMITTED
transaction checks the leader's epoch and the journal row, swaps the lake pointer, moves cut-line, partitions, delta and
whatever else belongs to the step, and writes the journal: all or nothing. If the acknowledgement of its COMMIT is lost,
the journal row tells what happened (`outcome.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, LiteralString

import psycopg
import structlog
from psycopg.types.json import Jsonb

from modak.catalog import delta, expiry, labels, moves
from modak.catalog.lease import Epoch
from modak.catalog.outcome import settle
from modak.catalog.records import Cutline, DeltaRange, LakeColumns, NewPartition, TableConfig
from modak.catalog.steps import StepTransaction
from modak.core.axis import TierKey
from modak.core.clock import Clock, SystemClock
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId
from modak.core.states import OpPhase, PartitionState
from modak.lake.model import LakeName, Prepared
from modak.postgres.connect import connect, translate
from modak.postgres.dsn import Dsn

Conn = psycopg.Connection[Any]
Step = Callable[[Conn], None]

__all__ = ["CatalogWriter", "CommitTransaction", "Epoch", "explain"]

_LOG = structlog.get_logger()
_LIMITS: LiteralString = """
    SELECT set_config('lock_timeout', %(lock)s, true),
        set_config('idle_in_transaction_session_timeout', %(idle)s, true),
        set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), true)
"""
_ANNOUNCE: LiteralString = """
    UPDATE modak.op_log SET backend_pid = pg_backend_pid() WHERE op_id = %s AND phase = 'prepared'
    RETURNING backend_pid
"""
_COMMITTED: LiteralString = """
    UPDATE modak.op_log SET phase = 'committed', xact_id = pg_current_xact_id(), counters = counters || %(counters)s,
        cleanup = cleanup || %(cleanup)s, table_id = coalesce(%(table)s, table_id)
    WHERE op_id = %(op)s AND phase = 'prepared' AND backend_pid = pg_backend_pid()
"""


@dataclass
class CommitTransaction:
    """What one commit will do, collected in order; `counters` and `table_id` are filled when it has landed."""

    op_id: OpId
    counters: dict[str, int] = field(default_factory=dict)
    cleanup: dict[str, Any] = field(default_factory=dict)
    table_id: int | None = None
    steps: list[Step] = field(default_factory=list)
    retired: int | None = None
    """Delta tuples that this transaction has removed before its steps."""

    def publish(self, prepared: Prepared) -> None:
        """Make a prepared lake commit (or a new lake table) visible."""
        self.steps.append(lambda conn: moves.publish(conn, prepared))
        if prepared.snapshot_id != prepared.base_snapshot_id:
            # Its `snapshot` may be one that was there before.
            self.tidy_later(made=prepared.snapshot_id)

    def unpublish(self, name: LakeName, metadata_location: str) -> None:
        """Take a table out of the lake's catalog."""
        self.steps.append(lambda conn: moves.unpublish(conn, name, metadata_location))

    def advance(
        self, table_id: int, from_t: TierKey | None, to_t: TierKey, snapshot_id: int | None, metadata_location: str
    ) -> None:
        """Move T from the value read, with S and its pointer."""
        self.steps.append(
            lambda conn: moves.advance(
                conn, table_id, from_t, to_t, snapshot_id=snapshot_id, metadata_location=metadata_location
            )
        )

    def move(self, was: Cutline, becomes: Cutline) -> None:
        """Move any of T, S, F, R from exactly the lines read."""
        self.steps.append(lambda conn: moves.move_cutline(conn, was, becomes))

    def partitions(
        self, table_id: int, names: Collection[str], from_state: PartitionState, to_state: PartitionState
    ) -> None:
        """Take partitions one step, all or none."""
        self.steps.append(lambda conn: moves.step_partitions(conn, table_id, names, from_state, to_state))

    def retire_delta(self, table_id: int, rows: DeltaRange, pg_snapshot: str) -> None:
        """Take away the delta tuples of a range that were read under this snapshot; comes after the move of S."""

        def retire(conn: Conn) -> None:
            removed, kept = self.retired, 0
            if removed is None:
                removed, kept = delta.retire_delta(conn, table_id, rows, pg_snapshot)
            self.count(delta_removed=removed, delta_kept=kept)

        self.steps.append(retire)

    def retire_keys(self, table_id: int, keys: Sequence[tuple[str, TierKey]], pg_snapshot: str) -> None:
        """Take away the delta tuples of these keys that are older than a snapshot; comes after the move of S."""

        def retire(conn: Conn) -> None:
            removed, kept = delta.retire_keys(conn, table_id, keys, pg_snapshot)
            self.count(delta_removed=removed, delta_kept=kept)

        if keys:
            self.steps.append(retire)

    def rename_in_delta(self, table_id: int, relid: int, renamed: Mapping[str, str]) -> None:
        """Follow renamed columns in the images of the delta."""
        self.steps.append(lambda conn: self.count(images=delta.rename_in_delta(conn, table_id, relid, renamed)))

    def note_columns(self, table_id: int, columns: LakeColumns) -> None:
        """Write down the names that the lake has with this commit."""
        self.steps.append(lambda conn: moves.note_columns(conn, table_id, columns))

    def expire_delta(self, table_id: int, below: TierKey) -> None:
        """Remove every delta row below the retention line."""

        def expire(conn: Conn) -> None:
            self.count(delta_purged=expiry.expire_delta(conn, table_id, below))

        self.steps.append(expire)

    def require_no_pins(self, table_id: int) -> None:
        """Stop while anybody holds a pin; nobody can take one until this has landed."""
        self.steps.append(lambda conn: expiry.require_no_pins(conn, table_id))

    def require_no_new_pins(self, table_id: int, untagged: Collection[int]) -> None:
        """Stop when one of the snapshots that no tag keeps from now on was pinned meanwhile."""
        self.steps.append(lambda conn: moves.require_no_new_pins(conn, table_id, untagged))

    def require_not_frozen(self, table_id: int) -> None:
        """Stop when a foreign snapshot has frozen publication."""
        self.steps.append(lambda conn: moves.require_not_frozen(conn, table_id))

    def require_key_labels(self, table_id: int) -> None:
        """Stop when a label of an enum by which rows are known was renamed."""
        self.steps.append(lambda conn: labels.require_known(conn, table_id))

    def require(self, message: str, query: LiteralString, params: Sequence[Any] | Mapping[str, Any] = ()) -> None:
        """Stop with a conflict unless the query's first column is true."""

        def hold(conn: Conn) -> None:
            row = conn.execute(query, params).fetchone()
            if row is None or not row[0]:
                raise Conflict("catalog.requirement", message)

        self.steps.append(hold)

    def change(self, what: str, query: LiteralString, params: Sequence[Any] | Mapping[str, Any] = ()) -> None:
        """Run a statement of the caller's own room; one that changes no row is a conflict."""

        def run(conn: Conn) -> None:
            if conn.execute(query, params).rowcount < 1:
                raise Conflict("catalog.nothing_changed", f"{what}: somebody else was faster.")

        self.steps.append(run)

    def forget(self, query: LiteralString, params: Sequence[Any] | Mapping[str, Any] = ()) -> None:
        """Run a statement of the caller's own room that may find nothing to change."""

        def run(conn: Conn) -> None:
            conn.execute(query, params)

        self.steps.append(run)

    def freeze(self, table_id: int, foreign: Mapping[str, Any] | None) -> None:
        """Freeze publication because of a foreign snapshot, or (None) let it go on."""
        self.steps.append(lambda conn: moves.set_frozen(conn, table_id, foreign))

    def register(
        self,
        config: TableConfig,
        line: Cutline,
        partitions: Sequence[NewPartition] = (),
        columns: LakeColumns | None = None,
    ) -> None:
        """Write down a new table with its first lines, partitions and columns; the lines' own table_id is ignored."""

        def write_down(conn: Conn) -> None:
            self.table_id = moves.register(conn, config)
            moves.begin_cutline(conn, replace(line, table_id=self.table_id))
            moves.add_partitions(conn, self.table_id, partitions)
            if columns is not None:
                moves.note_columns(conn, self.table_id, columns)

        self.steps.append(write_down)

    def unregister(self, table_id: int) -> None:
        """Forget a table."""
        self.steps.append(lambda conn: moves.unregister(conn, table_id))

    def count(self, **counters: int) -> None:
        """Add to the counters that the journal keeps."""
        for name, value in counters.items():
            self.counters[name] = self.counters.get(name, 0) + value

    def tidy_later(self, **cleanup: Any) -> None:
        """Journal what is to be deleted once this has landed."""
        self.cleanup.update(cleanup)


class CatalogWriter:
    """Writes the catalog in the name of one epoch; without one (a command beside the daemon) no lease is checked."""

    def __init__(
        self,
        dsn: Dsn,
        epoch: Epoch | None = None,
        *,
        clock: Clock | None = None,
        lock_millis: int = 5000,
        idle_millis: int = 15_000,
        ahead_millis: int = 600_000,
        patience: float = 60.0,
    ) -> None:
        self.dsn = dsn
        self.epoch = epoch
        self._clock = clock or SystemClock()
        self._limits = {"lock": f"{lock_millis}ms", "idle": f"{idle_millis}ms", "ahead": f"{ahead_millis}ms"}
        self._patience = patience

    def hold(self, conn: Conn) -> None:
        """Stop unless the epoch still leads; until the transaction of the connection ends nobody else can take over.

        A process that falls asleep in that transaction loses it, or it would lead for as long as it sleeps.
        """
        if self.epoch is not None:
            conn.execute("SELECT set_config('idle_in_transaction_session_timeout', %(idle)s, true)", self._limits)
            moves.hold_epoch(conn, self.epoch)

    @contextmanager
    def transaction(self, op_id: OpId) -> Iterator[CommitTransaction]:
        """Collect the changes of a prepared operation; they happen together when the block ends."""
        tx = CommitTransaction(op_id)
        yield tx
        with connect(self.dsn, application="modak commit") as conn:
            self._announce(conn, op_id)
            self._commit(conn, tx)
        self._tell(tx)

    @contextmanager
    def transaction_ahead(self, op_id: OpId, name: LakeName) -> Iterator[CommitTransaction]:
        """The same, but other commits to the lake table wait from the start of the block, mostly for a second or so.

        A leader may take longer over the block than a transaction may rest otherwise: one that was ended for it would
        begin anew, and be ended again. If it falls asleep in it, the next leader ends it.
        """
        tx = CommitTransaction(op_id)
        with connect(self.dsn, application="modak commit") as conn:
            self._announce(conn, op_id)
            self._begin(conn)
            try:
                moves.hold_pointer(conn, name)
                if self.epoch is not None:
                    conn.execute(
                        "SELECT set_config('idle_in_transaction_session_timeout', %(ahead)s, true)", self._limits
                    )
            except psycopg.Error as error:
                raise explain(error) from error
            yield tx
            self._commit(conn, tx)
        self._tell(tx)

    @contextmanager
    def transaction_retiring(
        self, op_id: OpId, table_id: int, rows: DeltaRange, pg_snapshot: str
    ) -> Iterator[CommitTransaction]:
        """The same, but the delta tuples that `retire_delta` will name are removed while the block still runs.

        Who corrects one of these rows meanwhile waits until the end, so the block should take no longer than a second
        or two. If the removal cannot stay (a reader has come, the connection is gone), it happens in its turn.
        """
        tx = CommitTransaction(op_id)
        with connect(self.dsn, application="modak commit") as conn:
            self._announce(conn, op_id)
            self._begin(conn)
            with delta.Retiring(conn, table_id, rows, pg_snapshot) as retiring:
                yield tx
                tx.retired = retiring.removed()
            lost = conn.closed
            if not lost:
                self._commit(conn, tx)
        if lost:
            with connect(self.dsn, application="modak commit") as conn:
                self._announce(conn, op_id)
                self._commit(conn, tx)
        self._tell(tx)

    @contextmanager
    def step(self, lock_millis: int | None = None) -> Iterator[StepTransaction]:
        """A short transaction for a step without a lake commit; the epoch is held until its end."""
        with connect(self.dsn, application="modak step") as conn:
            try:
                conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
                conn.execute(_LIMITS, self._limits)
                if self.epoch is not None:
                    moves.hold_epoch(conn, self.epoch)
                if lock_millis is not None:
                    conn.execute("SELECT set_config('lock_timeout', %s, true)", (f"{lock_millis}ms",))
                yield StepTransaction(conn)
                reach("catalog.before_step")
                conn.commit()
            except psycopg.Error as error:
                raise explain(error) from error
        reach("catalog.after_step")

    def _commit(self, conn: Conn, tx: CommitTransaction) -> None:
        try:
            self._run(conn, tx)
            reach("catalog.before_commit")
            conn.commit()
        except psycopg.Error as error:
            if not _outcome_unknown(conn, error):
                raise explain(error) from error
            self._resolve(tx.op_id, error)

    def _tell(self, tx: CommitTransaction) -> None:
        reach("catalog.after_commit")
        _LOG.info("catalog.committed", op=tx.op_id, **tx.counters)

    def _announce(self, conn: Conn, op_id: OpId) -> None:
        """Tell the journal which backend commits, in a transaction before: a lost commit shows nothing of its own."""
        try:
            conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            conn.execute(_LIMITS, self._limits)
            row = conn.execute(_ANNOUNCE, (op_id,)).fetchone()
            conn.commit()
        except psycopg.Error as error:
            raise explain(error) from error
        if row is None:
            raise Conflict("journal.moved_on", f"Operation {op_id} is not prepared: somebody else has dealt with it.")

    def _begin(self, conn: Conn) -> None:
        """Begin a transaction that waits for nobody for long."""
        try:
            conn.execute(_LIMITS, self._limits)
        except psycopg.Error as error:
            raise explain(error) from error

    def _run(self, conn: Conn, tx: CommitTransaction) -> None:
        # The journal row first: until it is free, nobody can ask about the outcome.
        conn.execute(_LIMITS, self._limits)
        moves.hold_op(conn, tx.op_id, OpPhase.PREPARED)
        if self.epoch is not None:
            moves.hold_epoch(conn, self.epoch)
        for step in tx.steps:
            step(conn)
        written = conn.execute(
            _COMMITTED,
            {
                "op": tx.op_id,
                "counters": Jsonb(tx.counters),
                "cleanup": Jsonb(tx.cleanup),
                "table": tx.table_id,
            },
        ).rowcount
        if written != 1:
            # Only a pooler can change the backend between the announcement and here.
            raise Refused(
                "lease.pooler",
                f"Operation {tx.op_id} was announced by another backend.",
                hint="Point MODAK_PG_URL at Postgres itself, not at a transaction pooler.",
            )

    def _resolve(self, op_id: OpId, error: psycopg.Error) -> None:
        _LOG.warning("commit.acknowledgement_lost", op=op_id, error=translate(error).message)
        if not settle(self.dsn, op_id, patience=self._patience, clock=self._clock):
            raise Conflict(
                "catalog.commit_lost", f"The connection broke before operation {op_id} landed; nothing has changed."
            ) from error
        _LOG.info("commit.landed_unacknowledged", op=op_id)


def explain(error: psycopg.Error) -> ModakError:
    """The error of a statement against the catalog, our own SQLSTATEs included."""
    if (error.sqlstate or "").startswith("MDK"):
        said = error.diag.message_primary or str(error)
        return Refused("catalog.illegal_step", f"The catalog refuses: {said}.", hint=error.diag.message_hint or "")
    return translate(error)


def _outcome_unknown(conn: Conn, error: psycopg.Error) -> bool:
    if conn.closed or conn.broken or error.sqlstate is None:
        return True
    return error.sqlstate.startswith(("08", "57P"))
