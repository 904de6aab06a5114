"""`measurements …`, the commands that change a store: compact, recover, export, and a data set to try them on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.commands.measurements import (
    FEW,
    DatabaseOption,
    MeasurementOption,
    TierOption,
    candidates,
    opened,
    planned,
    tell_problems,
    tiers_named,
)
from modak.cli.output import count, dump, duration, note, number, on_terminal, paint, record, say, size
from modak.cli.parsing import JsonOption
from modak.cli.progress import Progress
from modak.core.errors import UsageError

if TYPE_CHECKING:
    from modak.config import Settings
    from modak.measurements.history import JobRecord
    from modak.measurements.state import State


def compact(
    tier: TierOption = None,
    database: DatabaseOption = None,
    measurement: MeasurementOption = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be merged, and change nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Run one compaction cycle; exit code 1 if a job failed.

    Inputs are removed after a grace period, by the next cycle or by recover.
    """
    if dry_run:
        candidates(tier, database, measurement, json)
        return
    with opened() as (settings, state):
        from modak.measurements.opening import open_manager, runner_of

        names = [policy.name for policy in tiers_named(settings, state, tier)]
        manager = open_manager(settings, state, runner_of(settings))
        manager.cleanup_orphaned_temp_dirs()
        with _Shown(_total(settings, state, tier, database, measurement), quiet=json) as shown:
            done = manager.cycle(names, database=database, measurement=measurement, on_job=shown.job)
    if json:
        dump({**record(done), "jobs": [record(job) for job in done.jobs]})
    else:
        merged = [job for job in done.jobs if job.tier != "retention" and not job.error]
        before, after = (sum(getattr(job, name) for job in merged) for name in ("bytes_before", "bytes_after"))
        rows = sum(job.rows_out for job in merged)
        files = sum(job.files for job in merged)
        outputs = sum(job.outputs for job in merged)
        ratio = f", {before / after:.1f} times smaller" if after else ""
        say(
            f"{count(files, 'file')} became {number(outputs)}: {count(rows, 'row')}, "
            f"{size(before)} → {size(after)}{ratio}, in {duration(done.seconds)}"
            if merged
            else "Nothing was worth a merge."
        )
        for partition in done.held[:FEW]:
            note(f"{partition} is another compactor's, which is at work or has died a moment ago; try again later.")
        tell_problems(done.problems)
    if done.failed:
        raise typer.Exit(1)


def recover(database: DatabaseOption = None, json: JsonOption = False) -> None:
    """Bring jobs that were interrupted to their end, and remove inputs whose grace period is over."""
    with opened() as (settings, state):
        from modak.measurements.opening import open_manager
        from modak.measurements.recovery import Recovery

        manager = open_manager(settings, state)
        manager.cleanup_orphaned_temp_dirs()
        found = Recovery(state, manager.claim_level).recover(database)
    if json:
        dump({"recovered": found.recovered, "fates": found.fates, "problems": found.problems, "swept": found.swept})
    else:
        for path, fate in found.fates.items():
            say(f"{fate.value:10} {path}")
        say(f"{number(found.recovered)} of {count(len(found.fates), 'job')} moved on.")
        tell_problems(found.problems)
    if found.problems:
        raise typer.Exit(1)


