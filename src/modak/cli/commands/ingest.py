"""`ingest`: history from files straight into the lake."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from modak.cli.output import count, duration, note, number, on_terminal, paint, say, size
from modak.cli.parsing import TableOption
from modak.core.errors import UsageError
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.ingest.run import IngestReport

_STEPS = {"keys": "reading keys", "rows": "writing rows", "adopt": "adopting files"}
_MAGIC = re.compile(r"[*?\[]")


def ingest(
    table: TableOption,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            metavar="PARQUET",
            help="Parquet: a file, folder, pattern, URL, or - for standard input; repeat for more.",
        ),
    ] = None,
    jsonl: Annotated[
        list[str] | None, typer.Option("--jsonl", metavar="FILE", help="Records as JSON lines; named as for --file.")
    ] = None,
    rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Write the rows of files that cannot be adopted as they are anew.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")] = False,
    more: Annotated[list[str] | None, typer.Argument(metavar="[PARQUET]…", hidden=True)] = None,
) -> None:
    """Commit cold rows straight into the lake.

    One atomic upsert by primary key, or nothing. Every row must be below the cut-line and at or above the retention
    line. Of two rows with one key the later wins. The same input again changes nothing.
    """
    name = TableName.parse(table)
    files = [*(file or []), *(more or [])]
    if more and not file:
        raise UsageError("usage.ingest", f"What is {more[0]!r}?", hint="Name Parquet files with --file.")
    if bool(files) == bool(jsonl):
        raise UsageError(
            "usage.ingest", "Give either --file or --jsonl.", hint="Parquet comes with --file, JSON lines with --jsonl."
        )
    given = tuple(files or jsonl or ())
    for path in given:
        if path != "-" and "://" not in path and not _MAGIC.search(path) and not os.path.exists(path):
            raise UsageError("usage.ingest", f"There is no file {path!r}.")
    _run(name, given, "parquet" if files else "jsonl", rewrite, dry_run)


def _run(
    name: TableName, given: tuple[str, ...], kind: Literal["parquet", "jsonl"], rewrite: bool, dry_run: bool
) -> None:
    from modak.cli.place import opened

    with opened() as site:
        from modak.tables.ingest.run import Request
        from modak.tables.ingest.run import ingest as take_in

        request = Request(name, given, kind, rewrite, dry_run)
        report = take_in(site, request, on_progress=_progress)
    if dry_run:
        _show_plan(report)
    else:
        _show_report(report)


def _progress(step: str, done: int, total: int) -> None:
    if total > 1 and (on_terminal() or done == total):
        note(f"{_STEPS[step]}: {done:,} of {total:,}")


def _show_plan(report: IngestReport) -> None:
    plan = report.plan
    for facts in plan.adopt:
        say(f"{facts.source.shown} would be adopted: {count(facts.rows, 'row')}, {size(facts.source.size)}.")
    for facts in plan.rewrite:
        say(f"{facts.source.shown} would be written anew: {plan.why.get(facts.source.shown, '')}.")
    _show_known(report)
    if not (plan.adopt or plan.rewrite):
        say(f"Nothing to take in for {report.table}.")
    note("Nothing was changed.")


def _show_report(report: IngestReport) -> None:
    _show_known(report)
    if not (report.plan.adopt or report.plan.rewrite):
        say(f"Nothing to take in for {report.table}.")
        return
    rate = report.rows / report.seconds if report.seconds else 0
    say(
        f"{paint('ingested', 'green')} {report.table}: {count(report.rows, 'row')}, {size(report.bytes)} in "
        f"{duration(report.seconds)} ({number(rate)} rows/s)"
    )
    say(
        f"{count(report.adopted_files, 'file')} adopted, {number(report.written_files)} written; "
        f"{count(report.replaced, 'row')} of the lake replaced; lake snapshot {report.snapshot_id}."
    )
    if report.left_out:
        say(f"{count(report.left_out, 'row')} came again later in the input; the last of each key was taken.")
    if report.corrections:
        say(f"{number(report.corrections)} older corrections of the same keys are superseded.")


def _show_known(report: IngestReport) -> None:
    if report.plan.known:
        say(f"{number(len(report.plan.known))} of the files are in the lake already, unchanged.")
