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
_LOGICAL = "org.apache.spark.sql.catalyst.plans.logical"
_COMMANDS = (f"{_LOGICAL}.Command", f"{_LOGICAL}.ParsedStatement")
SUBQUERIES = frozenset({"ScalarSubquery", "Exists", "ListQuery", "LateralSubquery", "DynamicPruningSubquery"})
"""Expressions that hold a query of their own."""


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
    commands: Sequence[Any]
    found: list[Mention] = field(default_factory=list)
    expressions: set[str] = field(default_factory=set)

    def plan(self, node: Any, hidden: frozenset[str]) -> None:
        kind = simple_name(node)
        if any(command.isInstance(node) for command in self.commands):
            raise refused(self.text)
        if kind == "UnresolvedRelation":
            self._relation(node, hidden)
        elif kind == "RelationTimeTravel":
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
        for child in items(node.children()):
            self.plan(child, hidden)
        for expression in items(node.expressions()):
            self._subqueries(expression, hidden)

    def _subqueries(self, expression: Any, hidden: frozenset[str]) -> None:
        if simple_name(expression) in SUBQUERIES:
            self.plan(expression.plan(), hidden)
        for child in items(expression.children()):
            self._subqueries(child, hidden)

    def _relation(self, node: Any, hidden: frozenset[str]) -> None:
        parts = [str(part) for part in items(node.multipartIdentifier())]
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
    jvm: Any = spark._jvm
    search = _Search(text, known, [jvm.java.lang.Class.forName(name) for name in _COMMANDS])
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


def _registered(parts: Sequence[str], known: Mapping[TableName, object]) -> TableName | None:
    if len(parts) > 2:
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
