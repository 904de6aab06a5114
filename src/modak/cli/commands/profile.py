"""`profile create | list | check`: where lakes may lie. Needs Postgres, and neither Spark nor Java."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import dump, duration, paint, say, table
from modak.cli.parsing import JsonOption, error_code
from modak.core.errors import ModakError, UsageError

if TYPE_CHECKING:
    from modak.catalog.records import Profile
    from modak.tables.site import Site

FORMATS = ("iceberg",)

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def profile_list(json: JsonOption = False) -> None:
    """List the storage profiles."""
    from modak.cli.place import opened

    with opened() as site:
        entries = [_entry(site, profile) for profile in site.reader.profiles()]
    if json:
        dump({"profiles": entries})
        return
    rows = [
        (
            ("* " if entry["default"] else "  ") + str(entry["name"]),
            str(entry["warehouse"]),
            str(entry["format"]),
            str(entry["credentials"] or "–") + ("" if entry["credentials_set"] else " (not set)"),
            str(entry["tables"]),
        )
        for entry in entries
    ]
    table(("Profile", "Warehouse", "Format", "Credentials", "Tables"), rows, right=frozenset({"Tables"}))


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
    """Create a storage profile.

    The catalog keeps the place and the name of the credentials; the credentials themselves stay in the environment of
    the worker. Tables registered with --profile NAME have their lake below the warehouse.
    """
    from modak.cli.place import opened

    if not _NAME.fullmatch(name):
        raise UsageError("usage.name", f"--name {name!r} is not a profile name.", hint="Use letters, digits, - and _.")
    if format_ not in FORMATS:
        raise UsageError("usage.format", f"There is no lake format {format_!r}.", hint=f"Known: {', '.join(FORMATS)}.")
    if credentials is not None and not _NAME.fullmatch(credentials):
        # It may be a key pasted by mistake, so it is not quoted.
        raise UsageError(
            "usage.credentials",
            "--credentials takes the name of a reference, never a key.",
            hint="Put the key into MODAK_CREDENTIALS_ANALYTICS and write --credentials analytics.",
        )
    from modak.tables.profiles import place_of, properties_of

    root = place_of(warehouse)
    pairs = properties_of(_config(config), root)
    with opened() as site:
        from modak.catalog import profiles

        with site.connect() as conn:
            created = profiles.create(
                conn, name, root, lake_format=format_, config=pairs, credentials=credentials, default=default
            )
        known = site.reader.profile(name)
        entry = _entry(site, known)
    if created:
        say(f"{paint('created', 'green')} profile {name}: {root}")
    else:
        say(f"Profile {name} is there already, as asked.")
    if known.is_default:
        say("It is the default: tables registered without --profile lie there.")
    if not entry["credentials_set"]:
        say(f"{entry['variable']} is not set here; the worker needs it in its environment.")


def profile_check(name: Annotated[str, typer.Argument(metavar="NAME", help="The profile.")]) -> None:
    """Try a profile's warehouse.

    Writes, reads, puts conditionally, lists and deletes one small object, and says how long each took. Exit code 1 and
    the cause when one of them fails.
    """
    from modak.cli.place import opened

    with opened() as site:
        from modak.tables.checking import check

        profile = site.reader.profile(name)
        key = site.keys[profile.profile_id]
        steps = check(key)
    say(f"{profile.name}: {key.root}")
    for step in steps:
        mark = paint("ok", "green") if step.problem is None else paint("failed", "red")
        say(f"  {step.name:<16} {mark}  {duration(step.seconds)}")
    last = steps[-1]
    if last.problem is not None:
        raise ModakError("profile.check", f"{last.name}: {last.problem}", hint=last.hint)
    say("The warehouse can hold a lake.")


def _entry(site: Site, profile: Profile) -> dict[str, object]:
    key = site.keys[profile.profile_id]
    variable = None
    if profile.credentials_ref is not None:
        variable = site.settings.credentials.variable(profile.credentials_ref)
    return {
        "name": profile.name,
        "warehouse": key.root,
        "format": profile.format,
        "config": dict(profile.config),
        "credentials": profile.credentials_ref,
        "credentials_set": key.missing is None,
        "variable": variable,
        "default": profile.is_default,
        "tables": sum(record.profile_id == profile.profile_id for record in site.reader.tables()),
    }


def _config(text: str | None) -> dict[str, str]:
    from modak.config.pairs import Malformed, read_pairs

    try:
        return read_pairs(text or "")
    except Malformed as error:
        hint = "For instance --config 's3.endpoint=http://minio:9000;s3.path-style-access=true'."
        raise UsageError(error_code("--config"), f"--config: {error}.", hint=hint) from None
