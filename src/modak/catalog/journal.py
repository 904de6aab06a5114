"""The journal: which operations are under way, and which folders they may have written into.

A flow writes its intent before any effect, names every folder before writing into it, and ends each operation. Phase
`COMMITTED` is written by the one transaction only (`write.py`); the next start finishes or abandons what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, LiteralString

from psycopg.types.json import Jsonb

from modak.catalog.outcome import settle
from modak.catalog.write import CatalogWriter
from modak.core import underway
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.core.ids import OpId
from modak.core.states import OP_STEPS, OpPhase

_ENDS = frozenset({OpPhase.DONE, OpPhase.FAILED, OpPhase.ABANDONED})
_BEGIN: LiteralString = """
    INSERT INTO modak.op_log (op_id, table_id, kind, plan, folders, epoch) VALUES (%s, %s, %s, %s, %s, %s)
"""
_STEP: LiteralString = """
    UPDATE modak.op_log SET phase = %(to)s, error = coalesce(%(error)s, error),
        attempt = coalesce(%(attempt)s, attempt), folders = folders || %(folders)s,
        counters = counters || %(counters)s, cleanup = cleanup || %(cleanup)s
    WHERE op_id = %(op)s AND phase = %(from)s
"""
_NOTE: LiteralString = """
    UPDATE modak.op_log SET attempt = coalesce(%(attempt)s, attempt), folders = folders || %(folders)s,
        counters = counters || %(counters)s, cleanup = cleanup || %(cleanup)s
    WHERE op_id = %(op)s AND phase NOT IN ('done', 'abandoned', 'failed')
"""


class Journal:
    """Writes `modak.op_log` in the name of the writer's epoch."""

    def __init__(self, writer: CatalogWriter) -> None:
        self._writer = writer

    def begin(
        self, op_id: OpId, table_id: int | None, kind: str, plan: Mapping[str, Any], folders: Sequence[str] = ()
    ) -> None:
        """Write down an intent."""
        reach("journal.before_begin")
        underway.begun(op_id)
        epoch = self._writer.epoch
        with self._writer.step() as tx:
            tx.conn.execute(
                _BEGIN, (op_id, table_id, kind, Jsonb(dict(plan)), list(folders), epoch.number if epoch else None)
            )
        reach("journal.after_begin")

    def phase(
        self,
        op_id: OpId,
        from_phase: OpPhase,
        to_phase: OpPhase,
        *,
        attempt: int | None = None,
        folders: Sequence[str] = (),
        counters: Mapping[str, Any] | None = None,
        cleanup: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> None:
        """Take an operation from the phase it is believed to be in to the next one."""
        if to_phase is OpPhase.COMMITTED or to_phase not in OP_STEPS[from_phase]:
            raise ModakError("journal.illegal_step", f"Operation {op_id} cannot go from {from_phase} to {to_phase}.")
        reach("journal.before_phase")
        with self._writer.step() as tx:
            done = tx.conn.execute(
                _STEP,
                {
                    "op": op_id,
                    "from": from_phase,
                    "to": to_phase,
                    "error": error,
                    **_notes(attempt, folders, counters, cleanup),
                },
            ).rowcount
            if done != 1:
                raise Conflict("journal.moved_on", f"Operation {op_id} is no longer {from_phase}.")
        if to_phase in _ENDS:
            underway.ended(op_id)
        reach("journal.after_phase")

    def note(
        self,
        op_id: OpId,
        *,
        attempt: int | None = None,
        folders: Sequence[str] = (),
        counters: Mapping[str, Any] | None = None,
        cleanup: Mapping[str, Any] | None = None,
    ) -> None:
        """Add folders (before writing into them), counters or things to tidy, without a step."""
        reach("journal.before_note")
        with self._writer.step() as tx:
            if tx.conn.execute(_NOTE, {"op": op_id, **_notes(attempt, folders, counters, cleanup)}).rowcount != 1:
                raise Conflict("journal.moved_on", f"Operation {op_id} has ended or is unknown.")
        reach("journal.after_note")

    def finish(self, op_id: OpId, counters: Mapping[str, Any] | None = None) -> None:
        """Everything is tidied: the operation is done."""
        self.phase(op_id, OpPhase.COMMITTED, OpPhase.DONE, counters=counters)

    def fail(self, op_id: OpId, from_phase: OpPhase, error: ModakError) -> None:
        """Give an operation up because of an error, after its folders are gone."""
        self.phase(op_id, from_phase, OpPhase.FAILED, error=f"{error.code}: {error.message}")

    def abandon(self, op_id: OpId, from_phase: OpPhase) -> None:
        """Give up an operation that was cut off or has nothing to do, after its folders are gone."""
        self.phase(op_id, from_phase, OpPhase.ABANDONED)

    def landed(self, op_id: OpId) -> bool:
        """Whether an operation found unfinished has landed, asked under the lock of its journal row."""
        return settle(self._writer.dsn, op_id)


def _notes(
    attempt: int | None,
    folders: Sequence[str],
    counters: Mapping[str, Any] | None,
    cleanup: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "folders": list(folders),
        "counters": Jsonb(dict(counters or {})),
        "cleanup": Jsonb(dict(cleanup or {})),
    }
