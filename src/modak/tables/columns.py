"""Which column of the heap is which column of the lake: remembered by number in the lake table's own properties.

Whoever has only SQL cannot look into the lake's metadata; for them each commit notes the same in the catalog, as it is
once the commit has landed. Pure; a few texts per column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from modak.catalog.records import LakeColumns
from modak.lake.changes import AddColumn, Change, DropColumn, RenameColumn, SetProperties
from modak.lake.model import LakeColumn, LakeTable
from modak.postgres.model import PgTable

COLUMNS = "modak.columns"
"""Table property: attribute number in Postgres → column name in the lake, as JSON."""
RELID = "modak.relid"
"""Table property: the Postgres table that these numbers belong to; a table made anew numbers its columns anew."""


def column_property(heap: PgTable) -> dict[str, str]:
    """The property that remembers which heap column is which lake column."""
    numbers = {str(column.attnum): column.name for column in heap.columns}
    return {COLUMNS: json.dumps(numbers, sort_keys=True), RELID: str(heap.oid)}


def shown_unsaid(heap: PgTable, lake: Mapping[str, LakeColumn]) -> dict[str, str]:
    """What rows from before a column show, as Postgres' text, where no initial default of the lake says it."""
    return {
        column.name: column.missing_value
        for column in heap.columns
        if column.missing_value is not None and column.name in lake and lake[column.name].initial_default is None
    }


def lake_columns(properties: Mapping[str, str], names: Sequence[str], relid: int) -> LakeColumns:
    """What a lake table with these properties and columns knows of the Postgres table."""
    ours = properties.get(RELID) == str(relid)
    return LakeColumns(json.loads(properties.get(COLUMNS, "{}")) if ours else {}, tuple(names))


def lake_columns_after(lake: LakeTable, changes: Sequence[Change], relid: int) -> LakeColumns:
    """The same once these changes have landed."""
    names = [column.name for column in lake.schema]
    properties = dict(lake.properties)
    for change in changes:
        match change:
            case AddColumn(name):
                names.append(name)
            case RenameColumn(name, new_name):
                names[names.index(name)] = new_name
            case DropColumn(name):
                names.remove(name)
            case SetProperties(values, removed):
                properties = {key: value for key, value in properties.items() if key not in removed} | dict(values)
            case _:
                pass
    return lake_columns(properties, names, relid)
