"""`compact`: fold the corrections of a table into its lake table by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import count, duration, note, number, paint, say, size
from modak.cli.parsing import TableOption
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.fold.run import FoldReport
    from modak.tables.site import Site


def compact(
    table: TableOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")] = False,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, help="How long to wait for another worker to give up the lead."
        ),
    ] = 20.0,
) -> None:
    """Fold corrections into the lake now.

    Writes the rows of modak.delta as files, hides the rows that they replace, and removes what is folded from the
    delta, MODAK_COMPACTION_BATCH rows per commit, exactly as the daemon does it in every cycle.
    """
    from modak.cli.place import opened

    name = TableName.parse(table)
    with opened(log_level="warning" if dry_run else "info") as site:
        if dry_run:
            _show_plan(site, name)
        else:
            _fold(site, name, wait)


def _fold(site: Site, name: TableName, wait: float) -> None:
    from modak.runtime.leader import Leader
    from modak.tables.fold.run import fold
    from modak.tables.tidy import finish_expiries

    with Leader.campaign(site, wait) as leader:
        report = fold(site, leader.epoch, name)
        # Where the command is all there is, nobody else deletes what expired snapshots have freed.
        finish_expiries(site, site.writer(leader.epoch), name)
    _show_report(report)


def _show_report(report: FoldReport) -> None:
    if report.changed:
        rate = report.rows / report.seconds if report.seconds else 0
        say(
            f"{paint('folded', 'green')} {report.table}: {count(report.rows, 'correction')} in "
            f"{count(report.batches, 'commit')}, {duration(report.seconds)} "
            f"({number(rate)} rows/s)"
        )
        say(
            f"{count(report.upserts, 'row')} in {count(report.files, 'file')} ({size(report.bytes)}), "
            f"{count(report.replaced, 'row')} hidden by {count(report.vectors, 'deletion vector')}; "
            f"lake snapshot {report.snapshot_id}."
        )
    else:
        say(f"Nothing to fold in {report.table}: {report.blocked or 'no correction waits below the cut-line'}.")
    if report.swept:
        say(f"Gone from the delta: {count(report.swept, 'folded row')} kept for readers until now.")
    if report.left:
        say(f"Left in the delta: {count(report.left, 'correction')}.")


def _show_plan(site: Site, name: TableName) -> None:
    from modak.tables.fold.run import plan

    would = plan(site, name)
    if would is None:
        say(f"Nothing to fold in {name}: no correction waits below the cut-line.")
    elif isinstance(would, str):
        say(f"Nothing to fold in {name}: {would}.")
    else:
        axis = site.reader.state(name).table.axis
        say(
            f"{count(would.rows, 'correction')} of {name} would be folded, with tier keys from "
            f"{axis.literal(would.whole.lower)} to before {axis.literal(would.cut_to)}, "
            f"{'in this process' if would.in_driver else f'in {len(would.shares)} Spark tasks'}."
        )
        if would.more:
            say("More corrections would follow in further commits.")
    note("Nothing was changed.")
