"""One job of the driver: manifest, child, commit.

The manifest stands before the child begins, so everything the child does is known to belong to a job that has not
committed. After the child has answered, the inputs are looked at once more, and one compare-and-swap makes the outputs
the truth. The inputs go later (`recovery.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path

import structlog

from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.core.ids import new_op_id
from modak.measurements.aside import SetAside
from modak.measurements.completion import (
    CompactedOutput,
    CompletionManifest,
    CompletionState,
    completion_path,
    write_completion,
)
from modak.measurements.discover import Source, files_of, versions
from modak.measurements.isolation import (
    SECRETS_VARIABLE,
    SubprocessJobConfig,
    SubprocessJobResult,
    run_job_in_subprocess,
    split_secrets,
)
from modak.measurements.layout import TIER_WORDS, parse_folder
from modak.measurements.manifest import Held, Manifest, ManifestOutput, ManifestStatus
from modak.measurements.manifests import ManifestManager
from modak.measurements.recovery import Recovered, Recovery
from modak.measurements.state import State
from modak.storage.objects import Meta, Objects

_log = structlog.get_logger()


class JobStatus(Enum):
    """How far a job is, as people see it."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class JobConfig:
    """What one job does; `pins` are the versions of `files` that were seen."""

    measurement: str
    partition_path: str
    files: tuple[str, ...]
    storage_backend: Objects
    database: str
    tier: str = "hourly"
    target_size_mb: int = 512
    temp_directory: str = "data/compaction"
    sort_keys: tuple[str, ...] = ()
    memory_limit: str = "1GB"
    manifest_manager: ManifestManager | None = None
    completion_dir: str = ""
    job_id: str = ""
    partition_time: datetime | None = None
    pins: tuple[Meta, ...] = ()
    target_bytes: int = 0
    threads: int = 1
    state: State | None = None
    storage_props: Mapping[str, str] = field(default_factory=dict, repr=False)


