"""From the filter that Spark understood to the small tree that something below it may apply.

Spark parses, resolves and simplifies the filter over a stand-in: an empty frame with the table's schema. What is read
off the result are comparisons of a bare column with a constant of its own type; anything else is left to Spark. Only
constant-size plans are looked at, no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from modak.spark.predicate import Among, Compare, Null, Operator, Predicate, Value, either, every

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_OPERATORS: dict[str, tuple[Operator, Operator]] = {
    "EqualTo": ("=", "="),
    "LessThan": ("<", ">"),
    "LessThanOrEqual": ("<=", ">="),
    "GreaterThan": (">", "<"),
    "GreaterThanOrEqual": (">=", "<="),
}
_MOST_VALUES = 1_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A user's filter: what it mentions, and what of it can be pushed."""

    columns: frozenset[str]
    predicate: Predicate | None


def stand_in(spark: SparkSession, schema: StructType) -> DataFrame:
    """An empty frame that Spark does not know to be empty, so that it optimises a query over it in earnest."""
    return spark.createDataFrame(spark.sparkContext.emptyRDD(), schema)


def asked(spark: SparkSession, schema: StructType, where: str | Column) -> Asked:
    """Read a filter over the table's columns."""
    filtered: Any = stand_in(spark, schema).filter(where)._jdf
    execution = filtered.queryExecution()
    names = {attribute.name() for attribute in items(execution.analyzed().condition().references().toSeq())}
    optimised = execution.optimizedPlan()
    said = predicate_of(optimised.condition()) if simple_name(optimised) == "Filter" else None
    return Asked(frozenset(names), said)


def predicate_of(expression: Any) -> Predicate | None:  # noqa: PLR0911 - one return per kind of node
    """What of a Catalyst expression can be said in a tree; never more than the expression itself says."""
    kind = simple_name(expression)
    match kind:
        case "And":
            return every((predicate_of(expression.left()), predicate_of(expression.right())))
        case "Or":
            return either((predicate_of(expression.left()), predicate_of(expression.right())))
        case "In":
            return _among(expression.value(), items(expression.list()))
        case "InSet":
            return _in_set(expression)
        case "IsNull" | "IsNotNull":
            name = _column(expression.child())
            return None if name is None else Null(name, kind == "IsNotNull")
        case "AttributeReference":
            return _flag(expression, True)
        case "Not":
            return _flag(expression.child(), False)
        case _:
            return _comparison(expression, *_OPERATORS[kind]) if kind in _OPERATORS else None


def items(sequence: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    return (sequence.apply(at) for at in range(sequence.size()))


def simple_name(node: Any) -> str:
    """The class of a node, without its package."""
    return str(node.getClass().getSimpleName())


def _flag(expression: Any, value: bool) -> Predicate | None:
    name = _column(expression)
    return Compare(name, "=", value) if name is not None and expression.dataType().typeName() == "boolean" else None


def _comparison(expression: Any, forward: Operator, backward: Operator) -> Predicate | None:
    for column, constant, operator in (
        (expression.left(), expression.right(), forward),
        (expression.right(), expression.left(), backward),
    ):
        name, value = _column(column), _value(constant)
        if name is not None and value is not None:
            # Texts sort by bytes in Spark, and by a collation elsewhere.
            return Compare(name, operator, value) if operator == "=" or not isinstance(value, str) else None
    return None


def _among(column: Any, constants: Iterator[Any]) -> Predicate | None:
    name = _column(column)
    values = [_value(constant) for constant in constants]
    known = tuple(value for value in values if value is not None)
    return Among(name, known) if name is not None and known and len(known) == len(values) else None


def _in_set(expression: Any) -> Predicate | None:
    name = _column(expression.child())
    if name is None or expression.hset().size() > _MOST_VALUES:
        return None
    kind = str(expression.child().dataType().typeName())
    values = [_plain(kind, value) for value in items(expression.hset().toSeq())]
    known = tuple(value for value in values if value is not None)
    return Among(name, known) if known and len(known) == len(values) else None


def _column(expression: Any) -> str | None:
    return str(expression.name()) if simple_name(expression) == "AttributeReference" else None


def _value(expression: Any) -> Value | None:
    if simple_name(expression) != "Literal" or expression.value() is None:
        return None
    return _plain(str(expression.dataType().typeName()), expression.value())


def _plain(kind: str, value: Any) -> Value | None:
    if kind in ("byte", "short", "integer", "long", "date", "timestamp", "timestamp_ntz", "boolean"):
        return value if isinstance(value, bool | int) else None
    if kind == "string":
        return str(value.toString()) if not isinstance(value, str) else value
    if kind.startswith("decimal"):
        return value if isinstance(value, Decimal) else Decimal(str(value.toString()))
    return None
