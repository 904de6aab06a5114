"""Starts the JVM that this process talks to, through Spark's own launcher so that every master and setting works.

The JVM holds the read end of a pipe from us and exits when the pipe closes, also when we are killed. Its output goes to
standard error only: standard output belongs to the command that the user ran.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modak.core.errors import ModakError
from modak.spark.conf import properties
from modak.spark.files import prepare_folder, scratch
from modak.spark.java import JavaHome

_STDERR = 2
_environment_lock = threading.Lock()
_starting: set[subprocess.Popen[bytes]] = set()


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
            with environment(overrides), _ended_with_the_wait():
                start: Any = launch_gateway
                return start(popen_kwargs={"stdout": _STDERR, "process_group": 0})
        except (PySparkRuntimeError, OSError) as error:
            raise ModakError(
                "spark.start_failed",
                f"The JVM for Spark ({java.origin}: Java {java.version}) did not start.",
                hint="Its own words are above; often it is too little memory or a wrong MODAK_SPARK_CONF_* setting.",
            ) from error


@contextmanager
def _ended_with_the_wait() -> Iterator[None]:
    """End a JVM that nobody waits for any more: it would go on and complain that its settings file is gone."""
    from pyspark import java_gateway

    begun: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(*args, **options)
        begun.append(process)
        _starting.add(process)
        return process

    launcher: Any = java_gateway
    before, launcher.Popen = launcher.Popen, start
    try:
        yield
    except BaseException:
        for process in begun:
            _kill(process)
            process.wait()
        raise
    finally:
        launcher.Popen = before
        _starting.difference_update(begun)


@atexit.register
def _end_what_starts() -> None:
    """The program ends while another thread waits for its JVM."""
    for process in tuple(_starting):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Until the JVM itself runs there are scripts, and a small JVM that reads the settings for them.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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
