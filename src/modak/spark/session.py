"""The Spark session of this process: one, started late, in the JVM that the gateway already opened.

Everything that must be known at the start comes from `conf.launch_conf`. What carries a password, the lake catalog, is
set on the running session, so that it is on no command line and in no configuration that Spark shows or ships.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from modak.postgres.dsn import Dsn
from modak.spark import gateway as gateways
from modak.spark.conf import SparkConcern, python_of
from modak.spark.credentials import FILE_IO, grant, needed_schemes
from modak.spark.distribute import distribute
from modak.spark.gateway import Gateway, lost, open_gateway
from modak.spark.launch import environment
from modak.storage.access import Key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = structlog.get_logger()
_lock = threading.RLock()
_session: SparkSession | None = None
_granted: dict[str, tuple[Key, ...]] = {}
"""What opens the stores of each catalog of the session; a catalog that Spark resets has to be told again."""

CATALOG_SCHEMA = "modak_iceberg"


def start(
    settings: SparkConcern,
    home: Path,
    dsn: Dsn | None = None,
    warehouse: str | None = None,
    schemes: Iterable[str] = (),
) -> SparkSession:
    """The session of this process; with an address and a warehouse, the lake is in it as catalog `modak`."""
    global _session
    with _lock:
        if _session is None:
            _session = _started(settings, home, schemes)
        elif not gateway_of(_session).alive():
            raise lost()
        if dsn is not None and warehouse is not None:
            use_catalog(_session, dsn, warehouse)
        return _session


def use_catalog(spark: SparkSession, dsn: Dsn, warehouse: str, name: str = "modak", keys: Sequence[Key] = ()) -> None:
    """Point a catalog of the session at the lake tables that a database knows; a later call replaces the earlier.

    `keys` open the object stores on which tables may lie; they go to the catalog as objects and into no setting.
    """
    prefix = f"spark.sql.catalog.{name}"
    wanted = {
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        f"{prefix}.type": "jdbc",
        f"{prefix}.uri": dsn.jdbc({"currentSchema": CATALOG_SCHEMA}),
        f"{prefix}.jdbc.user": dsn.user,
        f"{prefix}.jdbc.password": dsn.password,
        f"{prefix}.jdbc.schema-version": "V1",
        # The tables behind the catalog belong to our migrations; a reader never creates them.
        f"{prefix}.jdbc.init-catalog-tables": "false",
        f"{prefix}.warehouse": warehouse,
        f"{prefix}.cache-enabled": "false",
    }
    remote = [key for key in keys if needed_schemes([key])]
    if remote:
        wanted[f"{prefix}.io-impl"] = FILE_IO
    gateway = gateway_of(spark)
    with gateway.guard():
        if _granted.get(name, ()) == tuple(remote) and all(
            spark.conf.get(key, None) == value for key, value in wanted.items()
        ):
            return
        for key, value in wanted.items():
            spark.conf.set(key, value)
        # Spark keeps a catalog it has once opened, whatever the settings say afterwards.
        java_session: Any = spark._jsparkSession
        manager = java_session.sessionState().catalogManager()
        manager.reset()
        if remote:
            gateway.require(needed_schemes(remote))
            grant(gateway.jvm, manager.catalog(name).icebergCatalog(), remote)
        _granted[name] = tuple(remote)


def gateway_of(spark: SparkSession) -> Gateway:
    """The gateway of the JVM that a session runs in."""
    py4j: Any = spark.sparkContext._gateway
    current = gateways.current()
    return current if current is not None and current.py4j is py4j else Gateway(py4j)


def warm(spark: SparkSession) -> None:
    """Pay for the slow first job now: fork the workers and load what both sides need."""
    begun = time.monotonic()
    distribute(spark, _nothing, range(spark.sparkContext.defaultParallelism))
    _log.debug("spark.warmed", seconds=round(time.monotonic() - begun, 2))


def stop() -> None:
    """End the session and its JVM; the next `start` begins anew."""
    global _session
    from pyspark import SparkContext

    with _lock:
        if _session is None:
            return
        gateway = gateway_of(_session)
        if gateway.alive():
            _session.stop()
        _session = None
        _granted.clear()
        # A stopped context keeps its class-wide gateway, and would hand the dead one to the next session.
        SparkContext._gateway = SparkContext._jvm = None
        gateway.shut_down()


def _started(settings: SparkConcern, home: Path, schemes: Iterable[str]) -> SparkSession:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    begun = time.monotonic()
    _log.info("spark.starting", master=settings.spark.master)
    gateway = open_gateway(home, settings, schemes)
    in_main_thread = threading.current_thread() is threading.main_thread()
    interrupt = signal.getsignal(signal.SIGINT) if in_main_thread else None
    with gateway.guard(), environment({"PYSPARK_PYTHON": python_of(settings.spark)}):
        # The JVM already has every setting as a system property; the context takes them from there.
        context = SparkContext(gateway=gateway.py4j)
        spark = SparkSession(context)
        # A JVM that dies would otherwise make this thread print a traceback of its own.
        server: Any = context._accumulatorServer
        server.handle_error = lambda *_: None
    _keep_java_errors()
    if interrupt is not None:
        # Spark takes Ctrl-C for itself and cancels all jobs; whoever runs this process decides that.
        signal.signal(signal.SIGINT, interrupt)
    _log.debug("spark.started", master=settings.spark.master, seconds=round(time.monotonic() - begun, 2))
    return spark


def _keep_java_errors() -> None:
    """Let only Spark's own exceptions turn into pyspark's; Java's and Iceberg's look as they do without a session."""
    from pyspark.errors.exceptions import captured

    module: Any = captured
    pyspark_form = module.convert_exception

    def form(thrown: Any) -> Any:
        if thrown.getClass().getName().startswith("org.apache.spark."):
            return pyspark_form(thrown)
        # Spark's hook leaves what it does not know as it is.
        return captured.UnknownException(desc="", stackTrace="")

    if pyspark_form.__module__ != __name__:
        module.convert_exception = form


def _nothing(_: int) -> None:
    return None
