"""Which registered tables an SQL text reads, and where it names them, found by Spark's own parser.

A statement that does anything but read is refused here by its name. Nothing is resolved and nothing runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modak.core.errors import ModakError, UsageError
from modak.core.names import TableName
from modak.spark.pushdown import items, simple_name
from modak.tables.seam.columns import backticked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PART = r"(?:`(?:[^`]|``)+`|\w+)"
_NAME = re.compile(rf"{_PART}(?:\s*\.\s*{_PART})?")
_QUERIES = frozenset(
    {
        "Aggregate",
        "Distinct",
        "Except",
        "Filter",
        "Generate",
        "GlobalLimit",
        "Intersect",
        "Join",
        "LateralJoin",
        "LimitAll",
        "LocalLimit",
        "LocalRelation",
        "Offset",
        "OneRowRelation",
        "PipeOperator",
        "Pivot",
        "PlanWithUnresolvedIdentifier",
        "Project",
        "RelationTimeTravel",
        "RepartitionByExpression",
        "Sample",
        "ScriptTransformation",
        "Sort",
        "SubqueryAlias",
        "Union",
        "Unpivot",
        "UnresolvedHaving",
        "UnresolvedHint",
        "UnresolvedInlineTable",
        "UnresolvedRelation",
        "UnresolvedSubqueryColumnAliases",
        "UnresolvedTVFAliases",
        "UnresolvedTableValuedFunction",
        "UnresolvedWith",
        "WithWindowDefinition",
    }
)
"""What Spark's parser makes of queries, as a list: some of what does more than read is no command to Spark."""
SUBQUERIES = frozenset({"ScalarSubquery", "Exists", "ListQuery", "LateralSubquery", "DynamicPruningSubquery"})
"""Expressions of an analysed plan that hold a query of their own."""


class Anatomy:
    """What the nodes of a parsed statement are made of.

    Spark does not count all of it among a node's children and expressions: not the windows that a query names, nor the
    tables that functions get, nor the values of `|> SET`.
    """

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm
        found = jvm.java.lang.Class.forName
        self._node = found("org.apache.spark.sql.catalyst.trees.TreeNode")
        self._plan = found("org.apache.spark.sql.catalyst.plans.logical.LogicalPlan")
        self._many = found("scala.collection.Iterable")
        self._product = found("scala.Product")

    def is_plan(self, node: Any) -> bool:
        """Whether it is part of the plan itself, and not an expression."""
        return bool(self._plan.isInstance(node))

    def parts(self, node: Any) -> Iterator[Any]:
        """The plans and expressions right below a node."""
        if simple_name(node) != "Literal":
            yield from self._fields(node)

    def _fields(self, product: Any) -> Iterator[Any]:
        for at in range(product.productArity()):
            yield from self._nodes(product.productElement(at))

    def _nodes(self, value: Any) -> Iterator[Any]:
        if not hasattr(value, "getClass"):
            return
        if self._node.isInstance(value):
            yield value
        elif self._many.isInstance(value):
            for each in items(value.toSeq()):
                yield from self._nodes(each)
        elif self._product.isInstance(value):
            yield from self._fields(value)


@dataclass(frozen=True, slots=True)
class Mention:
    """A table's name in the text: from `start`, before `stop`."""

    table: TableName
    start: int
    stop: int


