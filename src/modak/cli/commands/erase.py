"""`erase`: rows that must be gone everywhere, with evidence that they are."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import count, note, number, paint, say
from modak.cli.parsing import TableOption, pairs
from modak.core.errors import ModakError, NotLeader, UsageError
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.maintenance.erase import Erased
    from modak.tables.site import Site

POLL_SECONDS = 0.3
PATIENCE_SECONDS = 60.0
"""How long a leader may be gone before whoever waits is told."""


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
    local: Annotated[
        bool, typer.Option("--local", help="Erase in this process, under the same lock as a worker.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="With --local: how long to wait for the lead."),
    ] = 20.0,
) -> None:
    """Erase rows from heap, delta, lake and every retained snapshot.

    A worker that leads does it beside its other work; without one it is done here. Files are rewritten without the
    rows, older snapshots expire and lose their files as soon as no reader holds them, and a scan of what is left proves
    that nothing matches any more.
    """
    name = TableName.parse(table)
    if (where is None) == (not pk):
        raise UsageError("usage.erase", "Give either --where or --pk.", hint='For instance --where "user_id = 17".')
    from modak.cli.place import opened

    with opened(log_level="warning" if dry_run else "info") as site:
        from modak.tables.maintenance.condition import by_key
        from modak.tables.maintenance.erase import count as count_rows
        from modak.tables.maintenance.erase import erase_rows

        condition = where if where is not None else by_key(site, name, _keys(pk or []))
        if dry_run:
            heap, lake = count_rows(site, name, condition)
            say(f"{count(heap, 'row')} of the heap and {number(lake)} of the lake would be erased.")
            note("Nothing was changed.")
            return
        from modak.runtime.leader import Leader

        with ExitStack() as lead:
            try:
                leader = lead.enter_context(Leader.campaign(site, wait if local else 0.0))
            except NotLeader:
                if local:
                    raise
                done = _ask(site, name, condition)
            else:
                done = erase_rows(site, leader.epoch, name, condition)
    _show(done)
    if done.found:
        raise ModakError(
            "erase.found",
            f"{count(done.found, 'row')} still match.",
            hint="Somebody writes them anew, or the condition means different things to Postgres and to Spark: with"
            " --dry-run the command tells how many rows either finds.",
        )
    if done.waiting or done.freeing:
        raise typer.Exit(1)


def _ask(site: Site, name: TableName, condition: str) -> Erased:
    """File the erasure, and wait until the leader has done it."""
    from modak.tables.maintenance import erasures
    from modak.tables.maintenance.erase import refuse_unreadable

    refuse_unreadable(site, name, condition)
    erasure = erasures.ask(site, name, condition)
    note(f"Erasure {erasure} of {name} is filed; the worker that leads executes it …")
    try:
        return _wait(site, name, erasure)
    except KeyboardInterrupt:
        if erasures.withdraw(site, erasure):
            note("It had not begun and is withdrawn.")
        else:
            note(f"The worker goes on with it; modak.erasures tells what becomes of erasure {erasure}.")
        raise


def _wait(site: Site, name: TableName, erasure: int) -> Erased:
    from modak.tables.maintenance import erasures
    from modak.tables.maintenance.erase import Erased
    from modak.tables.maintenance.requests import leader

    alone_since: float | None = None
    while True:
        found = erasures.look(site, erasure)
        if found is None:
            raise ModakError("erase.gone", f"{name} was unregistered while its erasure waited.")
        if found.error:
            raise ModakError("erase.failed", f"Erasure {erasure} of {name} failed: {found.error}")
        if found.answered and found.outcome is not None:
            return Erased(**found.outcome)
        if leader(site) is not None:
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > PATIENCE_SECONDS:
            taken_back = erasures.withdraw(site, erasure)
            raise ModakError(
                "erase.no_leader",
                f"The worker went away; erasure {erasure} "
                + ("is withdrawn, nothing was changed." if taken_back else "is finished by the next one that leads."),
                hint="Start one with modak-worker run, or erase here with --local.",
            )
        time.sleep(POLL_SECONDS)


def _keys(given: list[str]) -> dict[str, str] | str:
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    return pairs("--pk", given)


def _show(done: Erased) -> None:
    say(
        f"{paint('erased', 'green')} {count(done.heap_rows, 'row')} of the heap, {number(done.lake_rows)} of the lake; "
        f"{count(done.files_rewritten, 'file')} rewritten, {count(done.snapshots_expired, 'snapshot')} expired."
    )
    if done.waiting:
        say(
            f"Readers still hold {count(done.waiting, 'older snapshot')}; the worker expires what they hold as soon as "
            "their pins end, or run this command again."
        )
    else:
        say(
            f"A scan of the heap, the delta and {count(done.snapshots_scanned, 'retained snapshot')} found "
            f"{count(done.found, 'matching row')}."
        )
    if done.freeing:
        say(
            "Files that only older snapshots had are still stored, and rows in them that were erased "
            f"({count(done.freeing, 'clean-up')} to come to an end); the worker goes on with that, or run this command "
            "again."
        )
