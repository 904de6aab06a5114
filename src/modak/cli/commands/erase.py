"""`erase`: rows that must be gone everywhere, with evidence that they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import note, number, paint, say
from modak.cli.parsing import TableOption, pairs
from modak.core.errors import UsageError
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.maintenance.erase import Erased


def erase(
    table: TableOption,
    where: Annotated[
        str | None, typer.Option("--where", metavar="CONDITION", help="Rows to erase, as in a WHERE clause.")
    ] = None,
    pk: Annotated[
        list[str] | None,
        typer.Option("--pk", metavar="VALUE", help="The row of a key; column=value for each of several key columns."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the rows and change nothing.")] = False,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, help="How long to wait for another worker to give up the lead."
        ),
    ] = 20.0,
) -> None:
    """Erase rows from heap, delta, lake and every retained snapshot.

    Files are rewritten without the rows, older snapshots expire as soon as no reader holds them, and a scan of what is
    left proves that nothing matches any more.
    """
    name = TableName.parse(table)
    if (where is None) == (not pk):
        raise UsageError("usage.erase", "Give either --where or --pk.", hint='For instance --where "user_id = 17".')
    from modak.cli.place import opened

    with opened(log_level="warning" if dry_run else "info") as site:
        from modak.tables.maintenance.erase import by_key, count, erase_rows

        condition = where if where is not None else by_key(site, name, _keys(pk or []))
        if dry_run:
            heap, lake = count(site, name, condition)
            say(f"{number(heap)} rows of the heap and {number(lake)} of the lake would be erased.")
            note("Nothing was changed.")
            return
        from modak.runtime.leader import Leader

        with Leader.campaign(site, wait) as leader:
            done = erase_rows(site, leader.epoch, name, condition)
    _show(done)
    if done.waiting:
        raise typer.Exit(1)


def _keys(given: list[str]) -> dict[str, str] | str:
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    return pairs("--pk", given)


def _show(done: Erased) -> None:
    say(
        f"{paint('erased', 'green')} {number(done.heap_rows)} rows of the heap, {number(done.lake_rows)} of the lake; "
        f"{number(done.files_rewritten)} files rewritten, {number(done.snapshots_expired)} snapshots expired."
    )
    if done.waiting:
        say(
            f"{number(done.waiting)} older snapshots are still held by readers; the worker expires them as soon as "
            "their pins end, or run this command again."
        )
    else:
        say(
            f"A scan of the heap, the delta and {number(done.snapshots_scanned)} retained snapshots found "
            f"{number(done.found)} matching rows."
        )
