"""Finding databases, measurements and windows in a store, a page of its listing at a time.

Folders are walked until one holds years with months in them: that is a measurement, and what stands before it is its
database. Hidden folders and the folder of our own state are never looked into. A folder whose name readers would take
for something else is reported and left alone.

Memory: the files of one window for hours and days, of one month for weeks and months.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from modak.measurements.candidates import Seen
from modak.measurements.layout import Place, check_name, name_problem
from modak.measurements.windows import Level, Window
from modak.storage.objects import Meta, Objects

_YEAR = re.compile(r"\d{4}")
_MONTH = re.compile(r"\d{2}")


@dataclass(frozen=True, slots=True)
class Source:
    """A measurement of a database."""

    database: str
    measurement: str

    @property
    def folder(self) -> str:
        """The path of its folder."""
        return f"{self.database}/{self.measurement}"


@dataclass(frozen=True, slots=True)
class BadName:
    """A folder that is left alone, and why."""

    path: str
    problem: str


def discover(objects: Objects, database: str | None = None) -> Iterator[Source | BadName]:
    """Every measurement of a store, or of one database of it."""
    if database is not None:
        check_name("database", database)
    yield from _descend(objects, database or "", database)


def sources(objects: Objects, database: str | None = None) -> Iterator[Source]:
    """Every measurement of a store whose name is sound."""
    return (found for found in discover(objects, database) if isinstance(found, Source))


def _descend(objects: Objects, folder: str, database: str | None) -> Iterator[Source | BadName]:
    owner, _, measurement = folder.rpartition("/")
    for child in objects.folders(folder):
        name = child.rpartition("/")[2]
        if name.startswith((".", "_")):
            continue
        problem = name_problem(name)
        if problem is not None:
            yield BadName(child, problem)
        elif owner and _YEAR.fullmatch(name) and _has_months(objects, child):
            if database is None or owner == database:
                yield Source(owner, measurement)
            # The other years of a measurement say nothing new; a measurement inside a measurement is not a thing.
            return
        elif database is None or folder == database:
            yield from _descend(objects, child, database)


def _has_months(objects: Objects, year: str) -> bool:
    return any(_MONTH.fullmatch(child.rpartition("/")[2]) for child in objects.folders(year))


def seen_files(objects: Objects, source: Source, prefix: str | None = None) -> Iterator[Seen]:
    """The files of a measurement in the order of their paths; what is no file of it is passed over."""
    for meta in objects.list(prefix or source.folder):
        seen = Seen.of(meta)
        if seen is not None and (seen.place.database, seen.place.measurement) == (source.database, source.measurement):
            yield seen


def by_window(files: Iterable[Seen], level: Level) -> Iterator[tuple[Place, list[Seen]]]:
    """The files gathered by window of a level; what belongs to wider windows is passed over."""
    narrow = (file for file in files if file.place.window.level.width <= level.width)
    # Hours and days are folders, so their files stand together in a listing; weeks do so only within their month.
    together = level if level in (Level.HOUR, Level.DAY) else Level.MONTH
    for _, group in groupby(narrow, key=lambda file: _widened(file.place, together)):
        windows: dict[Place, list[Seen]] = {}
        for file in group:
            windows.setdefault(_widened(file.place, level), []).append(file)
        yield from sorted(windows.items(), key=lambda item: item[0].window.start)


def files_of(objects: Objects, source: Source, window: Window) -> list[Seen]:
    """The files of one window, narrower windows inside it included."""
    folder = window if window.level in (Level.HOUR, Level.DAY) else window.widened(Level.MONTH)
    prefix = f"{source.folder}/{folder.folder}"
    return [file for file in seen_files(objects, source, prefix) if file.place.window in window]


def versions(files: Iterable[Seen]) -> dict[str, Meta]:
    """What is there now, by path."""
    return {file.meta.path: file.meta for file in files}


def _widened(place: Place, level: Level) -> Place:
    return Place(place.database, place.measurement, place.window.widened(level))
