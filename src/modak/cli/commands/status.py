"""`status`: what every registered table is doing, at a glance or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import count, dump, fields, fits, number, paint, record, say, size
from modak.cli.output import table as grid
from modak.cli.parsing import JsonOption
from modak.core.errors import Refused
from modak.core.names import TableName
from modak.core.states import PartitionState

if TYPE_CHECKING:
    from modak.tables.status import TableStatus


def status(
    table: Annotated[
        str | None, typer.Option("--table", metavar="SCHEMA.TABLE", help="Only this table, in full.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show how every registered table is doing.

    Cut-line, snapshot, partitions by state, lag, bytes on each side, the last operation, and what needs attention.
    """
    from modak.cli.place import opened

    name = TableName.parse(table) if table is not None else None
    with opened() as site:
        from modak.tables.status import collect

        found = tuple(row for row in collect(site) if name is None or str(row.name) == str(name))
        if name is not None and not found:
            raise Refused(
                "tables.not_registered",
                f"{name} is not registered.",
                hint="modak-worker status lists the tables that are; modak-worker register adds one.",
            )
        if json:
            dump({"database": site.dsn.safe(), "tables": [record(row) for row in found]})
        elif name is not None:
            show_one(found[0])
        else:
            show(found)


_COLUMNS: tuple[str, ...] = (
    "Table",
    "Mode",
    "Cut-line T",
    "Snapshot S",
    "Retention R",
    "Partitions",
    "Heap",
    "Lake",
    "Lag",
    "Delta",
    "Last operation",
)
_SPARED = ("Snapshot S", "Mode", "Last operation", "Delta")
"""Columns that a narrow terminal does without, in this order; `status --table` shows all of them."""
_NUMBERS = frozenset({"Heap", "Lake", "Delta"})


def show(rows: Sequence[TableStatus]) -> None:
    """All tables in a grid (one below the other where that is too wide), and what somebody should look at."""
    if not rows:
        say("No table is registered. Add one: modak-worker register --table … --pk … --tier-key …")
        return
    columns, lines = _COLUMNS, [_line(row) for row in rows]
    if not any(row.retention_line for row in rows):
        columns, lines = _without("Retention R", columns, lines)
    for name in _SPARED if len(rows) > 1 else ():
        if not fits(columns, lines):
            columns, lines = _without(name, columns, lines)
    if not fits(columns, lines):
        for row in rows:
            show_one(row)
            say()
        return
    grid(columns, lines, right=_NUMBERS)
    for row in rows:
        for problem in row.problems:
            say(f"{paint('look at', 'yellow')} {row.name}: {problem}")


def _without(
    name: str, columns: tuple[str, ...], lines: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    at = columns.index(name)
    return columns[:at] + columns[at + 1 :], [line[:at] + line[at + 1 :] for line in lines]


def _line(row: TableStatus) -> tuple[str, ...]:
    return (
        str(row.name),
        _mode(row),
        _or_dash(row.cut_line),
        _or_dash(row.snapshot_id),
        _or_dash(row.retention_line),
        partitions(row.partitions),
        size(row.heap_bytes),
        size(row.lake_bytes),
        _or_dash(row.lag),
        number(row.delta_backlog),
        _or_dash(row.last_operation),
    )


def show_one(row: TableStatus) -> None:
    """Everything about one table."""
    fields(
        {
            "table": str(row.name),
            "mode": _mode(row),
            "cut-line T": _or_dash(row.cut_line),
            "snapshot S": _or_dash(row.snapshot_id),
            "retention line R": _or_dash(row.retention_line),
            "partitions": partitions(row.partitions),
            "heap": size(row.heap_bytes),
            "lake": f"{size(row.lake_bytes)} in {count(row.lake_files, 'file')}",
            "lag": _or_dash(row.lag),
            **_mirror(row),
            "corrections waiting": number(row.delta_backlog),
            "pinned readers": number(row.pins),
            "last operation": _or_dash(row.last_operation),
            "metadata": _or_dash(row.metadata_location),
        }
    )
    for problem in row.problems:
        say(f"{paint('look at', 'yellow')}: {problem}")


def _mode(row: TableStatus) -> str:
    return f"{row.mode}, keep-heap" if row.keep_heap else row.mode


def _mirror(row: TableStatus) -> dict[str, str]:
    if row.mode != "mirrored":
        return {}
    kept = "–" if row.slot_retained_bytes is None else size(row.slot_retained_bytes)
    return {"frontier F": row.mirror_frontier or "copying", "WAL kept by its slot": kept}


def partitions(counts: dict[str, int]) -> str:
    """`1 hot, 7 tiered`, in the order of a partition's life."""
    known = [state.value for state in PartitionState]
    order = sorted(counts, key=lambda state: known.index(state) if state in known else len(known))
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state]) or "none"


def _or_dash(value: object) -> str:
    return "–" if value is None or value == "" else str(value)
