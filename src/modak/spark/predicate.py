"""Filters that something below Spark can apply for it: a small tree of comparisons. Pure.

Every tree says *at most* what the user's filter says: a part that cannot be said here is left out, and Spark applies
the whole filter to whatever comes back. Values are Spark's own: days and microseconds since 1970 for moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

Operator = Literal["=", "<", "<=", ">", ">="]
Value = bool | int | Decimal | str


@dataclass(frozen=True, slots=True)
class Compare:
    """Column, operator, value."""

    column: str
    operator: Operator
    value: Value


@dataclass(frozen=True, slots=True)
class Among:
    """The column has one of the values."""

    column: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Null:
    """The column is NULL, or is not."""

    column: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class All:
    """Every part holds."""

    parts: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Some:
    """At least one part holds."""

    parts: tuple[Predicate, ...]


Predicate = Compare | Among | Null | All | Some


def every(parts: Iterable[Predicate | None]) -> Predicate | None:
    """The conjunction of what is there; a part that is missing only makes it weaker."""
    known = tuple(part for part in parts if part is not None)
    return known[0] if len(known) == 1 else All(known) if known else None


def either(parts: Sequence[Predicate | None]) -> Predicate | None:
    """The disjunction, which says nothing as soon as one part is missing."""
    known = tuple(part for part in parts if part is not None)
    if not known or len(known) < len(parts):
        return None
    return known[0] if len(known) == 1 else Some(known)


def one_of(predicate: Predicate | None, column: str) -> tuple[Value, ...] | None:
    """The values to which the filter ties a column; nothing when it leaves more."""
    match predicate:
        case Compare(name, "=", value) if name == column:
            return (value,)
        case Among(name, values) if name == column:
            return values
        case All(parts):
            found = (one_of(part, column) for part in parts)
            return min((values for values in found if values is not None), key=len, default=None)
        case _:
            return None


def render(
    predicate: Predicate, quoted: Callable[[str], str | None], literal: Callable[[str, Value, bool], str | None]
) -> str | None:
    """The filter as an SQL condition, or what of it an engine judges exactly as Spark does.

    `quoted` gives a column's name (`None`: there is no such column), `literal` a value for a column, told whether it
    must be equal; `None` says that this engine would compare it differently.
    """
    match predicate:
        case All(parts):
            said = [text for text in (render(part, quoted, literal) for part in parts) if text]
            return f"({' AND '.join(said)})" if said else None
        case Some(parts):
            texts = [render(part, quoted, literal) for part in parts]
            known = [text for text in texts if text]
            return f"({' OR '.join(known)})" if len(known) == len(texts) else None
        case Null(column, negated):
            name = quoted(column)
            return f"{name} IS {'NOT ' if negated else ''}NULL" if name else None
        case Compare(column, operator, value):
            name = quoted(column)
            text = literal(column, value, operator == "=") if name else None
            return f"{name} {operator} {text}" if text else None
        case Among(column, values):
            name = quoted(column)
            literals = [literal(column, value, True) for value in values] if name else [None]
            known = [text for text in literals if text]
            return f"{name} IN ({', '.join(known)})" if len(known) == len(literals) else None
