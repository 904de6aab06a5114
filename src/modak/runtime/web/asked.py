"""The child process of queries over HTTP: it answers one question at a time, in a JVM of its own.

Settings and questions come through a pipe from the daemon, answers go back the same way; when the pipe ends the daemon
is gone and so are we, and without our JVM we are of no use. What a command line may do and a network must not is
refused before anything runs (`unsafe.py`). Postgres is read in read-only transactions whose statements end when the
query has to, as the role that the settings name; then the lake is open only by the names of registered tables, because
that role's rights are looked at by these. Memory: the JVM has `MODAK_QUERY_MEMORY`; rows become JSON as they leave it,
so Python holds one answer of at most `MOST_BYTES` and a batch of rows.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import psycopg
import structlog

from modak.config import Settings
from modak.config.pairs import Pairs
from modak.core.errors import ModakError
from modak.postgres.connect import translate
from modak.postgres.dsn import Dsn
from modak.runtime.web.queries import MOST_BYTES, ROUTES_SECONDS, START_SECONDS, Question, out_of_memory, too_long
from modak.runtime.web.unsafe import refuse_unsafe, restrict
from modak.spark import gateway, session
from modak.tables.seam.mentions import Statement, understand, wrong
from modak.tables.seam.pinned import Point
from modak.tables.seam.query import query, scans, schemas_of
from modak.tables.seam.reader import Reader
from modak.tables.seam.texts import texts
from modak.tables.site import Site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MASTER = "local[2]"
_OURS = frozenset({"modak"})
_OF_A_CLUSTER = frozenset(
    {
        "spark.driver.bindAddress",
        "spark.driver.blockManager.port",
        "spark.driver.host",
        "spark.driver.port",
        "spark.pyspark.python",
    }
)
"""How a cluster reaches the driver and finds its Python, which means nothing to a JVM by itself."""
_NO_ROOM = ("OutOfMemoryError", "UNABLE_TO_ACQUIRE_MEMORY")

log = structlog.get_logger()


class Asked:
    """Answers questions, each in a Spark session of its own: views of one never meet those of another."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def answer(self, question: Question) -> bytes:
        """The answer as JSON."""
        if question.rows is None:
            return self._explained(question)
        return self._found(question, question.rows)

    def _found(self, question: Question, limit: int) -> bytes:
        began = self._site.clock.monotonic()
        with self._prepared(question) as spark, _deadline(spark, question.seconds):
            try:
                with query(self._site, spark, question.text, self._reader(question)) as frame:
                    kinds = [{"name": name, "type": kind} for name, kind in frame.dtypes]
                    rows = _within(MOST_BYTES, _collected(texts(frame).limit(limit + 1)))
            except (ModakError, OSError):
                raise
            except Exception as error:
                raise wrong(error) from None
        told = {"truncated": len(rows) > limit, "seconds": round(self._site.clock.monotonic() - began, 3)}
        return b'{"columns":%b,"rows":[%b],%b' % (_json(kinds), b",".join(rows[:limit]), _json(told)[1:])

    def _explained(self, question: Question) -> bytes:
        with self._prepared(question) as spark, _deadline(spark, question.seconds):
            known = {record.name: record for record in self._site.reader.tables()}
            statement = understand(spark, question.text.strip().rstrip(";"), known)
            told = self._scans(spark, statement, question) if statement.views else _analysed(spark, statement.text)
        return _json({"scans": told, "postgres": self._routes(question)})

    def _scans(self, spark: SparkSession, statement: Statement, question: Question) -> list[dict[str, Any]]:
        point = Point(self._site, sorted(statement.views), reader=self._reader(question))
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

    def _routes(self, question: Question) -> list[str] | None:
        """What `modak_explain` says, where the text is SQL that Postgres understands too."""
        try:
            with closing(self._reader(question).connect()) as conn:
                conn.execute("SELECT set_config('statement_timeout', %s, true)", (f"{ROUTES_SECONDS:g}s",))
                return [str(line) for (line,) in conn.execute("SELECT * FROM modak_explain(%s)", (question.text,))]
        except psycopg.Error:
            return None

    @contextmanager
    def _prepared(self, question: Question) -> Iterator[SparkSession]:
        self._site.follow_profiles()
        spark = self._site.spark.newSession()
        try:
            self._site.use_catalog(spark)
            restrict(spark)
            refuse_unsafe(spark, question.text.strip().rstrip(";"), self._catalogs)
            yield spark
        finally:
            _leave_catalog(spark)

    def _reader(self, question: Question) -> Reader:
        http, dsn = self._site.settings.http, self._site.dsn
        if http.query_pg_user is None:
            return Reader(dsn, question.seconds)
        password = http.query_pg_password.get_secret_value()
        return Reader(replace(dsn, user=http.query_pg_user, password=password), question.seconds, guest=True)

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


