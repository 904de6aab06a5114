"""Small housekeeping of the lake's metadata that belongs to every pass.

A pinned snapshot carries a tag so that no expiry, ours or foreign, takes it; when the last pin has lapsed the tag
goes. And a table lists no more snapshots than its policy allows (`snapshot_max_count`), because every metadata file
repeats all of them: where expiry is on, the oldest go, up to the first that a reader or an operation holds, and a tenth
of the limit at once. The files that only they reached are left to the thread of maintenance (`tidy.finish_expiries`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import LiteralString

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import TableRecord, TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import ModakError
from modak.core.ids import new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.core.underway import working
from modak.lake.changes import Change, ExpireSnapshots
from modak.lake.model import PIN_TAG, LakeTable, Prepared, Snapshot, pin_tag
from modak.tables.landing import Changes, land
from modak.tables.maintenance.plan import in_use
from modak.tables.maintenance.policy import of
from modak.tables.site import Site
from modak.tables.tidy import discard_operation, finish_operations, unless_done

log = structlog.get_logger()

# The lock first and alone: a pin that is not committed yet is not to be seen.
_QUIET: LiteralString = "SELECT pg_try_advisory_xact_lock(modak.pin_lock_key(%s))"
_UNPINNED: LiteralString = """
    SELECT NOT EXISTS (
        SELECT FROM modak.read_pins WHERE table_id = %s AND snapshot_id = ANY (%s) AND expires_at > clock_timestamp()
    )
