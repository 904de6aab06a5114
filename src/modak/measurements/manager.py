"""The manager: cycles over a store, and what it has counted.

A cycle brings to its end what was interrupted, lets go what is old enough, and goes tier by tier, the narrowest first:
windows that are worth a merge are found as the listing goes on, and compacted a handful at a time (`compaction.py`).
At the end exported tables are shown what has changed.

Memory: the files of the windows that are worked on, never those of the store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from modak.core.errors import ModakError, Refused, UsageError
from modak.measurements.candidates import MAX_FILES_PER_BATCH, Candidate
from modak.measurements.claims import LockManager
from modak.measurements.compaction import Compaction, Means, place_of
from modak.measurements.completion import remove_orphans
from modak.measurements.discover import Source, sources
from modak.measurements.exporting import KEPT, refresh
from modak.measurements.history import CycleRecord, JobRecord, keep
from modak.measurements.layout import check_name
from modak.measurements.recovery import Recovery
from modak.measurements.retention import Retention, drop, expired
from modak.measurements.runners import ProcessRunner, Runner
from modak.measurements.state import State
from modak.measurements.tidy import catch_up, remove_dead_workplaces
from modak.measurements.tiers import Tier, find_candidates
from modak.measurements.windows import Level
from modak.storage.objects import Objects

_log = structlog.get_logger()
_WINDOWS_PER_SLOT = 4
OnJob = Callable[[JobRecord], None]


class CycleAlreadyRunning(Refused):
    """A cycle is running in this manager."""

    def __init__(self) -> None:
        super().__init__(
            "measurements.cycle_running", "A compaction cycle is running already.", hint="Wait for its end."
        )


@dataclass(frozen=True)
class ManagerConfig:
    """What a manager works with; `memory_limit` in bytes is shared by the jobs that run at the same time.

    The three numbers are kept for those who look at them; every tier decides by its own.
    """

    storage_backend: Objects
    tiers: tuple[Tier, ...]
    temp_directory: Path
    lock_manager: LockManager = field(default_factory=LockManager)
    min_age_hours: int = 1
    min_files: int = 10
    target_size_mb: int = 512
    state: State | None = None
    runner: Runner | None = None
    max_concurrent: int = 2
    memory_limit: int | None = None
    completion_dir: Path | None = None
    sort_keys_config: Mapping[str, Sequence[str]] = field(default_factory=dict)
    default_sort_keys: Sequence[str] = ()
    batch_files: int = MAX_FILES_PER_BATCH
    profile: bool = False
    retention: Retention = field(default_factory=Retention)
    export_kept: timedelta = KEPT
    storage_props: Mapping[str, str] = field(default_factory=dict, repr=False)


class Manager:
    """Compaction of one store."""

    def __init__(self, config: ManagerConfig) -> None:
        self.storage_backend = config.storage_backend
        self.lock_manager = config.lock_manager
        self.state = config.state or State(config.storage_backend)
        self.manifest_manager = self.state.manifests
        self.tiers = tuple(sorted(config.tiers, key=lambda tier: tier.policy.level.width))
        self.min_age_hours, self.min_files = config.min_age_hours, config.min_files
        self.target_size_mb = config.target_size_mb
        self.temp_directory = config.temp_directory
        self.max_concurrent = config.max_concurrent
        self.memory_limit = config.memory_limit or _half_of_this_machine()
        self.completion_dir = config.completion_dir
        self.sort_keys_config = dict(config.sort_keys_config)
        self.default_sort_keys = tuple(config.default_sort_keys)
        self.total_jobs_completed = 0
        self.total_jobs_failed = 0
        self.total_files_compacted = 0
        self.total_bytes_saved = 0
        self.total_manifests_recovered = 0
        self.total_files_expired = 0
        self.total_rows_compacted = 0
        self.total_bytes_read = 0
        self.total_cycles = 0
        self.total_cycle_seconds = 0.0
        self._config = config
        self._runner = config.runner or ProcessRunner(config.max_concurrent)
        self._guard = threading.Lock()
        self._running = False
        self._cycle_id = 0
        self._on_complete: Callable[[], None] | None = None

    def run_compaction_cycle(self) -> int:
        """One cycle over all enabled tiers; its id."""
        return self.run_compaction_cycle_for_tiers([tier.get_tier_name() for tier in self.tiers if tier.is_enabled()])

    def run_compaction_cycle_for_tiers(self, tier_names: Sequence[str]) -> int:
        """One cycle over some tiers of all databases; its id."""
        return self.cycle(tier_names).cycle_id

    def run_compaction_cycle_for_database(self, database: str, tier_names: Sequence[str]) -> int:
        """One cycle over some tiers of one database; its id."""
        return self.cycle(tier_names, database=database).cycle_id

    def cycle(
        self,
        tier_names: Sequence[str],
        *,
        database: str | None = None,
        measurement: str | None = None,
        on_job: OnJob | None = None,
    ) -> CycleRecord:
        """One cycle, with everything that it did."""
        tiers = self._named(tier_names)
        if database is not None:
            check_name("database", database)
        with self._one_at_a_time() as cycle_id:
            record = CycleRecord(cycle_id, self.state.clock.now(), self.state.owner)
            begun = self.state.clock.monotonic()
            self._recover(database, record)
            done = self._compaction(record, on_job)
            self._expire(done, database, measurement, record, on_job)
            for tier in tiers:
                found = self._candidates(tier, database, measurement)
                held: list[Candidate] = []
                while chunk := list(islice(found, self._runner.slots * _WINDOWS_PER_SLOT)):
                    held += done.compact(tier, chunk)
                if held and self.state.claims.wait_for_dead({done.claim_of(hint) for hint in held}):
                    held = done.compact(tier, held)
                record.held.extend(sorted({hint.partition_path for hint in held} - set(record.held)))
                self._recover(database, record)
            record.problems.extend(refresh(self.state, database, self._config.export_kept))
            record.seconds = self.state.clock.monotonic() - begun
            if record.jobs or record.problems:
                keep(self.storage_backend, record)
            return record

    def compact_partition(self, candidate: Candidate) -> None:
        """Compact one window; an error if it could not be done."""
        tier = self._named([candidate.tier])[0]
        record = CycleRecord(self._cycle_id, self.state.clock.now(), self.state.owner)
        with self.state.claims.beating():
            held = self._compaction(record, None).compact(tier, [candidate])
        if held:
            raise ModakError(
                "measurements.claimed", f"Another compactor works on {candidate.partition_path}.", retryable=True
            )
        failed = [job for job in record.jobs if job.error and not job.retried]
        if failed:
            raise ModakError("measurements.job_failed", f"{candidate.partition_path}: {failed[0].error}")

    def find_candidates(self) -> list[Candidate]:
        """The windows of all databases and enabled tiers that are worth a merge now."""
        return [found for tier in self.tiers for found in self._candidates(tier, None, None)]

    def get_current_cycle_id(self) -> int:
        """The id of the cycle that runs, or ran last; 0 before the first."""
        return self._cycle_id

    def is_cycle_running(self) -> bool:
        """Whether a cycle is running."""
        return self._running

    def get_sort_keys(self, measurement: str) -> list[str]:
        """The sort keys of a measurement, without `time`, which always comes last."""
        return list(self.sort_keys_config.get(measurement, self.default_sort_keys))

    def set_on_compaction_complete(self, callback: Callable[[], None] | None) -> None:
        """What to call after every job that succeeded."""
        self._on_complete = callback

    def stats(self) -> dict[str, Any]:
        """What this manager has done."""
        return {
            "cycle_id": self._cycle_id,
            "cycle_running": self._running,
            "total_jobs_completed": self.total_jobs_completed,
            "total_jobs_failed": self.total_jobs_failed,
            "total_files_compacted": self.total_files_compacted,
            "total_bytes_saved": self.total_bytes_saved,
            "total_manifests_recovered": self.total_manifests_recovered,
            "total_files_expired": self.total_files_expired,
            "total_rows_compacted": self.total_rows_compacted,
            "total_bytes_read": self.total_bytes_read,
            "total_cycles": self.total_cycles,
            "total_cycle_seconds": self.total_cycle_seconds,
            "tiers": {tier.get_tier_name(): tier.get_stats() for tier in self.tiers},
        }

    def cleanup_orphaned_temp_dirs(self) -> int:
        """Take away the folders of jobs whose process has died; how many there were."""
        return remove_dead_workplaces(self.temp_directory)

    def cleanup_orphaned_completion_manifests(self, timeout: timedelta = timedelta(0)) -> int:
        """Take away completion manifests of jobs that never wrote an output; a timeout of 0 means ten minutes."""
        if self.completion_dir is None:
            return 0
        # A job that committed and could not say so any more has written its output.
        catch_up(self.completion_dir, self.manifest_manager, self.state.clock.now())
        return remove_orphans(self.completion_dir, self.state.clock.now(), timeout)

    @property
    def claim_level(self) -> Level:
        """Claims cover the widest window that any enabled tier works on, so that tiers never meet on a file."""
        enabled = [tier.policy.level for tier in self.tiers if tier.is_enabled()]
        return max(enabled, key=lambda level: level.width, default=Level.HOUR)

    def _named(self, names: Sequence[str]) -> list[Tier]:
        if not names:
            raise UsageError(
                "measurements.tiers", "No tier was named.", hint=f"Known: {', '.join(self._tier_names())}."
            )
        known = {tier.get_tier_name(): tier for tier in self.tiers}
        for name in names:
            if name not in known:
                raise UsageError(
                    "measurements.tier", f"There is no tier {name!r}.", hint=f"Known: {', '.join(self._tier_names())}."
                )
        return [tier for tier in self.tiers if tier.get_tier_name() in names]

    def _tier_names(self) -> list[str]:
        return [tier.get_tier_name() for tier in self.tiers]

    @contextmanager
    def _one_at_a_time(self) -> Iterator[int]:
        with self._guard:
            if self._running:
                raise CycleAlreadyRunning
            self._running = True
            self._cycle_id += 1
        begun = self.state.clock.monotonic()
        try:
            with self.state.claims.beating():
                yield self._cycle_id
        finally:
            self.total_cycles += 1
            self.total_cycle_seconds += self.state.clock.monotonic() - begun
            self._running = False

    def _recover(self, database: str | None, record: CycleRecord) -> None:
        # Before as well: a manifest that recovery forgets can tell no more what its job did.
        self._catch_up()
        found = Recovery(self.state, self.claim_level).recover(database)
        self.total_manifests_recovered += found.recovered
        record.recovered += found.recovered
        record.held.extend(sorted(found.held - set(record.held)))
        record.problems.extend(problem for problem in found.problems if problem not in record.problems)
        self._catch_up()

    def _catch_up(self) -> None:
        if self.completion_dir is not None:
            catch_up(self.completion_dir, self.manifest_manager, self.state.clock.now())

    def _expire(
        self,
        done: Compaction,
        database: str | None,
        measurement: str | None,
        record: CycleRecord,
        on_job: OnJob | None,
    ) -> None:
        """Let go what has been kept for long enough."""
        for source in self._sources(database, measurement):
            for hint in expired(self.state, self._config.retention, source, self.claim_level):
                with done.claimed([done.claim_of(hint)]) as ours:
                    if not ours:
                        record.held.append(hint.partition_path)
                        continue
                    job = drop(self.state, self._config.retention, place_of(hint), self.completion_dir)
                if job is not None:
                    self._count(None, job, record, on_job)

    def _sources(self, database: str | None, measurement: str | None) -> Iterator[Source]:
        for source in sources(self.storage_backend, database):
            if measurement in (None, source.measurement):
                yield source

    def _candidates(self, tier: Tier, database: str | None, measurement: str | None) -> Iterator[Candidate]:
        for source in self._sources(database, measurement):
            yield from find_candidates(self.state, tier.policy, source)

    def _compaction(self, record: CycleRecord, on_job: OnJob | None) -> Compaction:
        means = Means(
            state=self.state,
            runner=self._runner,
            lock_manager=self.lock_manager,
            temp_directory=self.temp_directory,
            memory_limit=self.memory_limit,
            batch_files=self._config.batch_files,
            claim_level=self.claim_level,
            sort_keys=self.get_sort_keys,
            completion_dir=self.completion_dir,
            storage_props=self._config.storage_props,
        )
        return Compaction(means, lambda tier, job: self._count(tier, job, record, on_job))

    def _count(self, tier: Tier | None, done: JobRecord, record: CycleRecord, on_job: OnJob | None) -> None:
        """Count a job; one of retention has no tier."""
        record.jobs.append(done)
        if self._config.profile:
            _log.info("measurements.job_memory", job=done.job_id, rows=done.rows_in, peak_bytes=done.peak_bytes)
        if done.error:
            self.total_jobs_failed += 1
        elif tier is None:
            self.total_files_expired += done.files
            _log.info("measurements.expired", **done.told())
        else:
            saved = done.bytes_before - done.bytes_after
            self.total_jobs_completed += 1
            self.total_files_compacted += done.files
            self.total_rows_compacted += done.rows_out
            self.total_bytes_read += done.bytes_before
            self.total_bytes_saved += saved
            tier.record(done.files, saved)
            _log.info("measurements.compacted", **done.told())
        if not done.error and self._on_complete is not None:
            self._on_complete()
        if on_job is not None:
            on_job(done)


def _half_of_this_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
