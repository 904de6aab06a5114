"""The way of every lake commit of a table: prepare, then the one transaction, again from the start when somebody was
faster.

The flows bring two functions: which changes to make to the lake table as it is now, and what else moves in the same
transaction. All that can collide is dealt with here: foreign commits, pins taken meanwhile, stale tags. The journal
names every folder before anything is written into it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import LakeColumns, TableRecord, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import OpId
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.changes import Change, RemoveTag
from modak.lake.model import PIN_TAG, PUBLISHED_TAG, LakeTable, Prepared, attempt_folder
from modak.storage.retry import pause
from modak.tables.columns import lake_columns_after
from modak.tables.foreign import refuse_foreign_rows
from modak.tables.site import Site
from modak.tables.tidy import discard_attempt

log = structlog.get_logger()

TRIES = 30
POLITE_TRIES = 3
"""After so many lost races (somebody compacts in a loop) the others wait for us while we prepare."""
_AGAIN = frozenset({"lake.pointer_moved", "lake.changed_underneath", "catalog.new_pin"})
_LINES = "catalog.cutline_moved"
_NEW_PIN = "catalog.new_pin"
_BROKEN = "lake.storage"
_LOST = "catalog.commit_lost"
"""The connection broke, and the journal says that nothing has landed."""
BROKEN_TRIES = 5
"""How often a commit is prepared anew because the store, or the connection to Postgres, has failed."""


Changes = Callable[[LakeTable, TableState], Sequence[Change]]
"""What a flow wants to change in the lake table as it is now."""
Begin = Callable[[OpId], AbstractContextManager[CommitTransaction]]
"""How a flow wants its transaction to begin, at the first attempt."""


@dataclass(frozen=True, slots=True)
class Landed:
    """A commit that is visible."""

    op_id: OpId
    prepared: Prepared


def land(
    site: Site,
    writer: CatalogWriter,
    name: TableName,
    op_id: OpId,
    phase: OpPhase,
    changes: Changes,
    within: Callable[[CommitTransaction, Prepared, TableState], None],
    kind: str,
    begin: Begin | None = None,
) -> Landed:
    """Make one lake commit of an operation that is in `phase`; raises only when trying again cannot help."""
    journal = Journal(writer)
    someone_pins = False
    broken = 0
    for attempt in range(1, TRIES + 1):
        state = site.reader.state(name)
        record = state.table
        expires = False
        journal.phase(
            op_id,
            phase if attempt == 1 else OpPhase.PREPARED,
            OpPhase.PREPARED,
            attempt=attempt,
            folders=[attempt_folder(record.location, op_id, attempt)],
        )
        try:
            with _turn(writer, op_id, record, attempt, begin) as tx:
                prepared, columns, untagged = _prepare(site, writer, state, op_id, attempt, changes, kind, someone_pins)
                expires = prepared.expired_from is not None
                tx.require_not_frozen(record.table_id)
                tx.require_key_labels(record.table_id)
                tx.publish(prepared)
                tx.note_columns(record.table_id, columns)
                tx.require_no_new_pins(record.table_id, untagged)
                within(tx, prepared, state)
                tx.tidy_later(
                    attempt=attempt,
                    metadata=prepared.new_location,
                    snapshot=prepared.snapshot_id,
                    obsolete=list(prepared.obsolete),
                    tagged=sorted(prepared.new_tags),
                    expired_from=prepared.expired_from,
                )
            reach("landing.committed")
            return Landed(op_id, prepared)
        except Conflict as conflict:
            discard_attempt(site, record.location, op_id, attempt)
            if expires and conflict.code == _NEW_PIN:
                # With all tags kept, the snapshots that they name cannot go, and who is pinning may take his time.
                raise Conflict("catalog.requirement", f"A reader is just pinning {name}.") from conflict
            broken += conflict.code == _LOST
            again = conflict.code in _AGAIN or (conflict.code == _LINES and _have_moved(site, state))
            again = again or (conflict.code == _LOST and broken < BROKEN_TRIES)
            if not again or attempt == TRIES:
                raise
            someone_pins = someone_pins or conflict.code == _NEW_PIN
            log.info("lake.commit_again", table=str(name), op=op_id, attempt=attempt, because=conflict.code)
            site.clock.sleep(random.uniform(0.02, 0.1) * min(attempt, 10))  # noqa: S311
        except ModakError as error:
            broken += 1
            if error.code != _BROKEN or broken == BROKEN_TRIES:
                raise
            discard_attempt(site, record.location, op_id, attempt)
            log.warning("lake.commit_again", table=str(name), op=op_id, attempt=attempt, because=error.message)
            site.clock.sleep(pause(broken))
    raise AssertionError("unreachable")


def _have_moved(site: Site, state: TableState) -> bool:
    """Whether a neighbour came between our look at the lines and the commit; else it is the plan that is too old."""
    return site.reader.cutline(state.table.table_id) != state.cutline


def _turn(
    writer: CatalogWriter, op_id: OpId, record: TableRecord, attempt: int, begin: Begin | None
) -> AbstractContextManager[CommitTransaction]:
    if begin is not None and attempt == 1:
        return begin(op_id)
    return writer.transaction(op_id) if attempt <= POLITE_TRIES else writer.transaction_ahead(op_id, record.lake)


def _prepare(
    site: Site,
    writer: CatalogWriter,
    state: TableState,
    op_id: OpId,
    attempt: int,
    changes: Changes,
    kind: str,
    someone_pins: bool,
) -> tuple[Prepared, LakeColumns, set[int]]:
    lake = site.lake.load(state.table.lake)
    if lake is None:
        raise Refused(
            "lake.missing",
            f"The lake table {state.table.lake} is gone from the catalog.",
            hint="Somebody dropped it; modak.cutline.metadata_location tells what its row in"
            " modak_iceberg.iceberg_tables must point at.",
        )
    refuse_foreign_rows(site, writer, state.table, lake, state.cutline.snapshot_id)
    pinned = {pin.snapshot_id for pin in state.pins if pin.snapshot_id is not None}
    superseded = state.cutline.snapshot_id
    if someone_pins and superseded is not None:
        pinned.add(superseded)
    # Who is just pinning is not to be seen yet, and may be pinning any of these: then all tags stay for once.
    stale = {} if someone_pins else {t: s for t, s in lake.tags.items() if t.startswith(PIN_TAG) and s not in pinned}
    reach("landing.before_prepare")
    wanted = changes(lake, state)
    # A tag alone is no reason for a commit.
    tag = pinned & {superseded} if stale or wanted else set()
    prepared = site.lake.prepare(
        state.table.lake,
        op_id,
        attempt,
        # Tags first: a snapshot that nobody pins any more may expire in the same commit.
        [*map(RemoveTag, stale), *wanted],
        tag=tag,
        kind=kind,
        published=PUBLISHED_TAG,
    )
    if prepared.base_location != lake.metadata_location:
        # Prepared on a snapshot that nobody has looked at: it may have changed rows.
        raise Conflict("lake.changed_underneath", f"Somebody has committed to {state.table.lake} since we looked.")
    reach("landing.prepared")
    untagged = {s for s in (superseded, *stale.values()) if s is not None and s not in prepared.tagged}
    return prepared, lake_columns_after(lake, wanted, state.table.relid), untagged
