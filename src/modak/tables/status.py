"""How every table is doing, for people and scripts. Reads only; no JVM and no Spark."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from modak.catalog import labels
from modak.catalog.mirrors import MirrorHealth, read_health
from modak.catalog.records import OpRecord, StatusRow
from modak.core.axis import literal
from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.tables.fold.debt import debt_problem
from modak.tables.observe import Observed, observe
from modak.tables.site import Site
from modak.tables.tiering.plan import survey


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table at a glance."""

    name: TableName
    mode: str
    cut_line: str | None
    snapshot_id: int | None
    retention_line: str | None
    high_water: str | None
    partitions: dict[str, int]
    heap_bytes: int
    lake_bytes: int
    lake_files: int
    lake_rows: int
    lag: str | None
    delta_backlog: int
    pins: int
    last_operation: str
    problems: tuple[str, ...]
    metadata_location: str | None
    mirror_frontier: str | None = None
    mirror_lag_bytes: int | None = None
    mirror_lag_seconds: float | None = None
    slot_retained_bytes: int | None = None
    """Mirrored: WAL that the server keeps for the table."""
    keep_heap: bool = False


def collect(site: Site) -> tuple[TableStatus, ...]:
    """Look at every registered table."""
    rows = site.reader.status()
    with site.connect(autocommit=True) as conn:
        health = read_health(conn)
        return tuple(_status(site, conn, row, health.get(row.table_id)) for row in rows)


def collect_one(site: Site, name: TableName) -> TableStatus | None:
    """Look at one registered table."""
    found = [row for row in site.reader.status() if row.name == name]
    with site.connect(autocommit=True) as conn:
        health = read_health(conn)
        return _status(site, conn, found[0], health.get(found[0].table_id)) if found else None


def _status(
    site: Site, conn: psycopg.Connection[Any], row: StatusRow, health: MirrorHealth | None = None
) -> TableStatus:
    observed, trouble = _observed(site, conn, row)
    lake = _lake_totals(site, row)
    history = site.reader.history(row.table_id, 1)
    state = observed.state if observed else None
    return TableStatus(
        name=row.name,
        mode=row.mode,
        cut_line=literal(row.axis, row.cutline_t),
        snapshot_id=row.cutline_s,
        retention_line=literal(row.axis, row.retention_line),
        high_water=literal(row.axis, state.high_water) if state else None,
        partitions=dict(row.partition_states),
        heap_bytes=_heap_bytes(observed) if observed else 0,
        lake_bytes=lake.get("total-files-size", 0),
        lake_files=lake.get("total-data-files", 0),
        lake_rows=lake.get("total-records", 0),
        lag=mirror_lag(health) if health else _lag(observed) if observed and row.mode == "tiered" else None,
        delta_backlog=row.delta_backlog,
        pins=row.read_pins,
        last_operation=_operation(history[0]) if history else "",
        problems=(
            *trouble,
            *labels.problems(conn, row.table_id),
            *_problems(site, row, observed),
            *_mirror_problems(site, health),
        ),
        metadata_location=row.metadata_location,
        mirror_frontier=row.mirror_frontier,
        mirror_lag_bytes=health.lag_bytes if health else None,
        mirror_lag_seconds=health.lag_seconds if health else None,
        slot_retained_bytes=health.retained_bytes if health else None,
        keep_heap=observed is not None and observed.record.keep_heap,
    )


def _observed(site: Site, conn: psycopg.Connection[Any], row: StatusRow) -> tuple[Observed | None, tuple[str, ...]]:
    try:
        return observe(site, conn, row.name), ()
    except ModakError as error:
        # One table that cannot be looked at must not hide the others.
        return None, (f"{error.message} {error.hint}".strip(),)


def _problems(site: Site, row: StatusRow, observed: Observed | None) -> Iterator[str]:
    if observed is not None:
        if observed.state.frozen:
            yield observed.state.frozen
        if row.cutline_t is not None:
            yield from (finding.message for finding in survey(observed.state))
    if row.copying:
        yield f"its first copy has not landed; run the same register command again: {_copied(site, row)}"
    debt = debt_problem(row.delta_backlog, site.settings.corrections.delta_backlog_warn_rows)
    if debt:
        yield debt
    if row.last_error:
        yield f"last error: {row.last_error}"


def mirror_lag(health: MirrorHealth) -> str:
    """How far a mirror is behind: WAL that is not in the lake yet, and how long ago the lake had everything."""
    return f"{health.lag_bytes:,} bytes, {health.lag_seconds:.0f} s"


def _mirror_problems(site: Site, health: MirrorHealth | None) -> Iterator[str]:
    if health is None:
        return
    if health.error:
        yield f"the mirror stands still since {health.failing_since:%Y-%m-%d %H:%M:%S}: {health.error}"
    if health.paused:
        yield f"the mirror is paused: {health.paused} Set MODAK_SLOT_POLICY to warn or reanchor to go on."
    limit = site.settings.mirror.slot_warn_bytes
    if health.retained_bytes > limit:
        yield f"its replication slot keeps {health.retained_bytes:,} bytes of WAL, more than {limit:,}"


def _heap_bytes(observed: Observed) -> int:
    if observed.heap.partition_strategy is None:
        return observed.heap.bytes
    return sum(leaf.bytes for leaf in observed.leaves.values())


def _copied(site: Site, row: StatusRow) -> str:
    with site.connect(autocommit=True) as conn:
        found = conn.execute(
            "SELECT count(*) FILTER (WHERE state = 'committed'), count(*) FROM modak.copy_progress WHERE table_id = %s",
            (row.table_id,),
        ).fetchone()
    done, total = found or (0, 0)
    return f"{done} of {total} chunks are there" if total else "no chunk is there yet"


def _lag(observed: Observed) -> str | None:
    """How far the oldest rows that are still only in the heap lie behind the newest."""
    high, axis = observed.state.high_water, observed.state.axis
    if high is None:
        return None
    waiting = [
        part.lower
        for part in observed.state.partitions
        if part.lower is not None and part.state in (PartitionState.HOT, PartitionState.SEALING, PartitionState.TIERING)
    ]
    behind = high - min([low for low in waiting if low >= observed.state.cut_line] or [high])
    return axis.roughly(max(behind, 0))


def _lake_totals(site: Site, row: StatusRow) -> dict[str, int]:
    """The totals that the published snapshot carries in its own summary."""
    if row.metadata_location is None or row.cutline_s is None:
        return {}
    try:
        raw = site.store.read(row.metadata_location)
    except ModakError:
        return {}
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    for snapshot in json.loads(text).get("snapshots", ()):
        if snapshot["snapshot-id"] == row.cutline_s:
            return {key: int(value) for key, value in snapshot["summary"].items() if key.startswith("total-")}
    return {}


def _operation(op: OpRecord) -> str:
    when = op.finished_at or op.started_at
    rows = f", {int(op.counters['rows']):,} rows" if "rows" in op.counters else ""
    return f"{op.kind} {op.phase}{rows}, {when:%Y-%m-%d %H:%M:%S}"
