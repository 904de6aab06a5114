"""In which columns heap, lake and delta are compared: the heap's names, the lake's types and field ids.

The lake follows the heap's columns with the next commit, so at the moment of a verification it may be behind: a renamed
column is found by its number, a new one shows its initial default, and one whose old rows still wait to be filled is
left out by name. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from modak.catalog.delta import Rename, image_cases, quoted
from modak.catalog.records import TableRecord
from modak.core.errors import Refused
from modak.lake.changes import AddColumn, RenameColumn, WidenColumn
from modak.lake.model import LakeColumn, LakeTable
from modak.lake.types import MappedColumn
from modak.postgres.model import PgTable
from modak.tables.backfill import BACKFILL
from modak.tables.columns import shown_unsaid
from modak.tables.evolve import plan_evolution
from modak.tables.registration.preflight import map_columns


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of a comparison, in the heap's order."""

    mapped: tuple[MappedColumn, ...]
    columns: tuple[LakeColumn, ...]
    lake_names: tuple[str, ...]
    """What each column is called in the lake so far."""
    pk: tuple[int, ...]
    """Where the columns of the primary key stand, in the order of registration."""
    tier: int
    """Where the tier key stands."""
    left_out: tuple[str, ...] = ()
    """Columns that cannot be compared yet."""
    renames: tuple[Rename, ...] = ()
    """What delta rows from before a rename have under another name."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What delta rows from before a column show in it, as Postgres' text, where no initial default says it."""

    @property
    def keys(self) -> tuple[int, ...]:
        """Where the columns of a row's identity stand."""
        return self.pk if self.tier in self.pk else (*self.pk, self.tier)

    @property
    def tier_column(self) -> LakeColumn:
        """The tier key in the lake."""
        return self.columns[self.tier]

    def only_keys(self) -> Shape:
        """The same without all columns that are no part of a key."""
        kept = self.keys
        pick = {at: new for new, at in enumerate(kept)}
        return Shape(
            tuple(self.mapped[at] for at in kept),
            tuple(self.columns[at] for at in kept),
            tuple(self.lake_names[at] for at in kept),
            tuple(pick[at] for at in self.pk),
            pick[self.tier],
            self.left_out,
            self.renames,
            self.missing,
        )


def shape_of(record: TableRecord, heap: PgTable, lake: LakeTable) -> Shape:
    """How rows of a table are compared; raises where heap and lake have no common type."""
    names = {column.attnum: column.name for column in heap.columns}
    # By number: a key column may have another name than it was registered with.
    pk = [names[number] for number in record.pk_attnums]
    tier = names[record.tier_attnum]
    mapped, problems = map_columns(heap, record.numeric_as, frozenset({*pk, tier}))
    if problems:
        raise Refused("verify.column_type", problems[0].message, hint=problems[0].hint)
    evolution = plan_evolution(heap, mapped, lake)
    known = {column.name: (column.name, column) for column in lake.schema}
    for change in evolution.changes:
        if isinstance(change, RenameColumn):
            known[change.new_name] = known.pop(change.name)
        elif isinstance(change, AddColumn):
            added = LakeColumn(change.name, change.type, initial_default=change.initial_default)
            known[change.name] = (change.name, added)
        elif isinstance(change, WidenColumn):
            was, column = known[change.name]
            known[change.name] = (was, replace(column, type=change.type))
    waiting = {*evolution.filled, *json.loads(lake.properties.get(BACKFILL, "{}"))}
    kept = [one for one in mapped if one.column.name not in waiting]
    order = [one.column.name for one in kept]
    return Shape(
        tuple(kept),
        tuple(_placed(known[name][1], name) for name in order),
        tuple(known[name][0] for name in order),
        tuple(order.index(name) for name in pk),
        order.index(tier),
        tuple(sorted(waiting & {one.column.name for one in mapped})),
        missing=shown_unsaid(heap, {name: column for name, (_, column) in known.items()}),
    )


def _placed(column: LakeColumn, name: str) -> LakeColumn:
    # Whatever a side holds is compared, NULL in a required column too; so nothing is refused while reading.
    return replace(column, name=name, required=False)


def payload_texts(shape: Shape) -> list[str]:
    """SQL that takes the text of every column out of a delta row's payload."""
    return [_payload(one.column.name, shape) for one in shape.mapped]


def has_column(name: str, renames: Sequence[Rename]) -> str:
    """SQL: whether a delta row was written with the column in place."""
    return "(" + " OR ".join(f"({condition})" for condition, _ in image_cases(name, renames)) + ")"


def _payload(name: str, shape: Shape) -> str:
    cases = " ".join(f"WHEN {when} THEN payload ->> {quoted(key)}" for when, key in image_cases(name, shape.renames))
    shown = f" ELSE {quoted(shape.missing[name])}" if name in shape.missing else ""
    return f"CASE {cases}{shown} END"
