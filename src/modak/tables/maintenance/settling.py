"""Before rows can be erased from the lake, whatever may still bring them there has to arrive; at the end, files go.

Rows are deleted from the heap first. What was written before that is then on its way in one of a few places: exports
and ingests under way, staged loads, corrections in the delta, changes that the pump has not read. A leader's own
threads bring all of it into the lake, and an erasure beside them waits; one that runs alone does it by itself. After
the last old snapshot has expired its files are still stored until somebody has compared and deleted them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import LiteralString

import structlog

from modak.catalog import operators
from modak.catalog.lease import Epoch
from modak.core.errors import ModakError, NotLeader
from modak.core.names import TableName
from modak.tables.fold.run import fold
from modak.tables.load.adopt import adopt
from modak.tables.maintenance import erasures
from modak.tables.repair import repair
from modak.tables.site import Site
from modak.tables.tidy import finish_expiries, finish_operations

log = structlog.get_logger()

PATIENCE_SECONDS = 900.0
POLL_SECONDS = 0.5
FREEING_SECONDS = 60.0
"""How long an erasure waits for the files of snapshots that have expired; a later look ends what takes longer."""
_LONGEST_PAUSE_SECONDS = 5.0

# An operation of maintenance moves rows that are in the lake already.
_UNDER_WAY: LiteralString = """
    SELECT kind FROM modak.op_log
    WHERE table_id = %(table)s AND phase IN ('planned', 'writing', 'prepared') AND started_at <= %(at)s
        AND kind NOT IN ('maintenance', 'erase', 'expire', 'orphans') AND kind NOT LIKE 'rewrite-%%'
    ORDER BY started_at LIMIT 1
"""
_STAGED: LiteralString = """
    SELECT FROM modak.load_labels WHERE table_id = %(table)s AND state = 'staged' AND created_at <= %(at)s LIMIT 1
"""
_CORRECTED: LiteralString = """
    SELECT FROM modak.delta d JOIN modak.cutline c USING (table_id)
    WHERE d.table_id = %(table)s AND d.folded_generation IS NULL AND d.updated_at <= %(at)s AND d.tier_key < c.t
    LIMIT 1
"""
_BEHIND: LiteralString = """
    SELECT FROM modak.cutline WHERE table_id = %(table)s AND frontier < %(lsn)s::pg_lsn
"""
_NOW: LiteralString = "SELECT clock_timestamp(), pg_current_wal_insert_lsn()::text"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, by the clock and by the WAL of Postgres."""

    at: datetime
    lsn: str


Settle = Callable[[Site, Epoch, TableName, Mark], None]
"""Sees to it that everything from before a mark is in the lake."""


def mark(site: Site) -> Mark:
    """Now."""
    with site.connect(autocommit=True) as conn:
        row = conn.execute(_NOW).fetchone()
    assert row is not None
    return Mark(*row)


def on_its_way(site: Site, name: TableName, since: Mark) -> str | None:
    """What from before a mark is not in the lake yet; None: everything is."""
    table_id = site.reader.state(name).table.table_id
    given = {"table": table_id, "at": since.at, "lsn": since.lsn}
    with site.connect(autocommit=True) as conn:
        if (row := conn.execute(_UNDER_WAY, given).fetchone()) is not None:
            return f"an operation ({row[0]}) under way"
        for what, query in (
            ("staged loads", _STAGED),
            ("corrections", _CORRECTED),
            ("changes of the mirror", _BEHIND),
        ):
            if conn.execute(query, given).fetchone() is not None:
                return what
    return None


def by_itself(site: Site, epoch: Epoch, name: TableName, since: Mark) -> None:
    """Nobody else works on the table: bring in what is on its way."""
    from modak.tables.mirror.cycle import mirror_cycle
    from modak.tables.mirror.pump.run import Pump

    repair(site, epoch)
    adopt(site, epoch, name)
    state = site.reader.state(name)
    mirrored = state.table.mode == "mirrored"
    if mirrored:
        with Pump(site, epoch, state.table.table_id) as pump:
            pump.turn()
        mirror_cycle(site, epoch, name)
    while not mirrored and (done := fold(site, epoch, name)).left and done.changed:
        continue
    left = on_its_way(site, name, since)
    # A turn of the pump has read everything, even where it has not moved the frontier of a still table.
    if left is not None and not (mirrored and left == "changes of the mirror"):
        raise _stuck(name, left)


def beside(stopping: Callable[[], bool]) -> Settle:
    """The leader's other threads bring it in: wait for them."""

    def settle(site: Site, epoch: Epoch, name: TableName, since: Mark) -> None:
        deadline = site.clock.monotonic() + PATIENCE_SECONDS
        while (left := on_its_way(site, name, since)) is not None:
            if stopping():
                raise NotLeader("lease.lost", "The lease is lost.", retryable=True)
            if site.clock.monotonic() > deadline or _is_paused(site, name):
                raise _stuck(name, left)
            site.clock.sleep(POLL_SECONDS)

    return settle


def until_freed(site: Site, epoch: Epoch, name: TableName, stopping: Callable[[], bool]) -> int:
    """Wait a while for the files of snapshots that have expired by now to be deleted; how many expiries have some left.

    What a neighbour is deleting is left to it, what was put off is tried again.
    """
    table_id = site.reader.state(name).table.table_id
    began, pause = site.clock.monotonic(), POLL_SECONDS
    left = {op.op_id for op in erasures.freeing(site, table_id)}
    while left and not stopping() and site.clock.monotonic() - began < FREEING_SECONDS:
        seconds = round(site.clock.monotonic() - began, 1)
        log.info("erase.freeing", table=str(name), expiries=len(left), seconds=seconds)
        state = site.reader.state(name)
        ours = tuple(op for op in state.unfinished if op.op_id in left)
        finish_operations(site, site.writer(epoch), replace(state, unfinished=ours))
        finish_expiries(site, site.writer(epoch), name)
        # One that comes after has nothing to do with the rows: a busy table always has some.
        left &= {op.op_id for op in erasures.freeing(site, table_id)}
        if left:
            site.clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            left &= {op.op_id for op in erasures.freeing(site, table_id)}
    return len(left)


def _is_paused(site: Site, name: TableName) -> bool:
    with site.connect(autocommit=True) as conn:
        return site.reader.state(name).table.table_id in operators.pauses(conn)


def _stuck(name: TableName, left: str) -> ModakError:
    return ModakError(
        "erase.unsettled",
        f"{left} of {name} could still bring rows into the lake and do not come to an end.",
        hint="modak-worker status tells what holds them up; resume the table if it is paused, then erase again.",
        retryable=True,
    )
