"""`modak-worker`: the commands and where each is listed. Importing this file loads no room but `core`."""

from __future__ import annotations

from typing import Annotated

import typer

from modak.cli import errors
from modak.cli.commands import house, later, register, run, status, tier
from modak.cli.family import HOUSE, LAKE, TABLES, WATCH, Branch, Family, Leaf, examples

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
    help="List or create storage profiles.",
    epilog=examples(
        "modak-worker profile list",
        "modak-worker profile create --name archive --warehouse /srv/archive",
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
_add(
    TABLES,
    "register",
    register.register,
    "modak-worker register --table public.events --pk id --tier-key occurred_at",
    "modak-worker register --table public.readings --pk tenant_id,device_id --tier-key at --dry-run",
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
_add(TABLES, "accept", tier.accept, "modak-worker accept --table public.events")
_add(TABLES, "verify", later.verify, "modak-worker verify --table public.events")
_add(
    LAKE,
    "ingest",
    later.ingest,
    "modak-worker ingest --table public.events --file part-1.parquet --file part-2.parquet",
    "modak-worker ingest --table public.events --jsonl history.jsonl",
)
_add(
    LAKE,
    "policy",
    later.policy,
    "modak-worker policy --table public.events",
    "modak-worker policy --table public.events --set snapshot_retention_hours=6",
    "modak-worker policy --table public.events --reset",
)
_add(
    LAKE,
    "maintain",
    later.maintain,
    "modak-worker maintain --table public.events",
    "modak-worker maintain --table public.events --no-wait",
)
_add("Commands", "list", later.profile_list, "modak-worker profile list", to=profile)
_add(
    "Commands",
    "create",
    later.profile_create,
    "modak-worker profile create --name analytics --warehouse s3://analytics-lake/w --credentials analytics",
    "modak-worker profile create --name archive --warehouse /srv/archive --default",
    to=profile,
)
app.add_typer(profile, name="profile", rich_help_panel=LAKE)
_add(HOUSE, "config", house.config, "modak-worker config", "modak-worker config --json")
_add(HOUSE, "stop", house.stop, "modak-worker stop")
_add(HOUSE, "version", house.version, "modak-worker version")


def main() -> None:
    """The installed program."""
    app()
