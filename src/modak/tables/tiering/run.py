"""One pass over one tiered table: look, premake, tier, reclaim. The daemon runs it each cycle, `modak-worker tier`
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import psycopg
import structlog

from modak.catalog import capture, spill
from modak.catalog.lease import Epoch
from modak.core.errors import Conflict, Refused
from modak.core.names import TableName
from modak.postgres.connect import translate
from modak.tables import premake
from modak.tables.astray import astray, tell
from modak.tables.observe import Observed, observe, sync
from modak.tables.premake import PremakePlan, plan_premake
from modak.tables.site import Site
from modak.tables.tidy import finish_operations
from modak.tables.tiering.move import Moved, move, move_again
from modak.tables.tiering.plan import (
    Blocked,
    Finding,
    ReclaimPlan,
    TieringPlan,
    plan_reclaim,
    plan_tiering,
    survey,
)
from modak.tables.tiering.reclaim import reclaim
from modak.tables.upkeep import release_tags, trim_snapshots

log = structlog.get_logger()

REPLANS = 5


@dataclass(frozen=True, slots=True)
class TieringReport:
    """What one pass did."""

    table: TableName
    moved_partitions: tuple[str, ...] = ()
    rows: int = 0
    bytes: int = 0
    files: int = 0
    seconds: float = 0.0
    cut_to: str | None = None
    snapshot_id: int | None = None
    premade: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    blocked: str | None = None
    deferred: bool = False
    """Whether something was due and has to be tried again though nothing else changes: a busy table, mostly."""

    @property
    def changed(self) -> bool:
        """Whether anything happened."""
        return bool(self.moved_partitions or self.premade or self.dropped)


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a pass would do now."""

    tiering: TieringPlan | Blocked
    reclaim: ReclaimPlan
    premake: PremakePlan
    findings: tuple[Finding, ...]


def tier(site: Site, epoch: Epoch, name: TableName) -> TieringReport:
    """Run one pass over a table in the name of a leader's epoch."""
    try:
        return _pass(site, epoch, name)
    except psycopg.Error as error:
        raise translate(error) from error


def _pass(site: Site, epoch: Epoch, name: TableName) -> TieringReport:
    _refuse_mirrored(site, name)
    writer = site.writer(epoch)
    with site.connect(autocommit=True) as conn:
        for op, removed in finish_operations(site, writer, site.reader.state(name)):
            log.info(
                "repair.cleaned", table=str(name), op=op.op_id, kind=op.kind, phase=str(op.phase), files_removed=removed
            )
        sync(site, conn, writer, name)
        observed = observe(site, conn, name)
        ahead = _premake(site, observed)
        premade = premake.run(ahead, conn, observed.record.axis, writer.hold)
        if premade.made:
            sync(site, conn, writer, name)
            observed = observe(site, conn, name)
        held = None
        if spill.is_astray(conn, observed.record.table_id):
            held = astray(site, conn, writer, observed.record)
            observed = observe(site, conn, name)
        findings = (*_tell(site, epoch, conn, observed), *premade.findings)
        plan, moved = _tier(site, epoch, conn, observed)
        if moved:
            observed = observe(site, conn, name)
            trim_snapshots(site, writer, name)
        release_tags(site, writer, name)
        due = plan_reclaim(observed.state, _reclaim_lag(site, observed))
        if due.drop:
            # Asked anew, because moving rows may have taken long.
            held = astray(site, conn, writer, observed.record)
        findings = (*findings, held) if held else findings
        dropped = _reclaim(site, epoch, conn, observed, replace(due, drop=()) if held else due)
    names = tuple(partition.name for partition in premade.made)
    deferred = len(names) < len(ahead.make) or len(dropped) < len(due.drop)
    report = TieringReport(
        name, premade=names, dropped=dropped, findings=findings, blocked=_reason(plan), deferred=deferred
    )
    if not isinstance(plan, TieringPlan) or moved is None:
        return report
    return _with_move(report, plan, moved, observed)


def dry_run(site: Site, name: TableName) -> DryRun:
    """The plans of a pass, without touching anything."""
    _refuse_mirrored(site, name)
    with site.connect(autocommit=True) as conn:
        observed = observe(site, conn, name)
    return DryRun(
        plan_tiering(observed.state, _lag(site, observed)),
        plan_reclaim(observed.state, _reclaim_lag(site, observed)),
        _premake(site, observed),
        survey(observed.state),
    )


