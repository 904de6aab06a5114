"""What becomes of old files when the registry changes. Pure.

A file says of each attribute its number, type and binding. The number decides: a column whose attribute has another
number now reads as NULL, however it is called, and a renamed attribute is followed. A new type must hold every value
of the old one, in the place where Postgres has it; a new binding needs an init, because rows that nobody touches would
never come from their new place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from modak.core.errors import Refused
from modak.entities.manifest import Manifest, ManifestEntry, StoredAttribute
from modak.entities.registry import SCALARS, Attribute, EntitySchema, check_names

_DIGITS: Mapping[str, int] = {"smallint": 5, "integer": 10, "bigint": 19}
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")
_LIST = re.compile(r"list<(.+)>")


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
        if not keeps_values(was.type, attribute.type_name, was.binding):
            raise Refused(
                "entities.retyped",
                f"In {where} the attribute {attribute.name!r} was {was.type} and is now {attribute.type_name}, "
                "which would lose values of files that are there.",
                hint="Choose a type that holds both, give the new attribute a new id, or export everything anew: "
                f"modak-worker entities init --schema {schema.schema_id} --replace-delta.",
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


def with_former(schema: EntitySchema, sources: Iterable[ManifestEntry]) -> EntitySchema:
    """The schema, and what files hold of attributes that the registry does not describe, or not at the moment.

    A rewrite carries their values on, so that an attribute that comes back has them; only an init lets them go. Each
    has the name that it had last, unless that is another attribute's now.
    """
    described = {each.id for each in schema.attributes}
    former: dict[int, tuple[str, StoredAttribute]] = {}
    for entry in sorted(sources, key=lambda entry: entry.seq):
        for name, was in entry.attributes.items():
            if was.id not in described:
                _, known = former.get(was.id, (name, was))
                former[was.id] = name, _wider(schema, name, known, was)
    taken = {each.name.casefold() for each in schema.attributes}
    kept: list[Attribute] = []
    for name, was in former.values():
        # No registry has a name with a tilde at its beginning.
        free = name if name.casefold() not in taken else f"~{was.id}"
        taken.add(free.casefold())
        kept.append(_attribute_of(free, was))
    return replace(schema, attributes=tuple(sorted((*schema.attributes, *kept), key=lambda each: each.name)))


def keeps_values(was: str, now: str, binding: str = "") -> bool:
    """Whether every value of one type is also a value of another, the same in all its digits.

    It must also stand where that other is looked for: a number is in `value_numeric`, a text in `value_text`, and a day
    may be written there in a way in which no moment is.
    """
    if was == now or (was, now, binding.partition("/")[2]) == ("date", "datetime", "unix_ms"):
        return True
    inner_was, inner_now = _LIST.fullmatch(was), _LIST.fullmatch(now)
    if inner_now is not None:
        # A scalar becomes a list of one.
        return keeps_values(inner_was[1] if inner_was else was, inner_now[1])
    if inner_was is not None:
        return False
    if _NUMERIC.fullmatch(was) and now in _DIGITS:
        return False
    before, after = _digits(was), _digits(now)
    return before is not None and after is not None and before[0] <= after[0] and before[1] <= after[1]


def _attribute_of(name: str, was: StoredAttribute) -> Attribute:
    """An attribute as it was when a file was written."""
    inner = _LIST.fullmatch(was.type)
    scalar = inner[1] if inner is not None else was.type
    column, _, encoding = was.binding.partition("/")
    attribute = Attribute(name, was.id, scalar, None, column or None, encoding or None)
    declared = _NUMERIC.fullmatch(scalar)
    if declared is not None:
        attribute = replace(attribute, type="numeric", precision=int(declared[1]), scale=int(declared[2]))
    if attribute.type not in SCALARS:
        raise Refused("entities.unknown_type", f"A file holds {name!r} as {was.type!r}, which is not a type here.")
    return attribute if inner is None else replace(attribute, type="list", items=attribute.type)


def _wider(schema: EntitySchema, name: str, one: StoredAttribute, other: StoredAttribute) -> StoredAttribute:
    """Which of two types that files have for one attribute holds the values of both."""
    if keeps_values(one.type, other.type, other.binding):
        return other
    if keeps_values(other.type, one.type, one.binding):
        return one
    raise Refused(
        "entities.retyped",
        f"Files of schema {schema.schema_id} hold the former attribute {name!r} as {one.type} and as {other.type}, "
        "and neither type has all values of the other.",
        hint=f"Export everything anew: modak-worker entities init --schema {schema.schema_id} --replace-delta.",
    )


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
