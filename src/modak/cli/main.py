"""`modak-worker`: the commands and where each is listed. Importing this file loads no room but `core`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from typing import Annotated

import typer

from modak.cli import errors
from modak.cli.commands import (
    compact,
    compact_job,
    entities,
    erase,
    house,
    ingest,
    maintenance,
    measurements,
    measurements_work,
    mirror,
    operate,
    register,
    run,
    sql,
    status,
    tier,
    verify,
)
from modak.cli.commands import (
    profile as profiles,
)
from modak.cli.family import HOUSE, LAKE, TABLES, WATCH, Branch, Family, Leaf, examples, with_default

app = typer.Typer(
    name="modak-worker",
    cls=Family,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "modak-worker run --demo",
        "modak-worker register --table public.events --pk id --tier-key occurred_at",
        "modak-worker status",
    ),
)
profile = typer.Typer(
    cls=Branch,
    rich_markup_mode="rich",
    help="List, create or check storage profiles.",
    epilog=examples(
        "modak-worker profile list",
        "modak-worker profile create --name archive --warehouse /srv/archive",
    ),
)

entity_stores = typer.Typer(
    cls=Branch,
    rich_markup_mode="rich",
    help="Entity stores: flush, init, compact, verify.",
    epilog=examples(
        "modak-worker entities install",
        "modak-worker entities flush --dry-run",
        "modak-worker entities status",
    ),
)

store = typer.Typer(
    cls=Branch,
    rich_markup_mode="rich",
    help="Compact stores of time-partitioned Parquet files.",
    epilog=examples(
        "modak-worker measurements status",
        "modak-worker measurements compact --dry-run",
        "modak-worker measurements compact --tier hourly --database prod",
    ),
)


def _version(asked: bool) -> None:
    if asked:
        house.version()
        raise typer.Exit


@app.callback()
def top(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and every log event.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Modak keeps the cold half of a Postgres database in an open lake.

    All settings come from MODAK_* variables; modak-worker config lists them. Without a command, run is meant.
    """
    errors.set_debug(debug)


def _add(panel: str, name: str, function: object, *lines: str, to: typer.Typer = app) -> None:
    to.command(name, cls=Leaf, rich_help_panel=panel, epilog=examples(*lines))(function)  # type: ignore[type-var]


_add(WATCH, "run", run.run, "modak-worker run", "modak-worker run --demo", "MODAK_LOG=json modak-worker run")
_add(
    WATCH,
    "status",
    status.status,
    "modak-worker status",
    "modak-worker status --table public.events",
    "modak-worker status --json | jq '.tables[].lag'",
)
_add(WATCH, "top", operate.top, "modak-worker top", "modak-worker top --once", "modak-worker top --json")
_add(
    WATCH,
    "sql",
    sql.sql,
    'modak-worker sql "select kind, count(*) from events group by kind"',
    "modak-worker sql --format csv --output recent.csv 'select * from public.events where id > 100'",
)
_add(WATCH, "shell", sql.shell, "modak-worker shell", "modak-worker shell < report.sql")
_add(
    TABLES,
    "register",
    register.register,
    "modak-worker register --table public.events --pk id --tier-key occurred_at",
    "modak-worker register --table public.readings --pk tenant_id,device_id --tier-key at --dry-run",
    "modak-worker register --table public.accounts --pk id --tier-key id --mode mirrored",
    "modak-worker register --table public.prices --pk id --tier-key day --numeric-as string",
)
_add(
    TABLES,
    "unregister",
    register.unregister,
    "modak-worker unregister --table public.events",
    "modak-worker unregister --table public.events --drop-lake",
)
_add(
    TABLES,
    "tier",
    tier.tier,
    "modak-worker tier --table public.events --dry-run",
    "modak-worker tier --table public.events",
)
_add(
    TABLES,
    "compact",
    compact.compact,
    "modak-worker compact --table public.events --dry-run",
    "modak-worker compact --table public.events",
)
_add(
    TABLES,
    "pause",
    operate.pause,
    'modak-worker pause --table public.events --reason "migration of the schema"',
)
_add(TABLES, "resume", operate.resume, "modak-worker resume --table public.events")
_add(
    TABLES,
    "convert",
    mirror.convert,
    "modak-worker convert --table public.accounts --mode mirrored",
    "modak-worker convert --table public.accounts --mode tiered",
)
_add(TABLES, "reanchor", mirror.reanchor, "modak-worker reanchor --table public.accounts")
_add(TABLES, "accept", tier.accept, "modak-worker accept --table public.events")
_add(
    TABLES,
    "verify",
    verify.verify,
    "modak-worker verify --table public.events",
    "modak-worker verify --table public.events --sample 0.1",
    "modak-worker verify --table public.events --repair",
)
_add(
    LAKE,
    "ingest",
    ingest.ingest,
    "modak-worker ingest --table public.events --file part-1.parquet --file part-2.parquet",
    "modak-worker ingest --table public.events --file history/ --rewrite --dry-run",
    "modak-worker ingest --table public.events --jsonl history.jsonl",
)
_add(
    LAKE,
    "policy",
    maintenance.policy,
    "modak-worker policy --table public.events",
    "modak-worker policy --table public.events --set snapshot_retention_hours=6",
    "modak-worker policy --table public.events --reset",
)
_add(
    LAKE,
    "maintain",
    maintenance.maintain,
    "modak-worker maintain --table public.events",
    "modak-worker maintain --table public.events --no-wait",
    "modak-worker maintain --table public.events --dry-run",
)
_add(
    LAKE,
    "health",
    maintenance.health,
    "modak-worker health",
    "modak-worker health --table public.events",
    "modak-worker health --json | jq '.[].warnings'",
)
_add(
    LAKE,
    "erase",
    erase.erase,
    'modak-worker erase --table public.events --where "user_id = 17" --dry-run',
    "modak-worker erase --table public.events --pk 4711",
)
_add(
    "Commands",
    "list",
    profiles.profile_list,
    "modak-worker profile list",
    "modak-worker profile list --json",
    to=profile,
)
_add(
    "Commands",
    "create",
    profiles.profile_create,
    "modak-worker profile create --name analytics --warehouse s3://analytics-lake/w --credentials analytics",
    "modak-worker profile create --name archive --warehouse /srv/archive --default",
    to=profile,
)
_add("Commands", "check", profiles.profile_check, "modak-worker profile check analytics", to=profile)
app.add_typer(profile, name="profile", rich_help_panel=LAKE)
for _name, _command, _examples in (
    ("install", entities.install, ("modak-worker entities install",)),
    (
        "flush",
        entities.flush,
        ("modak-worker entities flush --dry-run", "modak-worker entities flush --schema invoice"),
    ),
    (
        "init",
        entities.init,
        ("modak-worker entities init --schema 7", "modak-worker entities init --schema 7 --replace-delta"),
    ),
    ("compact", entities.compact, ("modak-worker entities compact --dry-run", "modak-worker entities compact")),
    ("status", entities.status, ("modak-worker entities status", "modak-worker entities status --json")),
    (
        "reconcile",
        entities.reconcile,
        ("modak-worker entities reconcile", "modak-worker entities reconcile --repair --gc"),
    ),
    ("query", entities.query, ('modak-worker entities query "select count(*) from invoice"',)),
    ("verify", entities.verify, ("modak-worker entities verify", "modak-worker entities verify --schema invoice")),
):
    _add("Commands", _name, _command, *_examples, to=entity_stores)
