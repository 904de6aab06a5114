"""`top`, `pause` and `resume`: the group of workers live, and tables held back."""

from __future__ import annotations

import getpass
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modak.cli.output import count, dump, duration, number, on_terminal, paint, say
from modak.cli.output import table as grid
from modak.cli.parsing import JsonOption, TableOption
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.site import Site


_CLEAR = "\x1b[2J\x1b[H"


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and end; so does a pipe.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", help="How often to look.", min=0.2)] = 2.0,
    json: JsonOption = False,
) -> None:
    """Show live what the workers do.

    Who leads, what runs, waits and fails, and the last operations. Ctrl-C ends it.
    """
    from modak.cli.place import opened

    with opened() as site:
        live = on_terminal() and not once and not json
        while True:
            seen = _look(site)
            if json:
                dump(seen)
            else:
                if live:
                    say(_CLEAR)
                _show(seen)
            if not live:
                return
            try:
                time.sleep(every)
            except KeyboardInterrupt:
                return


def pause(
    table: TableOption,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="What others will read.")] = "",
) -> None:
    """Hold a table back: the leader leaves it alone until it is resumed.

    What runs now ends first. Reads and writes go on as always.
    """
    from modak.catalog import operators
    from modak.cli.place import opened

    name = TableName.parse(table)
    with opened() as site:
        record = site.reader.state(name).table
        with site.connect() as conn:
            new = operators.pause(conn, record.table_id, getpass.getuser(), reason)
    say(f"{name} is held back." if new else f"{name} was held back already.")


def resume(table: TableOption) -> None:
    """Let a table go on that was held back."""
    from modak.catalog import operators
    from modak.cli.place import opened

    name = TableName.parse(table)
    with opened() as site:
        record = site.reader.state(name).table
        with site.connect() as conn:
            was = operators.resume(conn, record.table_id)
    say(f"{name} goes on with the next round." if was else f"{name} was not held back.")


def _look(site: Site) -> dict[str, Any]:
    from dataclasses import asdict

    from modak.catalog import operators, overview

    with site.connect(autocommit=True) as conn:
        names = {row.table_id: str(row.name) for row in site.reader.tables()}
        held = [
            {"table": names.get(each.table_id, str(each.table_id)), **asdict(each)}
            for each in operators.pauses(conn).values()
        ]
        return {
            "leader": asdict(operators.lead(conn)),
            "workers": [asdict(each) for each in operators.workers(conn)],
            "tables": names,
            "paused": held,
            "operations": overview.operations(conn, 12),
        }


def _show(seen: dict[str, Any]) -> None:
    leader = seen["leader"]
    left = f", lease for {duration(leader['seconds_left'])} more" if leader["holder"] else ""
    say(f"{paint('leader', 'bold')} {leader['holder'] or 'nobody'}, epoch {leader['epoch']}{left}")
    for each in seen["workers"]:
        if each["late"] and each["holder"] == leader["holder"]:
            silent = duration(each["silent_seconds"])
            say(
                f"{paint('late', 'red')} the leader has not been heard of for {silent}; "
                "if it is gone, another worker leads when its lease ends"
            )
    grid(
        ("Worker", "Role", "Epoch", "Heard", "HTTP", "Running", "Due", "Failing", "Cycle"),
        [_worker(each) for each in seen["workers"]],
        right=frozenset({"Epoch", "Running", "Due", "Failing"}),
    )
    for worker in seen["workers"]:
        for item in worker["doing"].get("running", ()):
            what = f"{item['kind']} {item['table']}".rstrip()
            since = "" if item["seconds"] is None else f", {duration(item['seconds'])}"
            say(f"  {paint('running', 'cyan')} {what}{since}")
        for item in worker["doing"].get("failing", ()):
            what = f"{item['kind']} {item['table']}".rstrip()
            after = item["again_in_seconds"]
            again = "again when it is due" if after is None else f"again in {duration(after)}"
            say(f"  {paint('failing', 'red')} {what}: {item['code']}, {count(item['times'], 'time')}, {again}")
            if item.get("message"):
                say(f"    {item['message']} {item.get('hint', '')}".rstrip())
    for each in seen["paused"]:
        why = f": {each['reason']}" if each["reason"] else ""
        say(f"  {paint('paused', 'yellow')} {each['table']} by {each['paused_by']}{why}")
    rows = [
        (
            f"{each['started_at']:%H:%M:%S}",
            str(each["table"] or "–"),
            each["kind"],
            each["phase"],
            number(each["counters"].get("rows", 0)),
            duration(each["seconds"]) if each["seconds"] is not None else "–",
            each["error"] or "",
        )
        for each in seen["operations"]
    ]
    if rows:
        grid(("Began", "Table", "Kind", "Phase", "Rows", "Took", "Error"), rows, right=frozenset({"Rows", "Took"}))


def _worker(each: dict[str, Any]) -> tuple[str, ...]:
    doing = each["doing"]
    # The lists end somewhere, their numbers do not.
    counts = {key: len(doing.get(key, ())) for key in ("running", "failing")} | doing.get("counts", {})
    return (
        each["holder"],
        f"{each['role']}, late" if each["late"] else each["role"],
        "–" if each["epoch"] is None else str(each["epoch"]),
        f"{duration(each['silent_seconds'])} ago",
        each["address"] or "–",
        str(counts["running"]),
        str(doing.get("waiting", 0)),
        str(counts["failing"]),
        duration(doing.get("cycle_seconds", 0.0)),
    )
