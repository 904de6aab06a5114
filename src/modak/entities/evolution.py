"""What becomes of old files when the registry changes. Pure.

A file says of each attribute its number, type and binding. The number decides: a column whose attribute has another
number now reads as NULL, however it is called, and a renamed attribute is followed. A new type must hold every value
of the old one, and a new binding needs an init, because rows that nobody touches would never come from their new place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from modak.core.errors import Refused
from modak.entities.manifest import Manifest, StoredAttribute
from modak.entities.registry import Attribute, EntitySchema, check_names

_DIGITS: Mapping[str, int] = {"smallint": 5, "integer": 10, "bigint": 19}
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")
_LIST = re.compile(r"list<(.+)>")
_AS_TEXT = frozenset({"smallint", "integer", "bigint", "uuid"})


def check_evolution(schema: EntitySchema, manifest: Manifest) -> None:
    """Refuse, by the attribute's name, a registry under which files of the manifest could not be read truly."""
    where = f"schema {schema.schema_id}"
    former = sorted({name for entry in manifest.entries for name in entry.attributes})
    check_names(schema.attributes, where, former)
    now = {each.id: each for each in schema.attributes}
    for name, was in _distinct(manifest):
        attribute = now.get(was.id)
        if attribute is None:
            continue
        if not keeps_values(was.type, attribute.type_name):
            raise Refused(
                "entities.retyped",
                f"In {where} the attribute {attribute.name!r} was {was.type} and is now {attribute.type_name}, "
                "which would lose values of files that are there.",
                hint="Choose a type that holds both, or give the new attribute a new id.",
            )
        if was.binding != attribute.binding:
            raise Refused(
                "entities.rebound",
                f"In {where} the attribute {attribute.name!r} was exported (as {name!r}) from "
                f"{was.binding or 'eav_data'}, and is now in {attribute.binding or 'eav_data'}.",
                hint=f"Export everything anew: modak-worker entities init --schema {schema.schema_id} --replace-delta.",
            )


def column_in(attribute: Attribute, file: Mapping[str, StoredAttribute]) -> str | None:
    """The column of a file that holds an attribute, by its number; `None`: the file has no such values."""
    same_name = file.get(attribute.name)
    if same_name is not None and same_name.id == attribute.id:
        return attribute.name
    return next((name for name, was in file.items() if was.id == attribute.id), None)


def keeps_values(was: str, now: str) -> bool:
    """Whether every value of one type is also a value of another, the same in all its digits."""
    if was == now or (was, now) == ("date", "datetime"):
        return True
    inner_was, inner_now = _LIST.fullmatch(was), _LIST.fullmatch(now)
    if inner_now is not None:
        # A scalar becomes a list of one.
        return keeps_values(inner_was[1] if inner_was else was, inner_now[1])
    if inner_was is not None:
        return False
    if now == "text":
        return was in _AS_TEXT
    if _NUMERIC.fullmatch(was) and now in _DIGITS:
        return False
    before, after = _digits(was), _digits(now)
    return before is not None and after is not None and before[0] <= after[0] and before[1] <= after[1]


def _digits(kind: str) -> tuple[int, int] | None:
    """How many digits a number may have before and behind its point; `None` for what is no number."""
    declared = _NUMERIC.fullmatch(kind)
    if declared is not None:
        return int(declared[1]) - int(declared[2]), int(declared[2])
    return (_DIGITS[kind], 0) if kind in _DIGITS else None


def _distinct(manifest: Manifest) -> Iterable[tuple[str, StoredAttribute]]:
    seen: dict[tuple[str, StoredAttribute], None] = {}
    for entry in manifest.entries:
        seen.update(dict.fromkeys(entry.attributes.items()))
    return seen