@dataclass
class _Search:
    """The walk over a parsed statement; names of common table expressions hide tables."""

    text: str
    known: Mapping[TableName, object]
    anatomy: Anatomy
    found: list[Mention] = field(default_factory=list)
    expressions: set[str] = field(default_factory=set)

    def plan(self, node: Any, hidden: frozenset[str]) -> None:
        kind = simple_name(node)
        if kind not in _QUERIES:
            raise refused(self.text)
        if kind == "UnresolvedRelation":
            self._relation(node, hidden)
        elif kind == "RelationTimeTravel" and _registered(_written(node.relation()), self.known):
            raise UsageError(
                "sql.time_travel",
                "A table across the seam is read as it is now, not AS OF another time.",
                hint="Older states of the lake alone: select … from modak.modak.<schema>.<table> version as of …",
            )
        elif kind == "UnresolvedWith":
            for relation in items(node.cteRelations()):
                self.plan(relation._2(), hidden)
                hidden |= {str(relation._1()).lower()}
                self.expressions.add(str(relation._1()).lower())
            self.plan(node.child(), hidden)
            return
        self._below(node, hidden)

    def _below(self, node: Any, hidden: frozenset[str]) -> None:
        for part in self.anatomy.parts(node):
            (self.plan if self.anatomy.is_plan(part) else self._below)(part, hidden)

    def _relation(self, node: Any, hidden: frozenset[str]) -> None:
        parts = _written(node)
        if len(parts) == 1 and parts[0].lower() in hidden:
            return
        table = _registered(parts, self.known)
        if table is None:
            return
        start = int(node.origin().startIndex().get())
        written = _NAME.match(self.text, start)
        if written is None or len(re.findall(_PART, written[0])) < len(parts):
            raise UsageError("sql.name", f"The name of {table} is written in a way that cannot be followed.")
        stop = written.end() if len(parts) == 2 else start + len(re.match(_PART, written[0])[0])  # type: ignore[index]
        self.found.append(Mention(table, start, stop))


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement that only reads: its text with views in place of the tables."""

    text: str
    views: Mapping[TableName, str]


def understand(spark: SparkSession, text: str, known: Mapping[TableName, object]) -> Statement:
    """Parse a statement, and put a view's name wherever it names a registered table."""
    java: Any = spark._jsparkSession
    search = _Search(text, known, Anatomy(spark))
    try:
        search.plan(java.sessionState().sqlParser().parsePlan(text), frozenset())
    except ModakError:
        raise
    except Exception as error:
        raise wrong(error) from None
    views = _views({mention.table for mention in search.found}, search.expressions)
    for mention in sorted(search.found, key=lambda each: each.start, reverse=True):
        text = text[: mention.start] + backticked(views[mention.table]) + text[mention.stop :]
    return Statement(text, views)


def refused(text: str) -> UsageError:
    """The refusal of a statement that does more than read."""
    word = next(iter(re.findall(r"[A-Za-z]+", re.sub(r"--[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL))), "This")
    return UsageError(
        "sql.not_a_query",
        f"{word.upper()} is not a query, and only queries run here.",
        hint="Write SELECT, WITH, VALUES or TABLE …; change rows in Postgres.",
    )


def wrong(error: Exception) -> ModakError:
    """Spark's opinion of a statement, in a few lines and without its stack."""
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    if isinstance(error, ModakError):
        return error
    text = str(error).split("JVM stacktrace")[0]
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    kept = "\n".join(line for line in _until_plan(lines))
    if isinstance(error, AnalysisException) and error.getCondition() == "TABLE_OR_VIEW_NOT_FOUND":
        return UsageError(
            "sql.no_such_table", lines[0].split("] ")[-1], hint="modak-worker status lists the registered tables."
        )
    if isinstance(error, ParseException | AnalysisException):
        return UsageError("sql.wrong", kept or type(error).__name__)
    if isinstance(error, PySparkException):
        return ModakError("sql.failed", kept or type(error).__name__)
    return ModakError("sql.failed", lines[0] if lines else type(error).__name__)


def _until_plan(lines: Sequence[str]) -> Iterator[str]:
    for line in lines[:12]:
        if line.startswith(("'", "+-", ":-", "\tat ", "Driver stacktrace")):
            return
        yield line


def _written(relation: Any) -> list[str]:
    """The parts of a relation's name; none for one whose name is made only later."""
    named = simple_name(relation) == "UnresolvedRelation"
    return [str(part) for part in items(relation.multipartIdentifier())] if named else []


def _registered(parts: Sequence[str], known: Mapping[TableName, object]) -> TableName | None:
    if len(parts) not in (1, 2):
        return None
    schema, name = parts if len(parts) == 2 else ("public", parts[0])
    for candidate in (TableName(schema, name), TableName(schema.lower(), name.lower())):
        if candidate in known:
            return candidate
    return None


def _views(tables: set[TableName], taken: set[str]) -> dict[TableName, str]:
    """A view is called as its table, so that `table.column` still means it, unless that name means more than one."""
    views: dict[TableName, str] = {}
    names = [table.name.lower() for table in tables]
    for table in tables:
        alone = names.count(table.name.lower()) == 1 and table.name.lower() not in taken
        views[table] = table.name if alone else f"{table.schema}.{table.name}"
    return views