class Job:
    """One compaction of some files of one window."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.state = config.state or State(config.storage_backend)
        self.manifests = config.manifest_manager or self.state.manifests
        self.job_id = config.job_id or new_op_id(self.state.clock)
        self.database, self.measurement = config.database, config.measurement
        self.partition_path, self.tier = config.partition_path, config.tier
        self.files = config.files
        self.storage_backend = config.storage_backend
        self.target_size_mb = config.target_size_mb
        self.temp_directory = config.temp_directory
        self.sort_keys = config.sort_keys
        self.completion_dir = config.completion_dir
        place = parse_folder(config.partition_path)
        if place is None:
            raise ModakError("measurements.partition", f"{config.partition_path!r} is no partition of a measurement.")
        self._place = place
        self.partition_time = config.partition_time or place.window.start
        self.status = JobStatus.PENDING
        self.error: str = ""
        self.started_at: datetime | None = None
        self.completed_at: datetime | None = None
        self.files_compacted = 0
        self.bytes_before = 0
        self.bytes_after = 0
        self.duration_seconds = 0.0
        self.result: SubprocessJobResult | None = None
        self._held: Held | None = None
        self._begun = 0.0

    def run(self) -> SubprocessJobResult:
        """The whole job, in a child of this process."""
        return self.finish(run_job_in_subprocess(self.begin()))

    def begin(self) -> SubprocessJobConfig:
        """Write the manifest; the order for the child."""
        config, clock = self.config, self.state.clock
        self.status, self.started_at, self._begun = JobStatus.RUNNING, clock.now(), clock.monotonic()
        self._tell(CompletionState.WRITING_OUTPUT)
        pins = tuple((pin.size, pin.etag) for pin in config.pins)
        self._held = self.manifests.begin(
            Manifest(
                database=config.database,
                measurement=config.measurement,
                partition_path=config.partition_path,
                tier=config.tier,
                job_id=self.job_id,
                created_at=clock.now(),
                input_files=config.files,
                pins=pins,
                owner=self.state.owner,
            )
        )
        shown, secret = split_secrets(config.storage_props)
        return SubprocessJobConfig(
            database=config.database,
            measurement=config.measurement,
            partition_path=config.partition_path,
            files=config.files,
            tier=config.tier,
            target_size_mb=config.target_size_mb,
            temp_directory=str(Path(config.temp_directory).absolute()),
            sort_keys=config.sort_keys,
            memory_limit=config.memory_limit,
            storage_type="local" if config.storage_backend.root.startswith("file:") else "s3",
            storage_config=json.dumps({"root": config.storage_backend.root, "props": shown}),
            job_id=self.job_id,
            partition_time=self.partition_time,
            target_bytes=config.target_bytes,
            tier_word=TIER_WORDS[self._place.window.level],
            pins=pins,
            threads=config.threads,
            extra_env={SECRETS_VARIABLE: json.dumps(secret)} if secret else {},
        )

    def finish(self, result: SubprocessJobResult) -> SubprocessJobResult:
        """Commit what the child did, or give the job up; a failure is an answer, not an exception."""
        reach("job.answered")
        self._remember(result)
        if result.success:
            try:
                self._commit(result)
            except ModakError as error:
                result = SubprocessJobResult(False, error.message, aside=result.aside, reason="permanent_error")
        if not result.success:
            self._give_up(result)
        self.result = result
        self.completed_at = self.state.clock.now()
        self.duration_seconds = self.state.clock.monotonic() - self._begun
        return result

    def _commit(self, result: SubprocessJobResult) -> None:
        assert self._held is not None
        pins = dict(zip(self.config.files, self._held.manifest.all_pins, strict=True))
        self._check_inputs(result.used, pins)
        reach("job.before_commit")
        moved = self.manifests.move(
            self._held,
            ManifestStatus.COMMITTED,
            input_files=result.used,
            pins=tuple(pins[path] for path in result.used),
            outputs=tuple(ManifestOutput(*each) for each in result.outputs),
        )
        if moved is None:
            raise Conflict("measurements.job_lost", f"Job {self.job_id} was given up by another compactor.")
        self._held = moved
        reach("job.committed")
        self._tell(CompletionState.OUTPUT_WRITTEN, result)
        self.status = JobStatus.COMPLETED
        self.files_compacted = result.files_compacted
        self.bytes_before, self.bytes_after = result.bytes_before, result.bytes_after

    def _check_inputs(self, used: tuple[str, ...], pins: Mapping[str, tuple[int, str]]) -> None:
        source = Source(self.config.database, self.config.measurement)
        there = versions(files_of(self.config.storage_backend, source, self._place.window))
        for path in used:
            size, etag = pins[path]
            found = there.get(path)
            if found is None or (etag and (found.size, found.etag) != (size, etag)):
                raise Conflict("measurements.input_changed", f"{path} has changed while it was merged.")

    def _give_up(self, result: SubprocessJobResult) -> None:
        self.status, self.error = JobStatus.FAILED, result.error
        assert self._held is not None
        if self._held.manifest.status is ManifestStatus.PENDING:
            Recovery(self.state, self._place.window.level).settle([self._held], Recovered())
        if self.config.completion_dir:
            completion_path(Path(self.config.completion_dir), self.job_id).unlink(missing_ok=True)
        _log.error(
            "measurements.job_failed",
            code="measurements.job_failed",
            job=self.job_id,
            partition=self.config.partition_path,
            error=result.error,
        )

    def _remember(self, result: SubprocessJobResult) -> None:
        known = [SetAside(path, etag, reason) for path, etag, reason in result.aside if etag]
        self.state.aside.remember(Source(self.config.database, self.config.measurement), known)
        for path, _, reason in result.aside:
            _log.warning("measurements.file_left", file=path, reason=reason)

    def _tell(self, state: CompletionState, result: SubprocessJobResult | None = None) -> None:
        if not self.config.completion_dir:
            return
        now = self.state.clock.now()
        outputs = tuple(
            CompactedOutput(
                path=path,
                sha256=sha256,
                size_bytes=size,
                database=self.config.database,
                measurement=self.config.measurement,
                partition_time=self.partition_time,
                tier=self.config.tier,
                created_at=now,
            )
            for path, size, sha256, _, _ in (result.outputs if result else ())
        )
        write_completion(
            Path(self.config.completion_dir),
            CompletionManifest(
                job_id=self.job_id,
                database=self.config.database,
                measurement=self.config.measurement,
                partition_path=self.config.partition_path,
                tier=self.config.tier,
                state=state,
                outputs=outputs,
                deleted_sources=result.used if result else (),
                created_at=self.started_at or now,
                updated_at=now,
            ),
        )
