"""Queries over HTTP: read-only SQL across the seam, with a limit on time, rows and how many run at once.

Each query has a Spark session of its own (views of one never meet those of another) in the JVM that the daemon has
anyway. What a command line may do and a network must not is refused before anything runs: scripts, calls into Java,
files by path. Postgres is read in read-only transactions whose statements end when the query has to, as the role that
the settings name; then the lake is open only by the names of registered tables, because that role's rights are looked
at by these. Memory: at most the rows that the limit allows, as text.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg

from modak.core.errors import ModakError, Refused, UsageError
from modak.spark.pushdown import items, simple_name
from modak.tables.seam.mentions import Anatomy, Statement, understand, wrong
from modak.tables.seam.pinned import Point
from modak.tables.seam.query import query, scans, schemas_of
from modak.tables.seam.reader import Reader
from modak.tables.seam.texts import texts
from modak.tables.site import Site

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT_ONCE = 2
LONGEST_TEXT = 100_000
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
_OURS = frozenset({"modak"})
_REFUSED_FUNCTIONS = frozenset({"reflect", "java_method", "try_reflect"})
_TABLE_FUNCTIONS = frozenset(
    {"range", "explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer", "stack"}
)


class Queries:
    """Asks the seam on behalf of callers that are not trusted."""

    def __init__(self, site: Site, seconds: float, most_rows: int) -> None:
        self._site = site
        self.seconds = seconds
        self.most_rows = most_rows
        self._places = threading.BoundedSemaphore(AT_ONCE)

    def ask(self, text: str, rows: int | None = None, seconds: float | None = None) -> dict[str, Any]:
        """The first rows of an answer, every value as text (or null), with the names and types of the columns."""
        limit = min(rows or self.most_rows, self.most_rows)
        seconds = min(seconds or self.seconds, self.seconds)
        began = self._site.clock.monotonic()
        with self._prepared(text) as spark, _deadline(spark, seconds):
            try:
                with query(self._site, spark, text, self._reader(seconds)) as frame:
                    kinds = [{"name": name, "type": kind} for name, kind in frame.dtypes]
                    found = [list(row) for row in texts(frame).limit(limit + 1).collect()]
            except (ModakError, OSError):
                raise
            except Exception as error:
                raise wrong(error) from None
        return {
            "columns": kinds,
            "rows": found[:limit],
            "truncated": len(found) > limit,
            "seconds": round(self._site.clock.monotonic() - began, 3),
        }

    def explain(self, text: str) -> dict[str, Any]:
        """Which tier each use of a table reads, by the plan that a query would have; nothing runs."""
        with self._prepared(text) as spark, _deadline(spark, self.seconds):
            known = {record.name: record for record in self._site.reader.tables()}
            statement = understand(spark, text.strip().rstrip(";"), known)
            told = self._scans(spark, statement) if statement.views else _analysed(spark, statement.text)
        return {"scans": told, "postgres": self._routes(text)}

    def _scans(self, spark: SparkSession, statement: Statement) -> list[dict[str, Any]]:
        point = Point(self._site, sorted(statement.views), reader=self._reader(self.seconds))
        try:
            return [self._scan(point, scan) for scan in scans(spark, statement, schemas_of(point, statement))]
        finally:
            point.abandon()

    def _scan(self, point: Point, scan: Any) -> dict[str, Any]:
        table = point.table(scan.table)
        axis, pin = table.record.axis, table.pin
        cut = None if pin.t is None else axis.literal(pin.t)
        line = None if pin.retention_line is None else axis.literal(pin.retention_line)
        return {
            "table": str(scan.table),
            "columns": None if scan.columns is None else sorted(scan.columns),
            "filter": None if scan.predicate is None else str(scan.predicate),
            "heap": {"from": cut},
            "lake": {"snapshot": pin.snapshot_id, "from": line, "below": cut},
        }

    def _routes(self, text: str) -> list[str] | None:
        """What `modak_explain` says, where the text is SQL that Postgres understands too."""
        try:
            with closing(self._reader(self.seconds).connect()) as conn:
                conn.execute("SELECT set_config('statement_timeout', '5s', true)")
                return [str(line) for (line,) in conn.execute("SELECT * FROM modak_explain(%s)", (text,))]
        except psycopg.Error:
            return None

    @contextmanager
    def _prepared(self, text: str) -> Iterator[SparkSession]:
        if "\0" in text or not text.strip() or len(text) > LONGEST_TEXT:
            raise UsageError("sql.wrong", f"A query is text of 1 to {LONGEST_TEXT} characters.")
        if not self._places.acquire(blocking=False):
            raise Refused("api.busy", f"{AT_ONCE} queries run already.", hint="Try again in a moment.", retryable=True)
        try:
            spark = self._site.spark.newSession()
            self._site.use_catalog(spark)
            _restrict(spark)
            refuse_unsafe(spark, text.strip().rstrip(";"), self._catalogs)
            yield spark
        finally:
            self._places.release()

    def _reader(self, seconds: float) -> Reader:
        http, dsn = self._site.settings.http, self._site.dsn
        if http.query_pg_user is None:
            return Reader(dsn, seconds)
        password = http.query_pg_password.get_secret_value()
        return Reader(replace(dsn, user=http.query_pg_user, password=password), seconds, guest=True)

    @property
    def _catalogs(self) -> frozenset[str]:
        """Catalogs of which a query may name any table: the lake, unless a role's rights have to be looked at."""
        return _OURS if self._site.settings.http.query_pg_user is None else frozenset()


def _analysed(spark: SparkSession, text: str) -> list[dict[str, Any]]:
    """Nothing, for a statement that makes sense and reads no registered table."""
    try:
        spark.sql(text)
    except Exception as error:
        raise wrong(error) from None
    return []


def _restrict(spark: SparkSession) -> None:
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


@contextmanager
def _deadline(spark: SparkSession, seconds: float) -> Iterator[None]:
    """Cancel every Spark job of this thread when the time is over."""
    context = spark.sparkContext
    tag = f"modak-query-{secrets.token_hex(8)}"
    done, expired = threading.Event(), threading.Event()

    def watch() -> None:
        if done.wait(seconds):
            return
        expired.set()
        # Between two jobs there is nothing to cancel, so it is tried until the thread has noticed.
        while not done.is_set():
            context.cancelJobsWithTag(tag)
            done.wait(0.3)

    context.addJobTag(tag)
    watcher = threading.Thread(target=watch, name="modak-query-deadline", daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        if expired.is_set():
            raise _too_long(seconds) from None
        raise
    finally:
        done.set()
        watcher.join()
        context.removeJobTag(tag)
    if expired.is_set():
        raise _too_long(seconds)


def _too_long(seconds: float) -> ModakError:
    return ModakError(
        "sql.timeout",
        f"The query took longer than {seconds:g} seconds.",
        hint="Ask for less, or raise MODAK_QUERY_TIMEOUT_SECONDS.",
    )
