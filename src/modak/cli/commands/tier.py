"""`tier` and `accept`: one tiering pass by hand, and saying yes to somebody else's change in the lake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import count, duration, note, number, paint, say, size
from modak.cli.output import table as grid
from modak.cli.parsing import TableOption
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.core.axis import Axis
    from modak.tables.site import Site
    from modak.tables.tiering.plan import Finding, TieringPlan
    from modak.tables.tiering.run import TieringReport


def tier(
    table: TableOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")] = False,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, help="How long to wait for another worker to give up the lead."
        ),
    ] = 20.0,
) -> None:
    """Run one tiering pass now.

    Seal, export, commit, advance, drop what the heap no longer needs and expire lake rows, as the daemon does it.
    """
    from modak.cli.place import opened

    name = TableName.parse(table)
    with opened(log_level="warning" if dry_run else "info") as site:
        if dry_run:
            _show_plan(site, name)
        else:
            _pass(site, name, wait)


def accept(table: TableOption) -> None:
    """Accept a foreign change of the lake.

    Somebody else changed rows in the lake table, so publication stopped. This takes the lake as it is and goes on.
    """
    from modak.cli.place import opened

    name = TableName.parse(table)
    with opened() as site:
        from modak.tables.foreign import accept as accept_foreign

        say(accept_foreign(site, name))


def _pass(site: Site, name: TableName, wait: float) -> None:
    from modak.runtime.leader import Leader
    from modak.tables.retention.run import retain
    from modak.tables.tidy import finish_expiries
    from modak.tables.tiering.run import tier as run_pass

    with Leader.campaign(site, wait) as leader:
        report = run_pass(site, leader.epoch, name)
        retained = retain(site, leader.epoch, name)
        # Where the command is all there is, nobody else deletes what expired snapshots have freed.
        finish_expiries(site, site.writer(leader.epoch), name)
    _show_report(report)
    if retained.moved_to is not None:
        say(
            f"{count(retained.doomed.rows, 'lake row')} expired; the retention line is now {retained.moved_to}.",
        )


def _show_report(report: TieringReport) -> None:
    if report.moved_partitions:
        rate = report.rows / report.seconds if report.seconds else 0
        say(
            f"{paint('tiered', 'green')} {report.table}: {count(len(report.moved_partitions), 'partition')}, "
            f"{count(report.rows, 'row')}, {size(report.bytes)} in {duration(report.seconds)} ({number(rate)} rows/s)"
        )
        say(f"The cut-line is now {report.cut_to}, lake snapshot {report.snapshot_id}.")
    else:
        say(f"Nothing to tier in {report.table}: {report.blocked or 'no partition is old enough'}.")
    if report.premade:
        say(f"{count(len(report.premade), 'partition')} made ahead.")
    if report.dropped:
        say(f"{count(len(report.dropped), 'partition')} dropped from the heap.")
    _show_findings(report.findings)


def _show_plan(site: Site, name: TableName) -> None:
    from modak.tables.tiering.plan import Blocked
    from modak.tables.tiering.run import dry_run

    axis = site.reader.state(name).table.axis
    would = dry_run(site, name)
    if isinstance(would.tiering, Blocked):
        say(f"Nothing to tier in {name}: {would.tiering.reason}.")
    else:
        _show_partitions(would.tiering, axis)
    for partition in would.reclaim.drop:
        say(f"{partition.name} would be dropped from the heap.")
    for partition, reason in would.reclaim.kept:
        say(f"{partition.name} would stay in the heap: {reason}.")
    for new in would.premake.make:
        say(f"{new.name} would be made ahead, from {axis.literal(new.lower)} to {axis.literal(new.upper)}.")
    _show_retention(site, name)
    _show_findings(would.findings)
    note("Nothing was changed.")


def _show_retention(site: Site, name: TableName) -> None:
    from modak.tables.retention.plan import Waiting
    from modak.tables.retention.run import plan_now

    state = site.reader.state(name)
    if state.table.lake_retention is None:
        return
    plan, doomed = plan_now(site, state)
    if isinstance(plan, Waiting):
        say(f"Nothing expires: {plan.reason}.")
    else:
        line = state.table.axis.literal(plan.to)
        say(
            f"{count(doomed.rows, 'lake row')} below {line} would expire, {count(len(plan.bands), 'band')} of the grid."
        )


def _show_partitions(plan: TieringPlan, axis: Axis) -> None:
    say(
        f"{count(len(plan.partitions), 'partition')} of {plan.table} would move, "
        f"about {count(plan.rows, 'row')}, {size(plan.bytes)}; "
        f"the cut-line would go from {axis.literal(plan.cut_from)} to {axis.literal(plan.cut_to)}."
    )
    rows = [
        (p.name, _bound(axis, p.lower), _bound(axis, p.upper), str(p.state), number(p.rows), size(p.bytes))
        for p in plan.partitions
    ]
    grid(("Partition", "From", "To", "State", "Rows", "Size"), rows, right=frozenset({"Rows", "Size"}))


def _show_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        note(f"{paint('look at', 'yellow')}: {finding.message}")


def _bound(axis: Axis, key: int | None) -> str:
    return "–" if key is None else axis.literal(key)
