"""The way out: triggers and the spill go, the catalog forgets the table, the lake stays unless it is told to go too.

For a tiered table the lake is the only copy of reclaimed rows, and corrections that have not been folded exist only
in `modak.delta`: those are never dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from modak.catalog import capture, publications, spill
from modak.catalog.journal import Journal
from modak.catalog.records import TableRecord, TableState
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase, PartitionState
from modak.tables.maintenance.engine import engine_of
from modak.tables.mirror.replication import plan_withdrawal, withdraw
from modak.tables.site import Site
from modak.tables.tidy import finish_expiries, finish_operations, purge

log = structlog.get_logger()

TRIES = 20
LOCK_MILLIS = 200


@dataclass(frozen=True, slots=True)
class Unregistered:
    """What unregistering left behind and took away."""

    kept_location: str | None
    files_removed: int
    corrections_discarded: int
    catalogs: tuple[str, ...] = ()
    """Foreign catalogs that may show it until it is taken out there."""


def unregister(
    site: Site, name: TableName, *, drop_lake: bool = False, discard_corrections: bool = False
) -> Unregistered:
    """Let a table go."""
    writer = site.writer(None)
    # What an earlier crash left is tidied while the catalog still knows where.
    finish_operations(site, writer, site.reader.state(name))
    if not drop_lake:
        # Nobody will know afterwards that these files are not needed.
        finish_expiries(site, writer, name, engine_of(site, "embedded"))
    state = site.reader.state(name)
    lost = _only_in_the_delta(site, state)
    if lost and not drop_lake and not discard_corrections:
        raise Refused(
            "unregister.corrections",
            f"{lost} correction{'s' if lost > 1 else ''} of {name} would be lost: only modak.delta has them.",
            hint="Keep the table registered until they are in the lake, or give them up with --discard-corrections.",
        )
    if state.staged_loads and not drop_lake and not discard_corrections:
        raise Refused(
            "unregister.staged_loads",
            f"{state.staged_loads} staged loads of {name} would be lost: they are not in the lake yet.",
            hint="Keep the table registered until the daemon has adopted them, or give them up with"
            " --discard-corrections.",
        )
    _remove_triggers(site, state)
    op_id = new_op_id(site.clock)
    location = state.table.location
    plan = {"table": str(name), "location": location, "drop_lake": drop_lake}
    Journal(writer).begin(op_id, state.table.table_id, "unregister", plan, [location] if drop_lake else [])
    Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.PREPARED)
    lake = site.lake.load(state.table.lake) if drop_lake else None
    with site.connect(autocommit=True) as conn:
        catalogs = tuple(publications.told_of(conn, state.table.table_id))
    followed = plan_withdrawal(site, state.table) if state.table.mode == "mirrored" else None
    with writer.transaction(op_id) as tx:
        tx.unregister(state.table.table_id)
        if lake is not None:
            tx.unpublish(state.table.lake, lake.metadata_location)
        if drop_lake:
            tx.tidy_later(purge=location)
        if followed is not None:
            # Only now: a worker that finds the slot of a registered table gone makes a new one.
            tx.tidy_later(withdraw=followed)
    reach("unregister.committed")
    if followed is not None:
        withdraw(site, followed)
    landed = site.reader.op(op_id)
    assert landed is not None
    removed = 0
    if drop_lake:
        removed = purge(site, writer, landed)
    else:
        Journal(writer).finish(op_id)
    log.info("unregister.done", table=str(name), lake="dropped" if drop_lake else "kept", files_removed=removed)
    return Unregistered(None if drop_lake else location, removed, lost, catalogs)


def _only_in_the_delta(site: Site, state: TableState) -> int:
    """Delta rows below the cut-line whose leaf has left the heap: nothing else holds their newest image."""
    kept = [part for part in state.living() if part.state is not PartitionState.DROPPED and part.lower is not None]
    with site.connect(autocommit=True) as conn:
        row = conn.execute(
            "SELECT count(*) FROM modak.delta d WHERE d.table_id = %(table)s AND d.folded_into IS NULL AND NOT EXISTS"
            " (SELECT FROM unnest(%(lower)s::bigint[], %(upper)s::bigint[]) AS p (low, high)"
            " WHERE d.tier_key >= p.low AND d.tier_key < p.high)",
            {
                "table": state.table.table_id,
                "lower": [part.lower for part in kept],
                "upper": [part.upper for part in kept],
            },
        ).fetchone()
    return int(row[0]) if row else 0


def _remove_triggers(site: Site, state: TableState) -> None:
    """Take the capture triggers and the spill off; a busy table is asked again for a few seconds."""
    for part in state.living():
        if part.trigger_oid is not None:
            _patiently(site, partial(_remove_capture, site, part.leaf_oid))
    _patiently(site, partial(_disable_spill, site, state.table))


def _remove_capture(site: Site, leaf_oid: int) -> None:
    with site.writer(None).step(LOCK_MILLIS) as tx:
        capture.remove(tx.conn, leaf_oid)


def _disable_spill(site: Site, table: TableRecord) -> None:
    with site.connect(autocommit=True) as conn:
        conn.execute("SELECT set_config('lock_timeout', %s, false)", (f"{LOCK_MILLIS}ms",))
        here = conn.execute("SELECT 1 FROM pg_class WHERE oid = %s", (table.relid,)).fetchone()
        if here is None:
            spill.forget(conn, table.table_id)
        else:
            spill.disable(conn, table.name)


def _patiently(site: Site, step: Callable[[], None]) -> None:
    for attempt in range(TRIES):
        try:
            step()
            return
        except ModakError as error:
            if error.code != "postgres.busy" or attempt == TRIES - 1:
                raise
            site.clock.sleep(0.25)
