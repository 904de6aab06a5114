"""Windows, from the hint that one is worth a merge to the jobs that are done: claim, decide again, merge.

What was decided before the claim is only a hint; what the listing after the claim shows is merged. A handful of windows
is worked on at a time, wave after wave of jobs, one per window, so the batches of a window run one after the other. A
batch that fails for lack of memory is halved.

Memory: the files of the windows that are worked on, never those of the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from modak.core.errors import UsageError
from modak.measurements.candidates import Candidate, Engine, WindowPlan, candidate, choose, halves, plan_window
from modak.measurements.claims import LockManager, claim_path
from modak.measurements.discover import Source, files_of
from modak.measurements.history import JobRecord
from modak.measurements.job import Job, JobConfig
from modak.measurements.layout import Place, parse_folder
from modak.measurements.runners import Runner, SparkRunner
from modak.measurements.state import State
from modak.measurements.tiers import Tier
from modak.measurements.windows import Level

MOST_HALVINGS = 4


@dataclass(frozen=True)
class Means:
    """What windows are compacted with; `memory_limit` in bytes is shared by the jobs that run at the same time."""

    state: State
    runner: Runner
    lock_manager: LockManager
    temp_directory: Path
    memory_limit: int
    batch_files: int
    claim_level: Level
    sort_keys: Callable[[str], Sequence[str]]
    completion_dir: Path | None = None
    storage_props: Mapping[str, str] = field(default_factory=dict, repr=False)


class Compaction:
    """Compacts windows, and tells of every job that is done."""

    def __init__(self, means: Means, on_done: Callable[[Tier, JobRecord], None]) -> None:
        self._means = means
        self._state = means.state
        self._on_done = on_done

    def compact(self, tier: Tier, chunk: Sequence[Candidate]) -> list[Candidate]:
        """Compact some windows; those that others work on come back."""
        with self.claimed(dict.fromkeys(map(self.claim_of, chunk))) as ours:
            queues = [
                deque((batch, 0) for batch in self._batches(tier, hint))
                for hint in chunk
                if self.claim_of(hint) in ours
            ]
            while queues := [queue for queue in queues if queue]:
                self._wave(tier, queues)
        return [hint for hint in chunk if self.claim_of(hint) not in ours]

    def claim_of(self, hint: Candidate) -> str:
        """The claim that covers a window."""
        return claim_path(place_of(hint).claimed(self._means.claim_level))

    @contextmanager
    def claimed(self, paths: Iterable[str]) -> Iterator[frozenset[str]]:
        """Hold as many of these claims as are to be had while the block runs."""
        ours: list[str] = []
        try:
            for path in paths:
                if self._claim(path):
                    ours.append(path)
            yield frozenset(ours)
        finally:
            for path in ours:
                self._state.claims.release(path)
                self._means.lock_manager.release_lock(path)

    def _claim(self, path: str) -> bool:
        if not self._means.lock_manager.acquire_lock(path):
            return False
        if self._state.claims.acquire(path):
            return True
        self._means.lock_manager.release_lock(path)
        return False

    def _batches(self, tier: Tier, hint: Candidate) -> tuple[Candidate, ...]:
        """What tasks have to merge of a window; nothing if it is done by now."""
        plan = self._decided(tier, place_of(hint))
        if plan is not None and plan.engine is Engine.SORT:
            plan = self._sort(tier, plan)
        return plan.batches if plan is not None else ()

    def _decided(self, tier: Tier, place: Place) -> WindowPlan | None:
        """What there is to do now that nobody else works here: files listed first, manifests afterwards."""
        source = Source(place.database, place.measurement)
        listed = files_of(self._state.objects, source, place.window)
        account = self._state.account(source, place.window)
        if account.unreadable:
            return None
        known = self._state.aside.known(source)
        free = [file for file in listed if account.free(file) and file.meta not in known]
        chosen = choose(tier.policy, place.window, free, self._state.clock.now())
        if not chosen:
            return None
        return plan_window(
            candidate(tier.policy, place, chosen),
            tier.policy,
            self._means.batch_files,
            can_sort=isinstance(self._means.runner, SparkRunner),
        )

    def _wave(self, tier: Tier, queues: list[deque[tuple[Candidate, int]]]) -> None:
        batches = [queue.popleft() for queue in queues]
        threads = self._means.runner.threads(len(batches))
        jobs = [self.job(tier, batch, threads) for batch, _ in batches]
        answers = self._means.runner.run([job.begin() for job in jobs])
        for queue, job, (batch, depth), answer in zip(queues, jobs, batches, answers, strict=True):
            result = job.finish(answer)
            smaller = halves(batch) if result.recoverable and depth < MOST_HALVINGS else None
            if smaller is not None:
                queue.extendleft((half, depth + 1) for half in reversed(smaller))
            self._on_done(tier, JobRecord.of(job, retried=smaller is not None))

    def _sort(self, tier: Tier, plan: WindowPlan) -> WindowPlan | None:
        """Sort a large window as a whole; where that cannot be, the batches that do it instead come back."""
        assert isinstance(self._means.runner, SparkRunner)
        (whole,) = plan.batches
        job = self.job(tier, whole, 1)
        result = job.finish(self._means.runner.sort(job.begin()))
        self._on_done(tier, JobRecord.of(job, retried=not result.success))
        if result.success:
            return None
        return plan_window(whole, tier.policy, self._means.batch_files, can_sort=False)

    def job(self, tier: Tier, batch: Candidate, threads: int) -> Job:
        """The job that merges a batch."""
        means = self._means
        return Job(
            JobConfig(
                measurement=batch.measurement,
                partition_path=batch.partition_path,
                files=batch.files,
                storage_backend=means.state.objects,
                database=batch.database,
                tier=batch.tier,
                target_size_mb=max(tier.policy.target_bytes >> 20, 1),
                target_bytes=tier.policy.target_bytes,
                temp_directory=str(means.temp_directory),
                sort_keys=tuple(means.sort_keys(batch.measurement)),
                memory_limit=str(means.memory_limit // means.runner.slots),
                completion_dir=str(means.completion_dir or ""),
                partition_time=batch.partition_time,
                pins=batch.pins,
                threads=threads,
                state=means.state,
                storage_props=means.storage_props,
            )
        )


def place_of(hint: Candidate) -> Place:
    """The window that a candidate is."""
    place = parse_folder(hint.partition_path)
    if place is None:
        raise UsageError("measurements.partition", f"{hint.partition_path!r} is no partition of a measurement.")
    return place
