"""The name mapping of a lake table: what files without field ids call its columns. Pure.

Adopted files carry no ids, so readers find their columns by these names. An entry belongs to a field id and outlives
every rename; a column that is dropped and added again under its old name is another field and gets no old values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modak.lake.model import LakeColumn

NAME_MAPPING = "schema.name-mapping.default"


def file_names(properties: Mapping[str, str]) -> dict[int, tuple[str, ...]] | None:
    """Field id → names in files; nothing for a table without a mapping."""
    text = properties.get(NAME_MAPPING)
    if text is None:
        return None
    return {entry["field-id"]: tuple(entry["names"]) for entry in json.loads(text) if "field-id" in entry}


def misnamed(properties: Mapping[str, str], columns: Sequence[LakeColumn], names: Iterable[str]) -> tuple[str, ...]:
    """Names that a file without ids may not use, because older such files mean another column by them."""
    known = file_names(properties) or {}
    owner = {name: field_id for field_id, several in known.items() for name in several}
    here = {column.name: column.field_id for column in columns}
    return tuple(name for name in names if name in owner and owner[name] != here.get(name))


def extended(properties: Mapping[str, str], columns: Sequence[LakeColumn], names: Iterable[str]) -> dict[str, str]:
    """The property that lets files with these column names be read; empty when it already does."""
    entries: list[dict[str, Any]] = json.loads(properties.get(NAME_MAPPING, "[]"))
    by_id = {entry["field-id"]: entry for entry in entries}
    here = {column.name: column for column in columns}
    changed = NAME_MAPPING not in properties
    for name in names:
        column = here[name]
        entry = by_id.get(column.field_id)
        if entry is None:
            entry = {"field-id": column.field_id, "names": []}
            if column.element is not None:
                entry["fields"] = [{"field-id": column.element_id, "names": ["element"]}]
            entries.append(entry)
            by_id[column.field_id] = entry
        if name not in entry["names"]:
            entry["names"].append(name)
            changed = True
    return {NAME_MAPPING: json.dumps(entries)} if changed else {}