def export(
    *,
    database: Annotated[str, typer.Option("--database", metavar="NAME", help="The database.")],
    measurement: Annotated[str, typer.Option("--measurement", metavar="NAME", help="The measurement.")],
    drop: Annotated[bool, typer.Option("--drop", help="Take the table away again; the files stay.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a measurement as an Iceberg table that refers to its files; nothing is copied.

    Every compaction cycle brings the table up to date.
    """
    with opened() as (settings, state):
        from datetime import timedelta

        from modak.measurements import exporting
        from modak.measurements.discover import Source

        source = Source(database, measurement)
        if drop:
            removed = exporting.drop(state, source)
            if json:
                dump({"database": database, "measurement": measurement, "dropped": removed > 0})
            else:
                say(f"The table of {source.folder} is gone." if removed else f"{source.folder} has no table.")
            return
        done = exporting.export(state, source, timedelta(seconds=settings.measurements.export_kept))
    if json:
        dump(record(done))
        return
    say(
        f"{source.folder}: {count(done.files, 'file')}, {count(done.rows, 'row')}, {size(done.bytes)} in snapshot "
        f"{done.snapshot_id} ({count(done.added, 'file')} came, {number(done.removed)} went)"
    )
    say(f"table     {done.location}")
    say(f"metadata  {done.metadata_location}")
    tell_problems([f"{path} is left out: {reason}" for path, reason in done.left_out])


def generate(
    *,
    database: Annotated[str, typer.Option("--database", metavar="NAME", help="The database to fill.")] = "demo",
    measurement: Annotated[
        list[str] | None, typer.Option("--measurement", metavar="NAME", help="Measurements; repeat for more.")
    ] = None,
    hours: Annotated[int, typer.Option("--hours", metavar="N", help="How many hours back.", min=1)] = 6,
    files: Annotated[int, typer.Option("--files", metavar="N", help="Files per hour.", min=1)] = 20,
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="Rows per file.", min=2)] = 5_000,
    hosts: Annotated[int, typer.Option("--hosts", metavar="N", help="Hosts that report.", min=1)] = 100,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="The end of the last hour, UTC. Two hours ago.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The same seed makes the same rows.")] = 1,
    no_corrupt: Annotated[bool, typer.Option("--no-corrupt", help="Without the corrupt files.")] = False,
    json: JsonOption = False,
) -> None:
    """Fill the store with realistic small files to try it on.

    Many hosts, late data, columns that come and go, repeated rows, and a few corrupt files.
    """
    with opened() as (_, state):
        from datetime import timedelta

        from modak.measurements.generate import Shape
        from modak.measurements.generate import generate as make

        end = state.clock.now() - timedelta(hours=2) if until is None else _moment(until)
        names = tuple(measurement or ("cpu", "mem"))
        shape = Shape(database, names, end, hours, files, rows, hosts, seed, not no_corrupt)
        with Progress("writing") as progress:
            made = make(state.objects, shape, lambda so_far: progress.show(so_far.bytes, so_far.rows))
    if json:
        dump(record(made))
        return
    say(
        f"{count(made.files, 'file')} with {count(made.rows, 'row')}, {size(made.bytes)}, "
        f"{number(made.corrupt)} of them corrupt on purpose."
    )


def _total(
    settings: Settings, state: State, tier: list[str] | None, database: str | None, measurement: str | None
) -> int | None:
    """The bytes that a cycle will merge, for a person who waits; nobody else needs one more listing."""
    import sys

    from modak.measurements.discover import sources

    if not on_terminal(sys.stderr):
        return None
    policies = tiers_named(settings, state, tier)
    return sum(
        each.bytes
        for source in sources(state.objects, database)
        if measurement in (None, source.measurement)
        for each, plan in planned(settings, state, source, policies)
        if plan.batches
    )


class _Shown(Progress):
    """Jobs as they end, and how far the cycle is."""

    def __init__(self, total: int | None, *, quiet: bool) -> None:
        super().__init__("merging", total)
        self._quiet = quiet
        self._bytes = self._rows = 0

    def job(self, job: JobRecord) -> None:
        """Tell of one job."""
        self.clear()
        if not self._quiet:
            _show_job(job)
        self._bytes += job.bytes_before
        self._rows += job.rows_in
        self.show(self._bytes, self._rows)


def _show_job(job: JobRecord) -> None:
    if job.error:
        say(f"{paint('failed', 'red')} {job.partition} ({job.tier}): {job.error}")
        return
    if job.tier == "retention":
        say(f"{paint('dropped', 'magenta')} {job.partition}: {count(job.files, 'file')}, {size(job.bytes_before)}")
        return
    again = f", {count(job.duplicates, 'duplicate')}" if job.duplicates else ""
    say(
        f"{paint('merged', 'green')} {job.partition} ({job.tier}): {count(job.files, 'file')} → {number(job.outputs)}, "
        f"{count(job.rows_out, 'row')}{again}, {size(job.bytes_before)} → {size(job.bytes_after)} "
        f"({job.ratio:.1f}×), {duration(job.seconds)}"
    )


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError("usage.until", f"--until {text!r} is no time.", hint="Write 2026-11-16T09:00:00.") from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