app.add_typer(entity_stores, name="entities", rich_help_panel=LAKE)
_add("Commands", "status", measurements.status, "modak-worker measurements status", to=store)
_add(
    "Commands",
    "candidates",
    measurements.candidates,
    "modak-worker measurements candidates --tier hourly",
    to=store,
)
_add(
    "Commands",
    "compact",
    measurements_work.compact,
    "modak-worker measurements compact --dry-run",
    "modak-worker measurements compact --tier hourly --database prod --measurement cpu",
    to=store,
)
_add("Commands", "recover", measurements_work.recover, "modak-worker measurements recover", to=store)
_add("Commands", "jobs", measurements.jobs, "modak-worker measurements jobs", to=store)
_add("Commands", "history", measurements.history, "modak-worker measurements history --limit 5", to=store)
_add("Commands", "verify", measurements.verify, "modak-worker measurements verify --database prod", to=store)
_add(
    "Commands",
    "generate",
    measurements_work.generate,
    "modak-worker measurements generate --hours 6 --files 50",
    to=store,
)
_add(
    "Commands",
    "export",
    measurements_work.export,
    "modak-worker measurements export --database prod --measurement cpu",
    "modak-worker measurements export --database prod --measurement cpu --drop",
    to=store,
)
app.add_typer(store, name="measurements", rich_help_panel=LAKE)
_add(LAKE, "compact-job", compact_job.compact_job, "modak-worker compact-job < order.json")
_add(HOUSE, "config", house.config, "modak-worker config", "modak-worker config --json")
_add(HOUSE, "stop", house.stop, "modak-worker stop")
_add(HOUSE, "version", house.version, "modak-worker version")


def program(args: Sequence[str]) -> typer.Typer:
    """The program for one command line: with the one command that is asked for, or with all where it is another thing.

    Typer makes every command that it knows before it looks for the one that is meant, which takes longer than most
    commands do.
    """
    asked = next((argument for argument in with_default(args) if argument != "--debug"), None)
    one = copy(app)
    one.registered_commands = [command for command in app.registered_commands if command.name == asked]
    one.registered_groups = [group for group in app.registered_groups if group.name == asked]
    return one if one.registered_commands or one.registered_groups else app


def main() -> None:
    """The installed program."""
    program(sys.argv[1:])()


def console() -> None:
    """The same program with the web console: its `run` serves the pages too."""
    program(sys.argv[1:])(prog_name="modak-console", obj=run.WITH_CONSOLE)
