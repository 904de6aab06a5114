"""Commands whose capability has not landed: every flag is read and checked as it will be, then the answer is honest."""

from __future__ import annotations

import difflib
import os
import re
from typing import Annotated

import typer

from modak.cli.parsing import TableOption, error_code, not_yet, pairs
from modak.core.errors import UsageError
from modak.core.names import TableName

POLICY_KEYS = {
    "maintenance_enabled": bool,
    "rewrite_enabled": bool,
    "rewrite_target_bytes": int,
    "rewrite_min_input_files": int,
    "delete_compaction_enabled": bool,
    "delete_compaction_min_deletes": int,
    "manifest_rewrite_enabled": bool,
    "manifest_rewrite_min_manifests": int,
    "snapshot_expiry_enabled": bool,
    "snapshot_retention_hours": int,
    "snapshot_min_retained": int,
    "snapshot_max_count": int,
    "orphan_sweep_enabled": bool,
    "orphan_grace_hours": int,
}
"""The maintenance policy of an Iceberg table: its keys and what their values are."""

FORMATS = ("iceberg",)
SCHEMES = ("file", "s3", "s3a", "gs", "abfs", "abfss")

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def verify(table: TableOption) -> None:
    """Compare heap and lake; exit code 1 on a mismatch."""
    TableName.parse(table)
    raise not_yet("verify")


def ingest(
    table: TableOption,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="PARQUET", help="Staged Parquet, adopted by reference; repeat for more."),
    ] = None,
    jsonl: Annotated[str | None, typer.Option("--jsonl", metavar="FILE", help="Records as JSON lines.")] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[PARQUET]…", hidden=True)] = None,
) -> None:
    """Commit cold rows straight into the lake.

    One atomic upsert by primary key. Every row must be below the cut-line and at or above the retention line.
    """
    TableName.parse(table)
    files = [*(file or []), *(more or [])]
    if more and not file:
        raise UsageError("usage.ingest", f"What is {more[0]!r}?", hint="Name Parquet files with --file.")
    if bool(files) == (jsonl is not None):
        raise UsageError(
            "usage.ingest", "Give either --file or --jsonl.", hint="Parquet comes with --file, JSON lines with --jsonl."
        )
    for path in [*files, *([jsonl] if jsonl else [])]:
        if "://" not in path and not os.path.isfile(path):
            raise UsageError("usage.ingest", f"There is no file {path!r}.")
    raise not_yet("ingest")


def policy(
    table: TableOption,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; repeat for more.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="KEY", help="Back to the default; repeat for more.")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="All settings back to their defaults.")] = False,
) -> None:
    """Show or edit a maintenance policy.

    Without edits it prints every setting that maintenance will run with and where each comes from.
    """
    TableName.parse(table)
    chosen = pairs("--set", set_ or [])
    for key, value in chosen.items():
        check_policy(key, value)
    for key in unset or []:
        _known(key)
        if key in chosen:
            raise UsageError("usage.unset", f"{key} is both set and unset.")
    if reset and (chosen or unset):
        raise UsageError("usage.reset", "--reset stands alone.", hint="Reset first, then set in a second command.")
    raise not_yet("policy")


def maintain(
    table: TableOption,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="File the request and return.")] = False,
) -> None:
    """Ask the leader for a maintenance pass now.

    The command waits for the pass and prints what it did.
    """
    TableName.parse(table)
    raise not_yet("maintain --no-wait" if no_wait else "maintain")


def profile_list() -> None:
    """List the storage profiles."""
    raise not_yet("profile list")


def profile_create(
    *,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What tables call it.")],
    warehouse: Annotated[
        str, typer.Option("--warehouse", metavar="ROOT", help="A folder, or an s3://, gs:// or abfs:// root.")
    ],
    format_: Annotated[str, typer.Option("--format", metavar="PLUGIN", help="The lake format.")] = "iceberg",
    config: Annotated[
        str | None, typer.Option("--config", metavar="KEY=VALUE;…", help="Overrides, with semicolons between.")
    ] = None,
    credentials: Annotated[
        str | None,
        typer.Option("--credentials", metavar="REF", help="Which MODAK_CREDENTIALS_<REF> to use; never a key."),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Make it the default profile.")] = False,
) -> None:
    """Create a storage profile."""
    if not _NAME.fullmatch(name):
        raise UsageError("usage.name", f"--name {name!r} is not a profile name.", hint="Use letters, digits, - and _.")
    scheme, separator, rest = warehouse.partition("://")
    if not warehouse.strip() or (separator and (scheme not in SCHEMES or not rest)):
        raise UsageError(
            "usage.warehouse",
            f"--warehouse {warehouse!r} is not a place for a lake.",
            hint="Use a folder, s3://, gs:// or abfs://.",
        )
    if format_ not in FORMATS:
        raise UsageError("usage.format", f"There is no lake format {format_!r}.", hint=f"Known: {', '.join(FORMATS)}.")
    if config is not None:
        pairs("--config", (entry for entry in config.split(";") if entry.strip()))
    if credentials is not None and not _NAME.fullmatch(credentials):
        # It may be a key pasted by mistake, so it is not quoted.
        raise UsageError(
            "usage.credentials",
            "--credentials takes the name of a reference, never a key.",
            hint="Put the key into MODAK_CREDENTIALS_ANALYTICS and write --credentials analytics.",
        )
    raise not_yet(f"profile create {'--default ' if default else ''}".strip())


def check_policy(key: str, value: str) -> None:
    """Refuse an unknown key or a value of another kind."""
    kind = _known(key)
    if kind is bool and value.lower() not in ("true", "false"):
        raise UsageError("usage.set", f"{key} takes true or false, not {value!r}.")
    if kind is int and not re.fullmatch(r"\d+", value):
        raise UsageError("usage.set", f"{key} takes a whole number, not {value!r}.")


def _known(key: str) -> type:
    if key not in POLICY_KEYS:
        near = difflib.get_close_matches(key, POLICY_KEYS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(POLICY_KEYS)}."
        raise UsageError(error_code("--set"), f"There is no policy key {key!r}.", hint=hint)
    return POLICY_KEYS[key]