"""
_READ_NOTHING = frozenset({"expire", "untag", "maintenance"})
"""Kinds of operation that read no older snapshot by themselves; the steps of a pass have operations of their own."""
_NOT_NOW = frozenset({"lake.nothing_changed", "catalog.requirement"})
"""A neighbour has just done it, or a reader is pinning: there is nothing to do, or it is done the next time."""


def release_tags(site: Site, writer: CatalogWriter, name: TableName) -> bool:
    """Remove the tags of snapshots that no pin needs any more; whether there were any."""
    state = site.reader.state(name)
    pinned = {pin.snapshot_id for pin in state.pins}
    lapsed = [op for op in state.unfinished if op.landed and op.cleanup.get("tagged")]
    lapsed = [op for op in lapsed if not pinned & set(op.cleanup["tagged"])]
    if not lapsed:
        return False
    try:
        # No change of its own: every commit drops the tags that have become stale.
        commit_aside(site, writer, state, "untag", lambda _lake, _state: ())
    except ModakError as error:
        if error.code != "lake.nothing_changed":
            raise
    lake = site.lake.load(state.table.lake)
    tags = set[str]() if lake is None else set(lake.tags)
    # A reader may just be pinning one of them, or have pinned it meanwhile: that one is looked at again.
    released = [op for op in lapsed if not any(pin_tag(kept) in tags for kept in op.cleanup["tagged"])]
    if not released:
        return False
    for op in released:
        with unless_done():
            Journal(writer).note(op.op_id, cleanup={"tagged": []})
    finish_operations(site, writer, site.reader.state(name))
    return True


def trim_snapshots(site: Site, writer: CatalogWriter, name: TableName) -> int:
    """Expire the oldest snapshots of a table that is beyond its limit; returns how many went."""
    state = site.reader.state(name)
    limits = _limits(site, state)
    lake = site.lake.load(state.table.lake)
    if limits is None or lake is None or lake.snapshot_count <= limits[1]:
        return 0
    # One by one they would cost a comparison of all files each.
    limit = limits[0]
    going = _surplus(site, lake, state, limit)
    if not going:
        return 0

    def changes(now: LakeTable, current: TableState) -> Sequence[Change]:
        nonlocal going
        going = _surplus(site, now, current, limit)
        return [ExpireSnapshots(going)]

    def require(tx: CommitTransaction) -> None:
        require_unpinned(tx, state.table, going)

    try:
        commit_aside(site, writer, state, "expire", changes, require)
    except ModakError as error:
        if error.code not in _NOT_NOW:
            raise
        return 0
    log.info("lake.snapshots_expired", table=str(name), snapshots=len(going))
    return len(going)


def _limits(site: Site, state: TableState) -> tuple[int, int] | None:
    """How many snapshots are left when there are too many, and how many may be listed; None: nothing expires."""
    try:
        policy = of(site, state.table)
    except ModakError as error:
        # A value that was written by hand: maintenance and health say so, and the flows go on.
        log.debug("lake.policy_unreadable", table=str(state.table.name), because=error.message)
        return None
    if not (policy["maintenance_enabled"] and policy["snapshot_expiry_enabled"]):
        return None
    most, least = int(policy["snapshot_max_count"]), int(policy["snapshot_min_retained"])
    return max(most - most // 10, least), max(most, least)


def _surplus(site: Site, lake: LakeTable, state: TableState, limit: int) -> tuple[int, ...]:
    if any(pin.snapshot_id is None for pin in state.pins):
        # Pinned while the lake was still empty: that reader may look at any snapshot.
        return ()
    listed = site.lake.snapshots(lake)
    held = _pinned(state) | _read(state) | in_use(listed, _in_flight_since(state))
    return surplus(listed, limit, kept_snapshots(lake, state), held)


def surplus(
    snapshots: Sequence[Snapshot], limit: int, kept: Collection[int], held: Collection[int] = ()
) -> tuple[int, ...]:
    """The oldest snapshots that must go so that at most `limit` remain: none that is kept, none from a held one on."""
    ordered = sorted(snapshots, key=lambda each: each.sequence_number)
    before = takewhile(lambda each: each.id not in held, ordered)
    free = [each.id for each in before if each.id not in kept]
    return tuple(free[: max(len(snapshots) - limit, 0)])


def _in_flight_since(state: TableState) -> int | None:
    """When the oldest operation began (milliseconds) that may read snapshots: any that was current since."""
    reading = [op.started_at for op in state.unfinished if not op.landed and op.kind not in _READ_NOTHING]
    return round(min(reading).timestamp() * 1000) if reading else None


def _pinned(state: TableState) -> set[int]:
    return {pin.snapshot_id for pin in state.pins if pin.snapshot_id is not None}


def _read(state: TableState) -> set[int]:
    """The bases of operations in flight."""
    return {int(op.plan["base"]) for op in state.unfinished if not op.landed and op.plan.get("base") is not None}


def kept_snapshots(lake: LakeTable, state: TableState) -> set[int]:
    """Snapshots that must stay: published, current, pinned, those that a tag or branch names, bases of operations."""
    pinned = _pinned(state)
    current = {s for s in (lake.snapshot_id, state.cutline.snapshot_id) if s is not None}
    # Every commit drops the tags of pins that are gone, and what they kept may go with it.
    named = {kept for ref, kept in lake.refs.items() if not ref.startswith(PIN_TAG) or kept in pinned}
    return pinned | current | _read(state) | named


def require_unpinned(tx: CommitTransaction, table: TableRecord, going: Collection[int]) -> None:
    """Stop while a reader is pinning, or when one has pinned a snapshot that is to go."""
    tx.require(f"A reader is just pinning {table.name}.", _QUIET, (table.table_id,))
    tx.require(f"A reader has pinned a snapshot of {table.name}.", _UNPINNED, (table.table_id, list(going)))


def commit_aside(
    site: Site,
    writer: CatalogWriter,
    state: TableState,
    kind: str,
    changes: Changes,
    require: Callable[[CommitTransaction], None] = lambda _: None,
) -> None:
    """A commit that moves nothing but S and its pointer."""
    op_id = new_op_id(site.clock)
    Journal(writer).begin(op_id, state.table.table_id, kind, {})

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        require(tx)
        becomes = replace(now.cutline, metadata_location=prepared.new_location, snapshot_id=prepared.snapshot_id)
        tx.move(now.cutline, becomes)

    with working(op_id):
        try:
            land(site, writer, state.table.name, op_id, OpPhase.PLANNED, changes, within, kind)
        except ModakError as error:
            op = site.reader.op(op_id)
            if op is not None and not Journal(writer).landed(op_id):
                discard_operation(site, state.table.location, op)
                if error.code in _NOT_NOW:
                    Journal(writer).abandon(op_id, op.phase)
                else:
                    Journal(writer).fail(op_id, op.phase, error)
            raise
