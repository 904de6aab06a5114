"""Brings the jars that Spark lacks, Iceberg's runtime, the Postgres driver and, for lakes on an object store, the
bundle of its cloud, once per machine and version.

Order: `MODAK_SPARK_JARS`; then a complete set under `<home>/jars` (copied there for a machine without a network); then
the cache that all homes of a user share, `$XDG_CACHE_HOME/modak/jars` (default `~/.cache/modak/jars`); else Spark's own
resolver, Ivy, fetches them into that cache. A set is a folder named after the versions. It is complete when it holds a
list of its files and every size agrees, and it appears by a rename, so that a crash or a second process never leaves
half of one behind. Later starts need no network.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from modak.core.errors import ModakError, UsageError
from modak.spark.conf import SparkConcern, java_options
from modak.spark.java import find_java
from modak.spark.launch import launch

_log = structlog.get_logger()

ICEBERG = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0"
POSTGRES = "org.postgresql:postgresql:42.7.8"
PACKAGES = (ICEBERG, POSTGRES)
BUNDLES = {
    "s3": "org.apache.iceberg:iceberg-aws-bundle:1.11.0",
    "gs": "org.apache.iceberg:iceberg-gcp-bundle:1.11.0",
    "abfs": "org.apache.iceberg:iceberg-azure-bundle:1.10.0",
    "abfss": "org.apache.iceberg:iceberg-azure-bundle:1.10.0",
}
"""What each kind of object store needs besides; sixty megabytes or so, fetched only when a profile is on one.

They hold the libraries of the clouds; Iceberg's own classes come with its runtime. Where this was tried, the one for
Azure was to be had up to 1.10.0, and it fits.
"""

_LIST = "complete.json"


def resolve(home: Path, settings: SparkConcern, schemes: Iterable[str] = ()) -> tuple[Path, ...]:
    """The jars to put on the class path, as absolute local paths; `schemes` are the kinds of store in use."""
    if settings.spark.jars:
        return _given(settings.spark.jars)
    bundles = sorted({BUNDLES[scheme] for scheme in schemes})
    return tuple(jar for packages in (PACKAGES, *((one,) for one in bundles)) for jar in _set(home, settings, packages))


def _set(home: Path, settings: SparkConcern, packages: Sequence[str]) -> tuple[Path, ...]:
    home = home.absolute()
    name = set_name(packages)
    for folder in (home / "jars", cache_folder()):
        found = _complete(folder / name)
        if found:
            return found
    target = _writable(cache_folder(), home / "jars")
    with _locked(target):
        # Somebody else may have fetched them while this process waited for the lock.
        return _complete(target / name) or _fetch(home, settings, target / name, packages)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where all homes of this user share their jars."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return Path(base) / "modak" / "jars"


def set_name(packages: Sequence[str]) -> str:
    """The folder of a set of packages: their names and versions."""
    return "+".join("-".join(package.split(":")[1:]) for package in packages)


def _given(entries: Sequence[str]) -> tuple[Path, ...]:
    found: list[Path] = []
    for entry in entries:
        path = Path(entry).expanduser().absolute()
        jars = sorted(path.glob("*.jar")) if path.is_dir() else [path]
        if not jars or not all(jar.is_file() for jar in jars):
            raise UsageError(
                "spark.jars_missing",
                f"MODAK_SPARK_JARS names {entry}, where there is no jar.",
                hint=f"Give paths of jar files, or of folders that hold them: {' and '.join(PACKAGES)}.",
            )
        found += jars
    return tuple(found)


def _complete(folder: Path) -> tuple[Path, ...]:
    try:
        sizes = json.loads((folder / _LIST).read_text())
        jars = tuple(folder / name for name in sorted(sizes))
        return jars if all(jar.stat().st_size == sizes[jar.name] for jar in jars) else ()
    except (OSError, ValueError, AttributeError, TypeError):
        return ()


def _writable(*folders: Path) -> Path:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise ModakError(
        "spark.jars_unavailable",
        f"No folder to keep Spark's jars in can be written: {', '.join(map(str, folders))}.",
        hint="Set XDG_CACHE_HOME or MODAK_HOME to a writable folder, or name the jars in MODAK_SPARK_JARS.",
    )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(home: Path, settings: SparkConcern, target: Path, packages: Sequence[str]) -> tuple[Path, ...]:
    _log.info("spark.jars_fetching", packages=list(packages), into=str(target))
    draft = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    try:
        sizes: dict[str, int] = {}
        for jar in _resolved_by_ivy(home, settings, packages):
            copy = shutil.copyfile(jar, draft / jar.name)
            sizes[copy.name] = copy.stat().st_size
        (draft / _LIST).write_text(json.dumps(sizes, indent=1))
        draft.chmod(0o755)
        if target.exists():
            # Incomplete or damaged, and nobody else may touch it while the lock is ours.
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _log.info("spark.jars_fetched", into=str(target), bytes=sum(sizes.values()))
    return _complete(target)


def _resolved_by_ivy(home: Path, settings: SparkConcern, packages: Sequence[str]) -> list[Path]:
    from py4j.protocol import Py4JJavaError

    conf = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": java_options(home)}
    gateway = launch(find_java(home), conf, home)
    try:
        return _ask_ivy(gateway.jvm, settings.spark.conf, packages)
    except Py4JJavaError as error:
        reason = str(error.java_exception.getMessage()).strip().splitlines()
        raise ModakError(
            "spark.jars_unavailable",
            f"Spark's jars are not cached yet and could not be fetched: {reason[0] if reason else 'no reason given'}",
            hint="Once with a network is enough. Without one, name local copies in MODAK_SPARK_JARS: "
            f"{' and '.join(dict.fromkeys((*PACKAGES, *packages)))}.",
            retryable=True,
        ) from None
    finally:
        gateway.proc.stdin.close()
        gateway.proc.wait(30)


def _ask_ivy(jvm: Any, conf: Mapping[str, str], packages: Sequence[str]) -> list[Path]:
    maven = jvm.org.apache.spark.util.MavenUtils
    words = jvm.java.io.PrintStream(jvm.java.io.ByteArrayOutputStream())
    repositories = jvm.scala.Option.apply(conf.get("spark.jars.repositories"))
    ivy_folder = jvm.scala.Option.apply(conf.get("spark.jars.ivy"))
    own = conf.get("spark.jars.ivySettings")
    if own:
        using = maven.loadIvySettings(own, repositories, ivy_folder, words)
        without_cache = jvm.scala.Option.empty()
    else:
        using = maven.buildIvySettings(repositories, ivy_folder, True, words)
        without_cache = jvm.scala.Option.apply(maven.buildIvySettings(repositories, ivy_folder, False, words))
    nothing = getattr(maven, "resolveMavenCoordinates$default$5")()
    # The jars carry all they need; what they would pull in are annotations for compilers.
    paths = maven.resolveMavenCoordinates(",".join(packages), using, without_cache, False, nothing, False, words)
    return [Path(paths.apply(index)) for index in range(paths.size())]
