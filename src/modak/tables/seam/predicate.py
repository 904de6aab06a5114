"""What a filter means to Postgres: where it lies on the tier key, and its SQL.

Values are Spark's own: days and microseconds since 1970 for moments, which are the values of the tier-key axis too.
Pure.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from modak.core.axis import Axis
from modak.lake.types import quoted_identifier
from modak.postgres.model import PgColumn
from modak.spark.predicate import (
    All,
    Among,
    Compare,
    Null,
    Operator,
    Predicate,
    Some,
    Value,
    either,
    every,
    one_of,
    render,
)
from modak.tables.seam.plan import EVERYTHING, NOTHING, Span

__all__ = [
    "All",
    "Among",
    "Compare",
    "Null",
    "Operator",
    "Predicate",
    "Some",
    "Value",
    "either",
    "every",
    "one_of",
    "span_of",
    "text_literal",
    "to_sql",
]

_NUMBERS = frozenset({"int2", "int4", "int8", "numeric"})
_TEXTS = frozenset({"text", "varchar", "bpchar", "name"})
_AXES = {"date": Axis.DATE, "timestamp": Axis.TIMESTAMP, "timestamptz": Axis.TIMESTAMPTZ}
# Beyond these years the lake's infinities begin to matter, and Python has no such moments.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_MICROS = 86_400_000_000


def span_of(predicate: Predicate | None, column: str) -> Span:
    """The tier keys that the filter leaves possible."""
    match predicate:
        case Compare(name, operator, int(value)) if name == column and not isinstance(value, bool):
            return {
                "=": Span(value, value + 1),
                "<": Span(None, value),
                "<=": Span(None, value + 1),
                ">": Span(value + 1, None),
                ">=": Span(value, None),
            }[operator]
        case Among(name, values) if name == column:
            keys = [value for value in values if isinstance(value, int)]
            return Span(min(keys), max(keys) + 1) if len(keys) == len(values) and keys else EVERYTHING
        case Null(name, negated) if name == column:
            # A tier key is never NULL.
            return EVERYTHING if negated else NOTHING
        case All(parts):
            span = EVERYTHING
            for part in parts:
                span = span.within(span_of(part, column))
            return span
        case Some(parts):
            span = NOTHING
            for part in parts:
                span = span.around(span_of(part, column))
            return span
        case _:
            return EVERYTHING


def to_sql(predicate: Predicate | None, columns: Iterable[PgColumn]) -> str | None:
    """The filter, or what of it Postgres judges exactly as Spark does, as an SQL condition with quoted literals."""
    if predicate is None:
        return None
    known = {column.name: column for column in columns}
    return render(
        predicate,
        lambda name: quoted_identifier(name) if name in known else None,
        lambda name, value, exact: _literal(known[name], value, exact=exact),
    )


def text_literal(text: str) -> str:
    """A text for SQL that travels to an ADBC connection; means the same whatever `standard_conforming_strings` says."""
    if "\x00" in text:
        raise ValueError("a text of Postgres cannot hold a zero byte")
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _literal(column: PgColumn, value: Value, *, exact: bool) -> str | None:
    """The value in the column's type, if the two engines compare it alike."""
    if column.type.kind != "scalar":
        return None
    name = column.type.name
    if isinstance(value, bool):
        return str(value).lower() if name == "bool" else None
    if isinstance(value, str):
        return _text(name, value) if exact else None
    if name in _NUMBERS:
        return f"({value})" if isinstance(value, int) else f"({value:f})::numeric"
    if name in _AXES and isinstance(value, int):
        day = value if name == "date" else value // _MICROS
        return f"'{_AXES[name].literal(value)}'::{name}" if _FIRST_DAY <= day <= _LAST_DAY else None
    return None


def _text(name: str, value: str) -> str | None:
    if "\x00" in value:
        return None
    if name in _TEXTS:
        # Postgres may call more texts equal (padding, collations); it never calls fewer.
        return f"{text_literal(value)}::text" if name != "bpchar" else f"{text_literal(value)}::bpchar"
    if name == "uuid":
        try:
            # The lake shows one spelling of a uuid; another one equals nothing there.
            return f"'{value}'::uuid" if str(uuid.UUID(value)) == value else None
        except ValueError:
            return None
    return None
