"""`register` and `unregister`: taking a table in, and letting it go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import count, duration, fields, note, paint, say, size
from modak.cli.parsing import TableOption, check_length, column, columns
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.registration.preflight import Preflight
    from modak.tables.site import Site


def register(
    *,
    table: TableOption,
    pk: Annotated[
        str,
        typer.Option("--pk", metavar="COLUMN[,COLUMN…]", help="Primary key columns, with commas between."),
    ],
    tier_key: Annotated[
        str,
        typer.Option("--tier-key", metavar="COLUMN", help="The aging column: an integer, date or timestamp."),
    ],
    mode: Annotated[str, typer.Option(metavar="tiered|mirrored", help="What kind of life the table leads.")] = "tiered",
    heap_retention: Annotated[
        str | None,
        typer.Option(metavar="N", help="Mirrored only: drop heap partitions this far behind the highest tier key."),
    ] = None,
    lake_retention: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tiered only: expire lake rows this far behind the cut-line. Needs a width."),
    ] = None,
    keep_heap: Annotated[
        bool,
        typer.Option("--keep-heap", help="Tiered only: never drop heap partitions. Excludes --lake-retention."),
    ] = False,
    chunk_rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Mirrored only: rows per chunk of the first copy (50000 if not given)."),
    ] = None,
    partition_width: Annotated[
        str | None,
        typer.Option(metavar="N", help="Width of a lake partition, 0 for none; else that of the first heap partition."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Storage profile of the lake; the default profile if not given."),
    ] = None,
    numeric_as: Annotated[
        str,
        typer.Option(metavar="decimal:SCALE|string", help="What numeric without precision becomes in the lake."),
    ] = "decimal:18",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check, and say how much would move.")] = False,
) -> None:
    """Take a table in and create its lake table.

    The table is checked first and everything wrong is told in one list. A mirrored table is copied before the command
    ends. Running it again is safe: the same registration is a no-op, an interrupted copy goes on, a different
    registration is refused and says what differs.
    """
    from modak.tables.registration.request import RegisterRequest, check_flags

    request = RegisterRequest(
        table=TableName.parse(table),
        pk=columns("--pk", pk),
        tier_key=column("--tier-key", tier_key),
        mode=mode,
        heap_retention=heap_retention,
        lake_retention=lake_retention,
        keep_heap=keep_heap,
        chunk_rows=chunk_rows,
        partition_width=partition_width,
        profile=profile,
        numeric_as=numeric_as,
    )
    check_length("--heap-retention", heap_retention, least=1)
    check_length("--lake-retention", lake_retention, least=1)
    check_length("--partition-width", partition_width)
    check_flags(request)

    from modak.cli.place import opened

    with opened(log_level="info" if mode == "mirrored" and not dry_run else "warning") as site:
        from modak.tables.registration.register import preflight
        from modak.tables.registration.register import register as take_in

        if dry_run:
            found = preflight(site, request)
            if found.registered:
                _say_known(request.table)
                return
            _show(found)
            found.refuse_if_wrong(request.table)
            say(f"{request.table} can be registered. Nothing was changed.")
            return
        done = take_in(site, request)
        if not done.created and not done.rows_copied:
            _say_known(done.table)
            return
        _show(done.preflight)
        say(f"{paint('registered', 'green')} {done.table}")
        fields({"cut-line": done.cut_line or "–", "width": done.width, "lake": done.location})
        if done.mode == "mirrored":
            say(f"Copied {count(done.rows_copied or 0, 'row')}.")
            note("The daemon (modak-worker run) follows its changes from here on.")
            return
        note("The daemon (modak-worker run) tiers it from its next cycle on; modak-worker tier does one pass now.")


def unregister(
    table: TableOption,
    drop_lake: Annotated[
        bool,
        typer.Option("--drop-lake", help="Also delete the lake table, for a tiered table the only copy of old rows."),
    ] = False,
    discard_corrections: Annotated[
        bool,
        typer.Option("--discard-corrections", help="Go on although corrections wait in modak.delta: they are lost."),
    ] = False,
) -> None:
    """Let a table go; its lake table stays.

    Catalog rows and triggers are removed, and it leaves the catalog of MODAK_CATALOG_URI. With --drop-lake the lake
    table is deleted as well.
    """
    from modak.cli.place import opened

    name = TableName.parse(table)
    with opened() as site:
        from modak.tables.registration.unregister import unregister as let_go

        done = let_go(site, name, drop_lake=drop_lake, discard_corrections=discard_corrections)
        foreign = _leave_catalogs(site, done.catalogs)
    say(f"{paint('unregistered', 'green')} {name}")
    if done.kept_location is not None:
        say(f"The lake table stays at {done.kept_location}.")
    else:
        say(f"The lake table is gone ({count(done.files_removed, 'file')} removed).")
    for line in foreign:
        say(line)
    if done.corrections_discarded:
        say(f"Discarded {count(done.corrections_discarded, 'correction')}.")


def _leave_catalogs(site: Site, catalogs: Sequence[str]) -> list[str]:
    """Take out what still stands in foreign catalogs, and tell what became of it."""
    if not catalogs:
        return []
    from modak.core.errors import ModakError
    from modak.runtime.withdrawing import withdraw_all

    ours, told = site.settings.lake.catalog_uri, []
    for uri in catalogs:
        if uri != ours:
            told.append(f"The catalog {uri} still shows it; a worker whose MODAK_CATALOG_URI that is takes it out.")
            continue
        try:
            withdraw_all(site)
            told.append("It is out of the catalog of MODAK_CATALOG_URI, too.")
        except ModakError as error:
            told.append("The catalog of MODAK_CATALOG_URI still shows it; the daemon takes it out later.")
            told.append(error.message)
    return told


def _say_known(table: TableName) -> None:
    say(f"{table} is registered already, with the same settings. Nothing was changed.")


def _show(preflight: Preflight) -> None:
    for remark in preflight.notes:
        note(f"{paint('note:', 'yellow')} {remark}")
    if preflight.wal_bytes:
        note(f"Meanwhile Postgres keeps about {size(preflight.wal_bytes)} of WAL, if it is written as fast as so far.")
    say(
        f"{count(preflight.partitions, 'partition')}, about {count(preflight.rows, 'row')}, {size(preflight.bytes)}; "
        f"moving them takes about {duration(preflight.seconds)}."
    )
