"""Tiers: each gathers the files of narrower windows into larger ones.

Hourly, daily, weekly and monthly differ in nothing but their width and their settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from modak.core.clock import Clock, SystemClock
from modak.measurements.candidates import Candidate, TierPolicy, candidate, choose
from modak.measurements.discover import Source, by_window, seen_files
from modak.measurements.layout import Stamp, parse_name
from modak.measurements.manifests import concerns
from modak.measurements.state import State
from modak.measurements.windows import Level
from modak.storage.objects import Objects

_MIB = 1 << 20


class Tier(Protocol):
    """What a manager needs to know of a tier."""

    @property
    def policy(self) -> TierPolicy:
        """The settings as the planner reads them."""

    def get_tier_name(self) -> str:
        """The name that people use, such as `hourly`."""

    def get_partition_level(self) -> str:
        """The width of its windows, such as `hour`."""

    def find_candidates(self, database: str, measurement: str) -> list[Candidate]:
        """The windows of a measurement that are worth a merge now."""

    def should_compact(self, files: Sequence[str], partition_time: datetime) -> bool:
        """Whether files of a window, told by name, are worth a merge now."""

    def is_compacted_file(self, filename: str) -> bool:
        """Whether a file is an output of this tier."""

    def is_enabled(self) -> bool:
        """Whether the tier takes anything at all."""

    def get_stats(self) -> dict[str, Any]:
        """What the tier is set to, and what it has done in this process."""

    def record(self, files: int, bytes_saved: int) -> None:
        """Count a job that is done."""


@dataclass(frozen=True)
class BaseTierConfig:
    """Settings that all tiers share."""

    storage_backend: Objects
    min_age_hours: int = 1
    min_files: int = 10
    target_size_mb: int = 512
    enabled: bool = True
    clock: Clock | None = None


class BaseTier:
    """What all tiers share: settings, counters, and the decision by file names."""

    def __init__(self, config: BaseTierConfig) -> None:
        self.storage_backend = config.storage_backend
        self.min_age_hours = config.min_age_hours
        self.min_files = config.min_files
        self.target_size_mb = config.target_size_mb
        self.enabled = config.enabled
        self.total_compactions = 0
        self.total_files_compacted = 0
        self.total_bytes_saved = 0
        self._clock = config.clock or SystemClock()
        self._guard = threading.Lock()

    def is_enabled(self) -> bool:
        """Whether the tier takes anything at all."""
        return self.enabled

    def record(self, files: int, bytes_saved: int) -> None:
        """Count a job that is done."""
        with self._guard:
            self.total_compactions += 1
            self.total_files_compacted += files
            self.total_bytes_saved += bytes_saved

    def get_base_stats(self) -> dict[str, Any]:
        """Settings and counters that all tiers have."""
        return {
            "enabled": self.enabled,
            "min_age_hours": self.min_age_hours,
            "min_files": self.min_files,
            "target_size_mb": self.target_size_mb,
            "total_compactions": self.total_compactions,
            "total_files_compacted": self.total_files_compacted,
            "total_bytes_saved": self.total_bytes_saved,
        }

    def should_compact_by_file_suffix(
        self, files: Sequence[str], compacted_suffix: str, is_uncompacted_input: Callable[[str], bool]
    ) -> bool:
        """Whether enough inputs have gathered, with or without an output that is there already."""
        fresh = sum(not name.endswith(compacted_suffix) and is_uncompacted_input(name) for name in files)
        return fresh >= max(self.min_files, 1)


class WindowTier(BaseTier):
    """A tier of any width."""

    def __init__(
        self, name: str, level: Level, config: BaseTierConfig, skip_file_age_check_days: int | None = None
    ) -> None:
        super().__init__(config)
        self.name = name
        self.level = level
        self.skip_file_age_check_days = skip_file_age_check_days

    @property
    def policy(self) -> TierPolicy:
        """The settings as the planner reads them."""
        late = self.skip_file_age_check_days
        return TierPolicy(
            self.name,
            self.level,
            timedelta(hours=self.min_age_hours),
            self.min_files,
            self.target_size_mb * _MIB,
            self.enabled,
            None if late is None else timedelta(days=late),
        )

    def get_tier_name(self) -> str:
        """The name that people use."""
        return self.name

    def get_partition_level(self) -> str:
        """The width of its windows."""
        return self.level.value

    def is_compacted_file(self, filename: str) -> bool:
        """Whether a file is an output of this tier."""
        said = parse_name(filename.rpartition("/")[2])
        return said is not None and said.tier == self.policy.word

    def should_compact(self, files: Sequence[str], partition_time: datetime) -> bool:
        """Whether files of a window, told by name, are worth a merge now; stamps that say nothing are ignored."""
        if not self.enabled:
            return False
        late = self.policy.skip_age_after
        now = self._clock.now()
        skip = late is not None and partition_time + late <= now
        limit = Stamp.of(now - self.policy.min_age)

        def old_enough(name: str) -> bool:
            said = parse_name(name.rpartition("/")[2])
            return said is not None and (skip or said.stamp is None or said.stamp <= limit)

        return self.should_compact_by_file_suffix(files, f"_{self.policy.word}.parquet", old_enough)

    def find_candidates(self, database: str, measurement: str) -> list[Candidate]:
        """The windows of a measurement that are worth a merge now."""
        return list(
            find_candidates(State(self.storage_backend, self._clock), self.policy, Source(database, measurement))
        )

    def get_stats(self) -> dict[str, Any]:
        """What the tier is set to, and what it has done in this process."""
        more = {"tier": self.name, "partition_level": self.level.value}
        if self.skip_file_age_check_days is not None:
            more["skip_file_age_check_days"] = str(self.skip_file_age_check_days)
        return {**more, **self.get_base_stats()}


@dataclass(frozen=True)
class HourlyTierConfig(BaseTierConfig):
    """Settings of the hourly tier."""


@dataclass(frozen=True)
class DailyTierConfig(BaseTierConfig):
    """Settings of the daily tier."""

    min_age_hours: int = 24
    min_files: int = 12
    target_size_mb: int = 2048
    skip_file_age_check_days: int = 7


class HourlyTier(WindowTier):
    """Small files of an hour into large ones of the hour; an hour is never taken before it is an hour old."""

    def __init__(self, config: HourlyTierConfig) -> None:
        super().__init__("hourly", Level.HOUR, config)
        self.min_age_hours = max(config.min_age_hours, 1)


class DailyTier(WindowTier):
    """Files of the hours of a day, raw or compacted, into files of the day."""

    def __init__(self, config: DailyTierConfig) -> None:
        super().__init__("daily", Level.DAY, config, config.skip_file_age_check_days)


def find_candidates(state: State, policy: TierPolicy, source: Source) -> Iterator[Candidate]:
    """The windows of a measurement that are worth a merge now, one after the other as the listing goes on."""
    if not policy.enabled:
        return
    account = state.account(source)
    known = state.aside.known(source)
    now = state.clock.now()
    for place, files in by_window(seen_files(state.objects, source), policy.level):
        if any(concerns(path, source, place.window) for path in account.unreadable):
            continue
        free = (file for file in files if account.free(file) and file.meta not in known)
        chosen = choose(policy, place.window, free, now)
        if chosen:
            yield candidate(policy, place, chosen)