def _collected(frame: DataFrame) -> Iterator[Sequence[str | None]]:
    """What `collect` gives, row by row as it leaves the JVM."""
    from pyspark import serializers, util

    java: Any = frame._jdf
    load: Any = util._load_from_socket
    batched: Any = serializers.BatchedSerializer
    yield from load(java.collectToPython(), batched(serializers.CPickleSerializer()))


def _within(most: int, rows: Iterator[Sequence[str | None]]) -> list[bytes]:
    """The rows as JSON, as long as they are not more than so many bytes."""
    found: list[bytes] = []
    room = most
    for row in rows:
        found.append(_json(list(row)))
        room -= len(found[-1])
        if room < 0:
            raise ModakError(
                "sql.too_large",
                f"The answer is larger than {most >> 20} MiB of text.",
                hint="Ask for fewer rows or columns.",
            )
    return found


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _leave_catalog(spark: SparkSession) -> None:
    """Close the connections to Postgres that the session's catalog keeps, where it was opened at all."""
    java: Any = spark._jsparkSession
    # The JVM may be gone, and then they are.
    with suppress(Exception):
        manager = java.sessionState().catalogManager()
        names = manager.listCatalogs(spark._jvm.scala.Option.empty())  # type: ignore[union-attr]
        if names.contains("modak"):
            manager.catalog("modak").icebergCatalog().close()


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
            raise too_long(seconds) from None
        raise
    finally:
        done.set()
        watcher.join()
        context.removeJobTag(tag)
    if expired.is_set():
        raise too_long(seconds)


def main() -> None:
    """Start a JVM, say which process that is, then answer until the pipe ends."""
    _go_first()
    pipe = Connection(int(sys.argv[1]))
    settings, dsn = pipe.recv()
    _log_to_stderr(settings.log.format)
    questions: SimpleQueue[Question] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, questions), name="modak-questions", daemon=True).start()
    with closing(Site(_by_itself(settings), dsn)) as site:
        asked = Asked(site)
        try:
            pipe.send(_started(site, asked))
        except Exception as error:
            pipe.send(_told(error, dsn))
            _leave()
        while True:
            question = questions.get()
            try:
                told: bytes | Exception = asked.answer(question)
            except Exception as error:
                told = _told(error, dsn)
                if not _in_reach(site):
                    _leave()
            pipe.send(told)


def _go_first() -> None:
    """Where memory runs out, let the system end a query and not the worker."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _listen(pipe: Connection, questions: SimpleQueue[Question]) -> None:
    with suppress(EOFError, OSError):
        while True:
            questions.put(pipe.recv())
    _leave()


def _started(site: Site, asked: Asked) -> int:
    """Pay now for what the first question would pay for, and return the JVM's process id."""
    java = session.gateway_of(site.spark)
    threading.Thread(target=_leave_with, args=(java,), name="modak-jvm", daemon=True).start()
    session.warm(site.spark)
    asked.answer(Question("SELECT 1", START_SECONDS, 1))
    return java.pid


def _leave_with(java: gateway.Gateway) -> None:
    """A JVM that has ended, out of memory, leaves nothing to answer with."""
    java.py4j.proc.wait()
    _leave()


def _in_reach(site: Site) -> bool:
    """Whether the JVM answers; its socket breaks a moment before its process is seen to have ended."""
    try:
        site.spark._jvm.java.lang.System.nanoTime()  # type: ignore[union-attr]
    except Exception:
        return False
    return True


def _leave() -> None:
    """End with the JVM, without waiting for whatever either is doing."""
    java = gateway.current()
    if java is not None and java.alive():
        with suppress(ProcessLookupError):
            os.killpg(java.pid, signal.SIGKILL)
    os._exit(1)


def _told(error: Exception, dsn: Dsn) -> Exception:
    """An error as the daemon is told it."""
    if isinstance(error, psycopg.Error):
        error = translate(error)
    if isinstance(error, ModakError):
        return out_of_memory() if any(word in error.message for word in _NO_ROOM) else error
    log.error("query.crashed", exc_info=error)
    return RuntimeError(dsn.scrub(f"{type(error).__name__}: {error}"))


def _by_itself(settings: Settings) -> Settings:
    """The settings, with a small Spark on this machine."""
    memory = {"spark.driver.memory": f"{settings.http.query_memory >> 20}m"}
    conf = {key: value for key, value in settings.spark.conf.items() if key not in _OF_A_CLUSTER}
    spark = settings.spark.model_copy(update={"master": MASTER, "conf": Pairs(conf | memory)})
    return replace(settings, spark=spark)


def _log_to_stderr(form: str) -> None:
    """Log where the daemon logs, and let nothing print failed statements a second time."""
    rendered = (
        structlog.processors.JSONRenderer(default=str)
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            rendered,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    from pyspark.logger import PySparkLogger

    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


if __name__ == "__main__":
    main()
