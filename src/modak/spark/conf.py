"""What Spark is told at its start, as plain values.

The settings go into a properties file that only the user can read and that is gone once the JVM is up, never onto a
command line. The catalog and its password are not among them (`session.use_catalog` sets them afterwards).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from modak.spark.files import log4j_file


class SparkOptions(Protocol):
    """The settings of the concern `spark` (`MODAK_SPARK_*`), as this room reads them."""

    @property
    def master(self) -> str:
        """Where Spark runs: `local[*]`, or the address of a cluster."""

    @property
    def conf(self) -> Mapping[str, str]:
        """Spark's own settings, from `MODAK_SPARK_CONF_*`; they win over ours."""

    @property
    def jars(self) -> tuple[str, ...]:
        """Jars to use instead of resolved ones."""


class SparkConcern(Protocol):
    """All settings of the process, of which this room reads the concern `spark`."""

    @property
    def spark(self) -> SparkOptions:
        """The engine."""


def is_local(master: str) -> bool:
    """Whether driver and executors are one process on this machine."""
    return master == "local" or master.startswith("local[")


def cores() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_of(settings: SparkOptions) -> str:
    """The interpreter of the Python workers: the one in use, unless the cluster has it elsewhere."""
    return settings.conf.get("spark.pyspark.python", sys.executable)


def launch_conf(settings: SparkOptions, home: Path, jars: tuple[Path, ...]) -> dict[str, str]:
    """Every setting that must be known before the JVM or the SparkContext starts."""
    conf = {
        "spark.master": settings.master,
        "spark.app.name": "modak",
        "spark.driver.memory": "2g",
        "spark.driver.extraClassPath": os.pathsep.join(map(str, jars)),
        "spark.sql.warehouse.dir": (home / "spark" / "warehouse").as_uri(),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.session.timeZone": "UTC",
        # SQL means what is written: ${…} stands for nothing else, least of all for the environment.
        "spark.sql.variable.substitute": "false",
        "spark.sql.shuffle.partitions": str(cores()),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.pyspark.python": python_of(settings),
        "spark.python.daemon.module": "modak.spark.daemon",
        # Killed tasks must be gone before the driver removes what they wrote.
        "spark.python.task.killTimeout": "1s",
    }
    if is_local(settings.master):
        # Nothing outside this machine has to reach the driver.
        conf |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    else:
        conf |= {"spark.jars": ",".join(jar.as_uri() for jar in jars)}
    conf |= settings.conf
    conf["spark.driver.extraJavaOptions"] = " ".join(
        filter(None, (java_options(home), settings.conf.get("spark.driver.extraJavaOptions")))
    )
    return conf


def java_options(home: Path) -> str:
    """How every JVM of ours is run."""
    # A JVM that is out of memory must not limp on with threads missing: it exits and the worker is started again.
    return f"-XX:+ExitOnOutOfMemoryError -Dlog4j2.configurationFile={log4j_file(home).as_uri()}"


def properties(conf: Mapping[str, str]) -> str:
    """The settings in Java's properties format."""
    return "".join(f"{_escaped(key, ' :=#!')}={_escaped(value, '')}\n" for key, value in sorted(conf.items()))


def _escaped(text: str, also: str) -> str:
    special = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"} | {char: "\\" + char for char in also}
    escaped = "".join(special.get(char, char) for char in text)
    return "\\" + escaped if escaped.startswith(" ") else escaped
