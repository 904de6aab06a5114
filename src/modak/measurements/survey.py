"""What a store holds, counted for people, and whether it is sound.

Memory: one measurement's counts, and the footers of a few hundred files at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice

from modak.core.errors import ModakError
from modak.measurements.candidates import Seen, TierPolicy
from modak.measurements.discover import BadName, Source, discover, seen_files
from modak.measurements.footers import Pinned, footers
from modak.measurements.manifest import Held, ManifestStatus
from modak.measurements.manifests import Unreadable
from modak.measurements.state import State
from modak.measurements.tiers import find_candidates
from modak.storage.objects import Meta

_PAGE = 500


@dataclass
class MeasurementStatus:
    """One measurement."""

    database: str
    measurement: str
    files: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    windows: int = 0
    candidates: dict[str, int] = field(default_factory=dict)
    set_aside: int = 0
    oldest_candidate: datetime | None = None
    """When the oldest window began that is worth a merge."""

    @property
    def total_files(self) -> int:
        """Files that count."""
        return sum(self.files.values())


@dataclass
class StoreStatus:
    """A whole store."""

    root: str
    measurements: list[MeasurementStatus] = field(default_factory=list)
    jobs: dict[str, int] = field(default_factory=dict)
    readers: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Checked:
    """What the verification of one measurement found."""

    database: str
    measurement: str
    files: int = 0
    rows: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


def status(state: State, policies: Iterable[TierPolicy]) -> StoreStatus:
    """Count everything; takes one listing of the store."""
    found = StoreStatus(state.objects.root)
    chosen = [policy for policy in policies if policy.enabled]
    for each in discover(state.objects):
        if isinstance(each, BadName):
            found.problems.append(f"{each.path} is left alone: its name {each.problem}")
        else:
            found.measurements.append(_measured(state, each, chosen))
    for held in state.manifests.held():
        word = "unreadable" if isinstance(held, Unreadable) else held.manifest.status.value
        found.jobs[word] = found.jobs.get(word, 0) + 1
        if isinstance(held, Unreadable):
            found.problems.append(f"{held.path} cannot be read; its partition is left alone")
    found.readers = sum(1 for _ in state.objects.list("_compaction_state/readers"))
    return found


def _measured(state: State, source: Source, policies: Iterable[TierPolicy]) -> MeasurementStatus:
    told = MeasurementStatus(source.database, source.measurement)
    windows: set[str] = set()
    listed = list(seen_files(state.objects, source))
    account = state.account(source)
    for file in listed:
        if account.counts(file):
            word = file.said.tier or "raw"
            told.files[word] = told.files.get(word, 0) + 1
            told.bytes += file.meta.size
            windows.add(file.place.window.folder)
    told.windows = len(windows)
    for policy in policies:
        told.candidates[policy.name] = 0
        for each in find_candidates(state, policy, source):
            told.candidates[policy.name] += 1
            told.oldest_candidate = min(told.oldest_candidate or each.partition_time, each.partition_time)
    told.set_aside = sum(1 for _ in state.aside.all(source))
    return told


def verify(state: State, database: str | None = None, measurement: str | None = None) -> Iterator[Checked]:
    """Every measurement: files that count can be read, hold what their window says, and are as they were committed."""
    for each in discover(state.objects, database):
        if isinstance(each, Source) and measurement in (None, each.measurement):
            yield _verified(state, each)


def _verified(state: State, source: Source) -> Checked:
    checked = Checked(source.database, source.measurement)
    lease = state.lease()
    try:
        listed = list(seen_files(state.objects, source))
        try:
            files = list(state.account(source).visible(listed, source.folder))
        except ModakError as error:
            checked.problems.append(str(error))
            return checked
        aside = {each.path: each.reason for each in state.aside.all(source)}
        remaining = iter(files)
        while page := list(islice(remaining, _PAGE)):
            for file, pinned in zip(page, footers((state.objects, [each.meta for each in page])), strict=True):
                _check(file, pinned, aside, checked)
        _check_outputs(state, source, {file.meta.path: file.meta for file in listed}, checked)
    finally:
        lease.release()
    return checked


def _check(file: Seen, pinned: Pinned, aside: dict[str, str], checked: Checked) -> None:
    path, window = file.meta.path, file.place.window
    if pinned.problem:
        checked.problems.append(f"{path} cannot be read: {pinned.problem}")
        return
    checked.files += 1
    checked.rows += pinned.rows
    checked.bytes += file.meta.size
    if path in aside:
        checked.problems.append(f"{path} is left uncompacted: {aside[path]}")
    if pinned.earliest and pinned.latest and not (window.start <= pinned.earliest and pinned.latest < window.end):
        checked.problems.append(
            f"{path} has rows from {pinned.earliest} to {pinned.latest}, outside of its folder's time; "
            "reads of that time would miss them"
        )


def _check_outputs(state: State, source: Source, listed: dict[str, Meta], checked: Checked) -> None:
    for held in state.manifests.held(source.database):
        if not isinstance(held, Held) or held.manifest.measurement != source.measurement:
            continue
        if held.manifest.status is not ManifestStatus.COMMITTED:
            continue
        for output in held.manifest.outputs:
            found = listed.get(output.path) or state.objects.head(output.path)
            if found is None or found.size != output.size:
                checked.problems.append(f"{output.path} is not as job {held.manifest.job_id} committed it")
