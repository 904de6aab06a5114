"""The folder `<home>/spark`: what the JVM reads at its start, and its scratch space.

Scratch space belongs to one process, which holds a lock on it for as long as it lives. What a killed process left
behind is therefore known for certain and removed by the next start. Nothing of Spark is ever written to the current
folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark %p %c{1}: %m%n%ex{6}
# Spark raises its level to that of this logger, and says so, unless both agree.
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = error
# Each of these repeats what `distribute` already turns into an error of ours.
logger.executor.name = org.apache.spark.executor.Executor
logger.executor.level = off
logger.tasks.name = org.apache.spark.scheduler.TaskSetManager
logger.tasks.level = off
logger.runner.name = org.apache.spark.api.python.PythonRunner
logger.runner.level = off
"""

# Open files whose locks say that this process lives; they close with it.
_held: dict[Path, IO[str]] = {}


def log4j_file(home: Path) -> Path:
    """Where the JVM finds what it may say."""
    return home / "spark" / "log4j2.properties"


def prepare_folder(home: Path) -> Path:
    """Create the folder and what the JVM expects in it."""
    folder = home / "spark"
    folder.mkdir(parents=True, exist_ok=True)
    log4j = log4j_file(home)
    if not log4j.is_file() or log4j.read_text() != _LOG4J:
        draft = folder / f"log4j2.{os.getpid()}.tmp"
        draft.write_text(_LOG4J)
        draft.replace(log4j)
    return folder


def scratch(home: Path) -> Path:
    """The scratch space of this process; what dead processes left is removed."""
    # Work items pass through here on their way into the JVM, and they know the database's password.
    root = home / "spark" / "tmp"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root in _held:
        return Path(_held[root].name).parent
    with (root / ".lock").open("w") as sweeping:
        fcntl.flock(sweeping, fcntl.LOCK_EX)
        _sweep(root)
        own = Path(tempfile.mkdtemp(dir=root))
        _held[root] = (own / ".lock").open("w")
        fcntl.flock(_held[root], fcntl.LOCK_EX)
    return own


def _sweep(root: Path) -> None:
    for folder in (entry for entry in root.iterdir() if entry.is_dir()):
        with contextlib.suppress(OSError), (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
