"""Where a file lies and what its name says, both ways.

A raw file is `{database}/{measurement}/{YYYY}/{MM}/{DD}/{HH}/{measurement}_{YYYYMMDD}_{HHMMSS}_{nanos}.parquet`: the
folders are the time of the data, the stamp in the name is the time of the flush. An output of ours has the newest stamp
among its inputs, the job that made it, its number in that job and the suffix of its tier:
`cpu_20261116_093000_000000000_20261116t101500123-1f0c9a7e-0000_compacted.parquet`. No two jobs share a name.

Paths are read from the right, because the name of a database may have slashes in it. Names that a reader could take for
something else are refused: Spark ignores what begins with `_`, and a glob reads `[1]` as a class of characters.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import total_ordering

from modak.core.errors import Refused
from modak.measurements.windows import Level, Window, window_at

STATE_FOLDER = "_compaction_state"
SUFFIX = ".parquet"

_HOSTILE = re.compile(r"[*?\[\]{}:=\\\x00-\x1f\x7f]")
_WINDOW_TAIL = re.compile(r"(?P<owner>.+)/(?P<window>\d{4}/\d{2}(?:/w[1-4]|/\d{2}(?:/\d{2})?)?)")
_STAMP = re.compile(r"(?P<day>\d{8})_(?P<time>\d{6})_(?P<nanos>\d{1,19})")
_JOB = r"\d{8}t\d{9}-[0-9a-f]{8}"
_NAME = re.compile(
    rf"(?P<head>.+?)(?:_(?P<stamp>\d{{8}}_\d{{6}}_\d{{1,19}}))?"
    rf"(?:_(?P<job>{_JOB})-(?P<part>\d{{4,}}))?(?:_(?P<tier>compacted|daily|weekly|monthly))?\.parquet"
)
TIER_WORDS = {Level.HOUR: "compacted", Level.DAY: "daily", Level.WEEK: "weekly", Level.MONTH: "monthly"}
"""The word at the end of an output's name, by the width of its window."""
_BILLION = 1_000_000_000


@total_ordering
@dataclass(frozen=True, slots=True)
class Stamp:
    """When a file was flushed: a second, and nanoseconds within it."""

    second: datetime
    nanos: int = 0

    def __str__(self) -> str:
        return f"{self.second:%Y%m%d_%H%M%S}_{self.nanos:09d}"

    def __lt__(self, other: Stamp) -> bool:
        return (self.second, self.nanos) < (other.second, other.nanos)

    @classmethod
    def parse(cls, text: str) -> Stamp | None:
        """The stamp that a text says, `None` where it says none; long nanoseconds count from 1970, as some do."""
        match = _STAMP.fullmatch(text)
        if match is None:
            return None
        try:
            # By hand: a listing has many names, and strptime takes longer than everything else about one.
            day, time = match["day"], match["time"]
            year, month, date = int(day[:4]), int(day[4:6]), int(day[6:])
            second = datetime(year, month, date, int(time[:2]), int(time[2:4]), int(time[4:]), tzinfo=UTC)
        except ValueError:
            return None
        return cls(second, int(match["nanos"]) % _BILLION)

    @classmethod
    def of(cls, moment: datetime) -> Stamp:
        """The stamp of a moment, to the microsecond."""
        moment = moment.astimezone(UTC)
        return cls(moment.replace(microsecond=0), moment.microsecond * 1_000)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of one window of one measurement."""

    database: str
    measurement: str
    window: Window

    @property
    def folder(self) -> str:
        """The path of the folder."""
        return f"{self.database}/{self.measurement}/{self.window.folder}"

    def claimed(self, level: Level) -> Place:
        """The place that is claimed for this one: its window of the level of all claims, or itself if it is wider."""
        wide = max(level, self.window.level, key=lambda each: each.width)
        return Place(self.database, self.measurement, self.window.widened(wide))


@dataclass(frozen=True, slots=True)
class FileName:
    """What the name of a file says; `tier` is the suffix word of an output, `None` for a raw file."""

    stamp: Stamp | None
    job: str | None = None
    part: int | None = None
    tier: str | None = None


def parse_folder(folder: str) -> Place | None:
    """The place that a folder is, read from the right; `None` where it is none of ours."""
    match = _WINDOW_TAIL.fullmatch(folder)
    window = window_at(match["window"]) if match else None
    if match is None or window is None:
        return None
    database, slash, measurement = match["owner"].rpartition("/")
    return Place(database, measurement, window) if slash else None


def parse_path(path: str) -> tuple[Place, FileName] | None:
    """Place and name of a Parquet file; `None` for anything that is no file of a measurement."""
    folder, _, name = path.rpartition("/")
    place = parse_folder(folder)
    if place is None:
        return None
    said = parse_name(name)
    return (place, said) if said is not None else None


def parse_name(name: str) -> FileName | None:
    """What a file name says; `None` if it is no Parquet file, or hidden."""
    if name.startswith((".", "_")):
        return None
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    stamp = Stamp.parse(match["stamp"]) if match["stamp"] else None
    return FileName(stamp, match["job"], int(match["part"]) if match["part"] else None, match["tier"])


def raw_name(measurement: str, stamp: Stamp) -> str:
    """The name under which a writer flushes a file."""
    return f"{measurement}_{stamp}{SUFFIX}"


def output_name(measurement: str, stamp: Stamp, job: str, part: int, tier_word: str) -> str:
    """The name of an output: the newest stamp of its inputs, the job, the number, the tier."""
    return f"{measurement}_{stamp}_{job}-{part:04d}_{tier_word}{SUFFIX}"


def check_name(what: str, name: str) -> str:
    """The name of a database (slashes allowed) or measurement, if every reader takes it for what it is."""
    problem = name_problem(name)
    if problem is None and what == "measurement" and "/" in name:
        problem = "has a slash in it"
    if problem is not None:
        raise Refused(
            "measurements.name",
            f"{name!r} cannot be the name of a {what}: it {problem}.",
            hint="Use letters, digits, - and _; begin with a letter or digit.",
        )
    return name


def name_problem(name: str) -> str | None:
    """What is wrong with a name, in words that follow "it"; `None` if nothing is."""
    for segment in name.split("/"):
        if not segment:
            return "has an empty part"
        if segment.startswith(("_", ".")):
            return "begins with _ or ., which readers skip"
        if segment == "..":
            return "climbs out of the store"
    if _HOSTILE.search(name):
        return "has characters that stand for something else in paths"
    if not unicodedata.is_normalized("NFC", name):
        return "is not in the composed form of Unicode (NFC)"
    return None
