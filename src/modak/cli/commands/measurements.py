"""`measurements …`, the commands that look at a store: what it holds, what waits, what was done, if it is sound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import count, dump, duration, number, paint, record, say, size
from modak.cli.output import table as grid
from modak.cli.parsing import JsonOption
from modak.cli.progress import Progress
from modak.core.errors import UsageError

if TYPE_CHECKING:
    from modak.config import Settings
    from modak.measurements.candidates import Candidate, TierPolicy, WindowPlan
    from modak.measurements.discover import Source
    from modak.measurements.state import State

TierOption = Annotated[
    list[str] | None,
    typer.Option("--tier", metavar="NAME", help="hourly, daily, weekly or monthly; repeat for more. All enabled ones."),
]
DatabaseOption = Annotated[str | None, typer.Option("--database", metavar="NAME", help="Only this database.")]
MeasurementOption = Annotated[str | None, typer.Option("--measurement", metavar="NAME", help="Only this measurement.")]

FEW = 20


def status(json: JsonOption = False) -> None:
    """Show what the store holds and what waits to be compacted."""
    with opened() as (settings, state):
        from modak.measurements import survey
        from modak.measurements.opening import tiers_of

        found = survey.status(state, [tier.policy for tier in tiers_of(settings, state.objects)])
    if json:
        dump({**record(found), "measurements": [record(each) for each in found.measurements]})
        return
    if not found.measurements:
        say(f"There are no measurements in {found.root} yet.")
    rows = [
        (
            each.database,
            each.measurement,
            number(each.total_files),
            " ".join(f"{count} {word}" for word, count in sorted(each.files.items())),
            size(each.bytes),
            " ".join(f"{count} {name}" for name, count in each.candidates.items() if count) or "–",
            number(each.set_aside),
        )
        for each in found.measurements
    ]
    grid(
        ("Database", "Measurement", "Files", "Kinds", "Size", "To compact", "Set aside"),
        rows,
        right=frozenset({"Files", "Size", "Set aside"}),
    )
    jobs = ", ".join(f"{count} {word}" for word, count in sorted(found.jobs.items())) or "none"
    say(f"{found.root}: jobs {jobs}; {found.readers} readers")
    tell_problems(found.problems)


def candidates(
    tier: TierOption = None,
    database: DatabaseOption = None,
    measurement: MeasurementOption = None,
    json: JsonOption = False,
) -> None:
    """List the partitions that are worth a merge now."""
    with opened() as (settings, state):
        from modak.measurements.discover import sources

        found = [
            (each, plan)
            for source in sources(state.objects, database)
            if measurement in (None, source.measurement)
            for each, plan in planned(settings, state, source, tiers_named(settings, state, tier))
        ]
    if json:
        dump(
            [
                {
                    "database": each.database,
                    "measurement": each.measurement,
                    "partition": each.partition_path,
                    "tier": each.tier,
                    "files": each.file_count,
                    "bytes": each.bytes,
                    "batches": len(plan.batches),
                    "engine": plan.engine,
                    "reason": plan.reason,
                }
                for each, plan in found
            ]
        )
        return
    if not found:
        say("Nothing is worth a merge now.")
        return
    rows = [
        (each.partition_path, each.tier, number(each.file_count), size(each.bytes), _how(plan)) for each, plan in found
    ]
    grid(("Partition", "Tier", "Files", "Size", "How"), rows, right=frozenset({"Files", "Size"}))


def jobs(database: DatabaseOption = None, json: JsonOption = False) -> None:
    """List the jobs that are under way or wait for their inputs to be removed."""
    with opened() as (_, state):
        from modak.measurements.manifest import Held

        told = [each.manifest.told() for each in state.manifests.held(database) if isinstance(each, Held)]
    if json:
        dump(told)
        return
    if not told:
        say("No jobs.")
        return
    columns = ("Job", "Status", "Tier", "Partition", "Inputs", "Outputs", "Since")
    rows = [
        (
            *(str(each[name]) for name in ("job", "status", "tier", "partition", "inputs", "outputs")),
            f"{each['since']:%Y-%m-%d %H:%M:%S}",
        )
        for each in told
    ]
    grid(columns, rows, right=frozenset({"Inputs", "Outputs"}))


def history(
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="How many cycles.", min=1)] = 10,
    json: JsonOption = False,
) -> None:
    """Show what the last cycles did."""
    with opened() as (_, state):
        from modak.measurements.history import recall

        cycles = list(recall(state.objects, limit))
    if json:
        dump([{**record(cycle), "jobs": [record(job) for job in cycle.jobs]} for cycle in cycles])
        return
    if not cycles:
        say("There has been no cycle yet.")
        return
    rows = []
    for cycle in cycles:
        before, after = (sum(getattr(job, name) for job in cycle.jobs) for name in ("bytes_before", "bytes_after"))
        rows.append(
            (
                f"{cycle.started_at:%Y-%m-%d %H:%M:%S}",
                number(len(cycle.jobs)),
                number(cycle.failed),
                number(sum(job.files for job in cycle.jobs)),
                number(sum(job.rows_out for job in cycle.jobs)),
                size(before),
                size(after),
                duration(cycle.seconds),
            )
        )
    columns = ("Started", "Jobs", "Failed", "Files", "Rows", "Before", "After", "Took")
    grid(columns, rows, right=frozenset(columns[1:]))


def verify(database: DatabaseOption = None, measurement: MeasurementOption = None, json: JsonOption = False) -> None:
    """Check that every file that counts can be read and lies where its rows belong; exit code 1 on a finding."""
    with opened() as (_, state):
        from modak.measurements import survey

        with Progress("checking") as progress:
            checked = []
            for each in survey.verify(state, database, measurement):
                checked.append(each)
                done, rows = sum(one.bytes for one in checked), sum(one.rows for one in checked)
                progress.show(done, rows, f"{each.database}/{each.measurement}")
    if json:
        dump([record(each) for each in checked])
    else:
        for each in checked:
            verdict = paint("wrong", "red") if each.problems else paint("sound", "green")
            say(
                f"{verdict} {each.database}/{each.measurement}: {count(each.files, 'file')}, "
                f"{count(each.rows, 'row')}, {size(each.bytes)}"
            )
            tell_problems(each.problems)
    if any(each.problems for each in checked):
        raise typer.Exit(1)


def planned(
    settings: Settings, state: State, source: Source, policies: list[TierPolicy]
) -> Iterator[tuple[Candidate, WindowPlan]]:
    """What a cycle would do about a measurement, first what it would let go."""
    from modak.measurements.candidates import Engine, WindowPlan, plan_window
    from modak.measurements.opening import open_manager
    from modak.measurements.retention import Retention, expired
    from modak.measurements.tiers import find_candidates

    chosen = settings.measurements
    level = open_manager(settings, state).claim_level
    for each in expired(state, Retention(chosen.kept()), source, level):
        yield each, WindowPlan(Engine.NONE, "it has been kept for long enough, and goes", ())
    for policy in policies:
        for each in find_candidates(state, policy, source):
            yield each, plan_window(each, policy, chosen.batch_files, can_sort=chosen.isolation == "spark")


def tiers_named(settings: Settings, state: State, names: list[str] | None) -> list[TierPolicy]:
    """The enabled tiers, or those of them that were named."""
    from modak.measurements.opening import tiers_of

    policies = {policy.name: policy for policy in (tier.policy for tier in tiers_of(settings, state.objects))}
    for name in names or ():
        if name not in policies:
            known = ", ".join(policies)
            raise UsageError("measurements.tier", f"There is no tier {name!r}.", hint=f"Known: {known}.")
        if not policies[name].enabled:
            variable = f"MODAK_MEASUREMENTS_{name.upper()}_ENABLED"
            raise UsageError("measurements.tier", f"The tier {name} is switched off.", hint=f"Set {variable}=true.")
    return [policy for policy in policies.values() if policy.enabled and (not names or policy.name in names)]


def _how(plan: WindowPlan) -> str:
    batches = len(plan.batches)
    if not batches:
        return plan.reason
    return f"{batches} {'batch' if batches == 1 else 'batches'}: {plan.reason}"


def tell_problems(problems: list[str]) -> None:
    """The first few findings, and how many more there are."""
    for problem in problems[:FEW]:
        say(f"{paint('!', 'red')} {problem}")
    if len(problems) > FEW:
        say(f"{number(len(problems) - FEW)} more findings; --json lists all.")


@contextmanager
def opened() -> Iterator[tuple[Settings, State]]:
    """The store of the settings; neither Postgres nor Spark is started for it."""
    from modak.cli.errors import debugging
    from modak.cli.place import settings
    from modak.cli.quick import structlog_without_rich

    chosen = settings()
    structlog_without_rich()
    from modak.cli import logs
    from modak.measurements.opening import open_state

    logs.configure(chosen.log.format, level="debug" if debugging() else "warning")
    yield chosen, open_state(chosen)
