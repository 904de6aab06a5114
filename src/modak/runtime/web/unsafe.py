"""What a query over HTTP may not do, decided on the parsed statement before anything of it runs.

Scripts, calls into Java, functions whose options name files, files by path, names that are put together only later, and
catalogs other than the lake. The walk is over all of a statement (`Anatomy`), so nothing hides in a window or a pipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modak.core.errors import UsageError
from modak.spark.pushdown import items, simple_name
from modak.tables.seam.mentions import Anatomy, wrong

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REFUSED_NODES = {
    "ScriptTransformation": "a script",
    "PythonUDTF": "a script",
    "UnresolvedPythonUDTF": "a script",
    "PlanWithUnresolvedIdentifier": "IDENTIFIER",
    "ExpressionWithUnresolvedIdentifier": "IDENTIFIER",
    "ExecuteImmediateQuery": "EXECUTE IMMEDIATE",
    "UnresolvedExecuteImmediate": "EXECUTE IMMEDIATE",
}
"""What runs something else, or names it only when it is too late to look."""
_REFUSED_FUNCTIONS = frozenset(
    {
        "java_method",
        "reflect",
        "try_reflect",
        # Their options name files and addresses that the engine itself opens.
        "from_avro",
        "from_protobuf",
        "from_xml",
        "schema_of_avro",
        "schema_of_xml",
        "to_avro",
        "to_protobuf",
    }
)
_TABLE_FUNCTIONS = frozenset(
    {"range", "explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer", "stack"}
)


def restrict(spark: SparkSession) -> None:
    """Take from a session what a query over HTTP must not have."""
    jvm: Any = spark._jvm
    spark.conf.set("spark.sql.runSQLOnFiles", "false")
    # ${env:…} and ${system:…} would show what this process was told.
    spark.conf.set("spark.sql.variable.substitute", "false")
    # The parser by itself goes by the session of its thread, and has to read what will run.
    jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)


def refuse_unsafe(spark: SparkSession, text: str, catalogs: frozenset[str]) -> None:
    """Refuse a statement that could reach beyond the tables and these catalogs."""
    java: Any = spark._jsparkSession
    try:
        plan = java.sessionState().sqlParser().parsePlan(text)
    except Exception as error:
        raise wrong(error) from None
    _look(Anatomy(spark), plan, catalogs)


def _look(anatomy: Anatomy, node: Any, catalogs: frozenset[str]) -> None:
    kind = simple_name(node)
    if kind in _REFUSED_NODES:
        raise _unsafe(_REFUSED_NODES[kind])
    if kind == "UnresolvedRelation":
        parts = [str(part) for part in items(node.multipartIdentifier())]
        if len(parts) > 2 and parts[0].lower() not in catalogs:
            raise _unsafe(f"the catalog {parts[0]!r}")
    if kind == "UnresolvedTableValuedFunction":
        name = str(list(items(node.name()))[-1]).lower()
        if name not in _TABLE_FUNCTIONS:
            raise _unsafe(f"the function {name}")
    if kind == "UnresolvedFunction":
        name = [str(part).lower() for part in items(node.nameParts())][-1]
        if name in _REFUSED_FUNCTIONS:
            raise _unsafe(f"the function {name}")
    for part in anatomy.parts(node):
        _look(anatomy, part, catalogs)


def _unsafe(what: str) -> UsageError:
    return UsageError(
        "sql.not_allowed", f"A query over HTTP may not use {what}.", hint="Use modak-worker sql on the machine itself."
    )