def _refuse_mirrored(site: Site, name: TableName) -> None:
    mode = site.reader.state(name).table.mode
    if mode != "tiered":
        raise Refused(
            "tier.mode", f"{name} is {mode}: its rows are in the lake already.", hint="The daemon (run) follows it."
        )


def _tier(
    site: Site, epoch: Epoch, conn: psycopg.Connection[Any], observed: Observed
) -> tuple[TieringPlan | Blocked, Moved | None]:
    plan = plan_tiering(observed.state, _lag(site, observed))
    for again in range(REPLANS):
        if isinstance(plan, Blocked):
            return plan, None
        try:
            moved = move(site, epoch, observed, plan)
        except Conflict as conflict:
            # The world changed between plan and commit: look again and plan from what is there.
            if again == REPLANS - 1:
                raise
            log.info("tiering.again", table=str(plan.table), because=conflict.code, detail=conflict.message)
            sync(site, conn, site.writer(epoch), observed.record.name)
            observed = observe(site, conn, observed.record.name)
            plan = plan_tiering(observed.state, _lag(site, observed))
            continue
        log.info("tiering.advanced", table=str(plan.table), cut_line=observed.state.axis.literal(plan.cut_to))
        return plan, moved
    raise AssertionError("unreachable")


def _reclaim(
    site: Site, epoch: Epoch, conn: psycopg.Connection[Any], observed: Observed, plan: ReclaimPlan
) -> tuple[str, ...]:
    done = reclaim(site, conn, epoch, observed, plan)
    for name in (*done.unwatched, *_unwatched_for_good(conn, observed)):
        part = observed.records[name]
        assert part.lower is not None
        assert part.upper is not None
        partition = next(p for p in observed.state.partitions if p.name == name)
        move_again(site, epoch, observed, TieringPlan(plan.table, (partition,), part.lower, part.upper))
    return done.dropped


def _unwatched_for_good(conn: psycopg.Connection[Any], observed: Observed) -> tuple[str, ...]:
    """Leaves of a table that keeps its heap: no drop ever looks at them, so they are looked at each cycle."""
    if not observed.record.keep_heap:
        return ()
    broken = capture.broken(conn, observed.record.table_id)
    for name, why in broken.items():
        log.warning("capture.unwatched", table=str(observed.record.name), partition=name, because=why)
    return tuple(broken)


def _tell(site: Site, epoch: Epoch, conn: psycopg.Connection[Any], observed: Observed) -> tuple[Finding, ...]:
    """Say each finding once in the log, and show it in the status for as long as it lasts."""
    findings = survey(observed.state)
    strays = spill.stray_rows(conn, observed.record.table_id)
    if strays:
        message = f"{strays} rows stand in the spill partition, where no row may stay."
        findings = (*findings, Finding("spill.stray_rows", message))
    for finding in findings:
        tell(site, observed.record, finding)
    known = {finding.partition: finding.message for finding in findings if finding.partition}
    news = [part for part in observed.catalog.living() if part.problem != known.get(part.name)]
    if news:
        with site.writer(epoch).step() as tx:
            for part in news:
                tx.note_problem(part.table_id, part.name, known.get(part.name))
    return findings


def _with_move(report: TieringReport, plan: TieringPlan, moved: Moved, observed: Observed) -> TieringReport:
    return TieringReport(
        report.table,
        tuple(p.name for p in plan.partitions),
        moved.rows,
        moved.bytes,
        moved.files,
        moved.seconds,
        observed.state.axis.literal(plan.cut_to),
        moved.snapshot_id,
        report.premade,
        report.dropped,
        report.findings,
        None,
    )


def _premake(site: Site, observed: Observed) -> PremakePlan:
    return plan_premake(observed.state, site.settings.tiering.premake_partitions, observed.heap.time_zone)


def _lag(site: Site, observed: Observed) -> int:
    return observed.state.axis.span(site.settings.tiering.tiering_lag)


def _reclaim_lag(site: Site, observed: Observed) -> int:
    return observed.state.axis.span(site.settings.tiering.reclaim_lag)


def _reason(plan: TieringPlan | Blocked) -> str | None:
    return plan.reason if isinstance(plan, Blocked) else None
