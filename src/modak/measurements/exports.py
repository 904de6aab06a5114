"""Which measurements are exported as Iceberg tables, and which files their snapshots hold.

A small object registers an export; the table lies in `_iceberg/{database}/{measurement}` of the store. Beside every
snapshot lies a list of its files in our own words: the next export begins with it, and recovery asks it before it
deletes anything.

Memory: the paths of the files of one export.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.measurements.discover import Source
from modak.measurements.manifest import MANIFEST_BASE_PATH
from modak.storage.objects import Objects

EXPORTS = f"{MANIFEST_BASE_PATH}/exports"
TABLES = "_iceberg"
HINT = "version-hint.text"
_VERSION = re.compile(r"v(\d+)\.metadata\.json")


@dataclass(frozen=True)
class Version:
    """One version of an exported table."""

    number: int
    path: str
    metadata: Mapping[str, Any]

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The snapshots that it has, oldest first."""
        return tuple(each["snapshot-id"] for each in self.metadata["snapshots"])


class Exports:
    """The exports of a store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[str, frozenset[str]] = {}

    def register(self, source: Source) -> None:
        """Let everybody know that a measurement is exported."""
        reach("export.before_register")
        self._objects.create(_path(source), json.dumps({"table": table_folder(source)}).encode())
        reach("export.registered")

    def forget(self, source: Source) -> None:
        """Let everybody know that a measurement is exported no more."""
        reach("export.before_forget")
        self._objects.delete([_path(source)])
        reach("export.forgotten")

    def all(self) -> Iterator[Source]:
        """Every measurement that is exported."""
        for meta in self._objects.list(EXPORTS):
            database, name = meta.path.split("/")[-2:]
            yield Source(unquote(database), unquote(name.removesuffix(".json")))

    def newest(self, source: Source) -> Version | None:
        """The version of the table that counts; `None` where there is no table."""
        prefix = f"{table_folder(source)}/metadata"
        names = (meta.path.rpartition("/")[2] for meta in self._objects.list(prefix))
        numbers = [int(match[1]) for name in names if (match := _VERSION.fullmatch(name))]
        if not numbers:
            return None
        path = version_path(source, max(numbers))
        try:
            return Version(max(numbers), path, json.loads(self._objects.get(path).data))
        except ValueError as error:
            raise ModakError(
                "measurements.export_unreadable",
                f"{path} cannot be read, so it is not known which files the exported table shows.",
                hint="modak-worker measurements export --drop removes the table; its data files stay.",
            ) from error

    def hold_any(self, source: Source, paths: Iterable[str]) -> bool:
        """Whether a snapshot of the exported table shows any of these files."""
        if self._objects.head(_path(source)) is None:
            return False
        version = self.newest(source)
        if version is None:
            return False
        asked = frozenset(paths)
        return any(asked & self._files(source, snapshot) for snapshot in version.snapshots)

    def _files(self, source: Source, snapshot: int) -> frozenset[str]:
        # What a snapshot shows never changes.
        path = files_path(source, snapshot)
        if path not in self._known:
            self._known[path] = frozenset(line["path"] for line in read_files(self._objects, source, snapshot))
        return self._known[path]


def table_folder(source: Source) -> str:
    """Where the table of a measurement lies."""
    return f"{TABLES}/{source.folder}"


def version_path(source: Source, number: int) -> str:
    """Where a version of the table lies."""
    return f"{table_folder(source)}/metadata/v{number}.metadata.json"


def files_path(source: Source, snapshot: int) -> str:
    """Where the files of a snapshot are listed."""
    return f"{table_folder(source)}/metadata/{snapshot}-files.jsonl.gz"


def write_files(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """The list of a snapshot's files as it is stored."""
    return gzip.compress("\n".join(json.dumps(line) for line in lines).encode(), mtime=0)


def read_files(objects: Objects, source: Source, snapshot: int) -> Iterator[dict[str, Any]]:
    """The files of a snapshot, each with what an export knows about it."""
    text = gzip.decompress(objects.get(files_path(source, snapshot)).data).decode()
    return (json.loads(line) for line in text.splitlines())


def _path(source: Source) -> str:
    return f"{EXPORTS}/{quote(source.database, safe='')}/{quote(source.measurement, safe='')}.json"
