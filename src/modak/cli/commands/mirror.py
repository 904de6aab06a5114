"""`convert` and `reanchor`: another mode for a table in place, and a mirror's anchor made anew by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from modak.cli.output import count, note, paint, say
from modak.cli.parsing import TableOption
from modak.core.errors import Refused
from modak.core.names import TableName


def convert(
    table: TableOption,
    mode: Annotated[str, typer.Option("--mode", metavar="tiered|mirrored", help="The life that it shall lead.")],
) -> None:
    """Change the mode of a table in place.

    A tiered table that keeps its heap becomes mirrored, or the other way round. No row is copied that is there already.
    """
    from modak.cli.place import opened

    name = TableName.parse(table)
    with opened(log_level="info") as site:
        from modak.tables.mirror.convert import convert as change

        rows = change(site, name, mode)
    say(f"{paint('converted', 'green')} {name}: it is {mode} now.")
    if mode == "mirrored":
        note(f"Wrote {count(rows, 'row')} into the lake; the daemon (modak-worker run) follows from here on.")
    else:
        note("The heap has every row; the daemon (modak-worker run) tiers the old partitions from its next cycle on.")


def reanchor(
    table: TableOption,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, help="How long to wait for another worker to give up the lead."
        ),
    ] = 20.0,
) -> None:
    """Make the slot of a mirrored table anew.

    Heap and lake are compared and only what differs is written. The daemon does the same when it finds a slot lost.
    """
    from modak.cli.place import opened

    name = TableName.parse(table)
    with opened(log_level="info") as site:
        from modak.runtime.leader import Leader
        from modak.tables.mirror.reanchor import reanchor as anchor

        record = site.reader.state(name).table
        if record.mode != "mirrored":
            raise Refused("mirror.mode", f"{name} is {record.mode}; only a mirrored table has a slot.")
        with Leader.campaign(site, wait) as leader:
            rows = anchor(site, leader.epoch, record)
    say(f"{paint('anchored', 'green')} {name}: {count(rows, 'row')} of the lake had fallen behind the heap.")
