"""The way into Java: Iceberg's API over Py4J, with or without a SparkContext in the same JVM.

A process has one JVM. `open_gateway` starts it (three to four seconds) and is enough for everything that only reads or
prepares lake metadata; `session.start` later puts a SparkContext into it. A JVM that is gone is a `spark.gateway_lost`:
whatever ran may or may not have happened, so the worker exits and the journal is read again at the next start.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog

from modak.core.errors import ModakError
from modak.spark.conf import SparkConcern, launch_conf
from modak.spark.jars import BUNDLES, PACKAGES, resolve
from modak.spark.java import find_java
from modak.spark.launch import launch

_log = structlog.get_logger()
_lock = threading.RLock()
_current: Gateway | None = None
_FILE_IO = {
    # A class of each cloud's own library; Iceberg's classes for it are there in any case.
    "s3": "software.amazon.awssdk.services.s3.S3Client",
    "gs": "com.google.cloud.storage.Storage",
    "abfs": "com.azure.storage.file.datalake.DataLakeFileClient",
    "abfss": "com.azure.storage.file.datalake.DataLakeFileClient",
}


class Gateway:
    """A connection to the JVM of this process."""

    def __init__(self, py4j: Any) -> None:
        self.py4j = py4j
        logging.getLogger().addFilter(_unless_py4j)  # the same filter again adds nothing

    def require(self, schemes: Iterable[str]) -> None:
        """Stop when the JVM was started before a kind of object store was needed."""
        lacking = [scheme for scheme in sorted(schemes) if not self._has(_FILE_IO[scheme])]
        if lacking:
            raise ModakError(
                "spark.jars_needed",
                f"This process was started without what Iceberg needs for {', '.join(f'{one}://' for one in lacking)}.",
                hint="Start the worker again. With jars of your own (MODAK_SPARK_JARS), name also "
                f"{' and '.join(BUNDLES[one] for one in lacking)}.",
                retryable=True,
            )

    def _has(self, needed: str) -> bool:
        from py4j.protocol import Py4JJavaError

        with self.guard():
            try:
                self.jvm.java.lang.Class.forName(needed)
            except Py4JJavaError:
                return False
        return True

    @property
    def jvm(self) -> Any:
        """The root of Java's packages: `gateway.jvm.org.apache.iceberg…`."""
        if not self.alive():
            raise lost()
        return self.py4j.jvm

    @property
    def pid(self) -> int:
        """The process id of the JVM."""
        return int(self.py4j.proc.pid)

    def alive(self) -> bool:
        """Whether the JVM still runs."""
        return self.py4j.proc.poll() is None

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn the ways in which Py4J reports a dead JVM into `spark.gateway_lost`; other errors pass unchanged."""
        try:
            yield
        except Exception as error:
            if self.is_loss(error):
                raise lost() from error
            raise

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error means that the JVM is gone."""
        from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

        if isinstance(error, Py4JJavaError) or not isinstance(error, Py4JError | OSError | EOFError):
            return False
        # The socket breaks a moment before the process can be seen to have ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.py4j.proc.wait(2)
        return isinstance(error, Py4JNetworkError) or not self.alive()

    def close(self) -> None:
        """Stop the JVM, unless a SparkContext lives in it (`session.stop` ends both)."""
        from pyspark import SparkContext

        if SparkContext._gateway is not self.py4j:
            self.shut_down()

    def shut_down(self) -> None:
        """Stop the JVM."""
        global _current
        with _lock:
            if _current is self:
                _current = None
        with contextlib.suppress(Exception):
            self.py4j.shutdown()
        process = self.py4j.proc
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def open_gateway(home: Path, settings: SparkConcern, schemes: Iterable[str] = ()) -> Gateway:
    """The gateway of this process, started when there is none yet (or no more)."""
    global _current
    with _lock:
        if _current is not None and _current.alive():
            return _current
        home = home.absolute()
        java = find_java(home)
        jars = resolve(home, settings, schemes)
        gateway = Gateway(launch(java, launch_conf(settings.spark, home, jars), home))
        try:
            _check(gateway)
        except BaseException:
            gateway.shut_down()
            raise
        _log.debug("spark.gateway_opened", pid=gateway.pid, java=java.version, origin=java.origin)
        _current = gateway
        return gateway


def current() -> Gateway | None:
    """The gateway that this process has open."""
    return _current


def lost() -> ModakError:
    """The error for a JVM that is gone."""
    return ModakError(
        "spark.gateway_lost",
        "The JVM that runs Spark is gone.",
        hint="Start the worker again; unfinished work continues from the journal. If it happens again, give the JVM "
        "more memory (spark.driver.memory, by MODAK_SPARK_CONF_*).",
        retryable=True,
    )


def _unless_py4j(record: logging.LogRecord) -> bool:
    """Py4J writes the traceback of a broken socket to the root logger before it raises; the error is enough."""
    return record.module != "java_gateway"


def _check(gateway: Gateway) -> None:
    from py4j.protocol import Py4JJavaError

    with gateway.guard():
        for needed in ("org.apache.iceberg.jdbc.JdbcCatalog", "org.postgresql.Driver"):
            try:
                gateway.jvm.java.lang.Class.forName(needed)
            except Py4JJavaError:
                raise ModakError(
                    "spark.jars_incomplete",
                    f"The jars given to Spark lack {needed}.",
                    hint=f"MODAK_SPARK_JARS must name {' and '.join(PACKAGES)}.",
                ) from None
