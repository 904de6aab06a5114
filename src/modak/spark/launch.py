"""Starts the JVM that this process talks to, through Spark's own launcher so that every master and setting works.

The JVM holds the read end of a pipe from us and exits when the pipe closes, also when we are killed. Its output goes to
standard error only: standard output belongs to the command that the user ran.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modak.core.errors import ModakError
from modak.spark.conf import properties
from modak.spark.files import prepare_folder, scratch
from modak.spark.java import JavaHome

_STDERR = 2
_environment_lock = threading.Lock()


def launch(java: JavaHome, conf: Mapping[str, str], home: Path) -> Any:
    """A connected Py4J gateway to a new JVM; its `proc` is the process."""
    import pyspark
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    folder = prepare_folder(home)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".properties", encoding="utf-8") as file:
        file.write(properties({"spark.local.dir": str(scratch(home)), **conf}))
        file.flush()
        overrides: dict[str, str | None] = {
            "JAVA_HOME": str(java.path),
            # A SPARK_HOME of the machine may hold another version than the one these jars fit.
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "PYSPARK_SUBMIT_ARGS": f"--properties-file {shlex.quote(file.name)} pyspark-shell",
            "PYSPARK_PIN_THREAD": "true",
            "PYSPARK_GATEWAY_PORT": None,
            "PYSPARK_GATEWAY_SECRET": None,
        }
        try:
            with environment(overrides):
                start: Any = launch_gateway
                return start(popen_kwargs={"stdout": _STDERR})
        except (PySparkRuntimeError, OSError) as error:
            raise ModakError(
                "spark.start_failed",
                f"The JVM for Spark ({java.origin}: Java {java.version}) did not start.",
                hint="Its own words are above; often it is too little memory or a wrong MODAK_SPARK_CONF_* setting.",
            ) from error


@contextmanager
def environment(overrides: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (or unset those given as None) for as long as pyspark reads them."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in overrides}
        try:
            _apply(overrides)
            yield
        finally:
            _apply(before)


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
