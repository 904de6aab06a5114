"""Retention: files whose time lies further back than a measurement is kept for go, by a job like any other.

A job of retention has inputs and no outputs. It takes the claim on its window, writes a manifest and commits; from then
on readers count the files no more, and recovery deletes them after the grace period, unless an exported table still
shows them. A file goes when its own window has ended long enough ago: a day's file stays until the whole day is over.

Memory: the files of one month.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path

from modak.measurements.candidates import Candidate, Seen
from modak.measurements.discover import Source, files_of, seen_files
from modak.measurements.history import JobRecord
from modak.measurements.isolation import SubprocessJobResult
from modak.measurements.job import Job, JobConfig
from modak.measurements.layout import Place
from modak.measurements.state import State
from modak.measurements.windows import Level

RETENTION = "retention"
"""What a job of retention has in place of a tier."""
OTHERS = "*"


@dataclass(frozen=True)
class Retention:
    """How long measurements are kept, by name; `*` stands for all others, and no word for ever."""

    kept: Mapping[str, timedelta] = field(default_factory=dict)

    def of(self, measurement: str) -> timedelta | None:
        """How long a measurement is kept, `None` for ever."""
        return self.kept.get(measurement, self.kept.get(OTHERS))

    def limit(self, measurement: str, now: datetime) -> datetime | None:
        """Windows that have ended by then go; `None` if none does."""
        kept = self.of(measurement)
        return now - kept if kept is not None else None


def expired(state: State, retention: Retention, source: Source, level: Level) -> Iterator[Candidate]:
    """The files of a measurement that have been kept for long enough, by window of the level that claims cover."""
    limit = retention.limit(source.measurement, state.clock.now())
    if limit is None:
        return
    account = state.account(source)
    if account.unreadable:
        return
    old = (file for file in _until(state, source, limit) if _is_over(file, limit) and account.free(file))
    # Windows of several widths stand together in a listing only within their month.
    for _, month in groupby(old, key=lambda file: file.place.window.widened(Level.MONTH)):
        windows: dict[Place, list[Seen]] = {}
        for file in month:
            windows.setdefault(file.place.claimed(level), []).append(file)
        for place, files in windows.items():
            yield _candidate(place, files)


def drop(state: State, retention: Retention, place: Place, completion_dir: Path | None) -> JobRecord | None:
    """Let the files of a window go; the caller holds the claim on it. `None` if there is nothing to do by now."""
    source = Source(place.database, place.measurement)
    limit = retention.limit(source.measurement, state.clock.now())
    if limit is None:
        return None
    listed = files_of(state.objects, source, place.window)
    account = state.account(source, place.window)
    old = [file for file in listed if _is_over(file, limit) and account.free(file)]
    if not old or account.unreadable:
        return None
    chosen = _candidate(place, old)
    job = Job(
        JobConfig(
            measurement=chosen.measurement,
            partition_path=chosen.partition_path,
            files=chosen.files,
            storage_backend=state.objects,
            database=chosen.database,
            tier=RETENTION,
            completion_dir=str(completion_dir or ""),
            partition_time=chosen.partition_time,
            pins=chosen.pins,
            state=state,
        )
    )
    job.begin()
    job.finish(
        SubprocessJobResult(True, files_compacted=chosen.file_count, bytes_before=chosen.bytes, used=chosen.files)
    )
    return JobRecord.of(job)


def _until(state: State, source: Source, limit: datetime) -> Iterator[Seen]:
    """The files of a measurement up to the month of a moment; later years are not listed at all."""
    for year in state.objects.folders(source.folder):
        if year.rpartition("/")[2] <= f"{limit:%Y}":
            for file in seen_files(state.objects, source, year):
                if file.place.window.widened(Level.MONTH).start >= limit:
                    break
                yield file


def _is_over(file: Seen, limit: datetime) -> bool:
    return file.place.window.end <= limit


def _candidate(place: Place, files: list[Seen]) -> Candidate:
    pins = tuple(file.meta for file in files)
    paths = tuple(pin.path for pin in pins)
    return Candidate(place.database, place.measurement, place.folder, paths, RETENTION, place.window.start, pins=pins)
