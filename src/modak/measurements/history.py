"""What cycles did, kept in the store for people: one small object per cycle, for a month."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from modak.core.faults import reach
from modak.measurements.manifest import MANIFEST_BASE_PATH
from modak.storage.objects import Objects

if TYPE_CHECKING:
    from modak.measurements.job import Job

HISTORY = f"{MANIFEST_BASE_PATH}/history"
KEPT = timedelta(days=30)
_FORM = "%Y%m%dt%H%M%S%f"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, as people see it."""

    job_id: str
    database: str
    measurement: str
    partition: str
    tier: str
    files: int
    rows_in: int
    rows_out: int
    duplicates: int
    bytes_before: int
    bytes_after: int
    outputs: int
    seconds: float
    left_out: tuple[tuple[str, str], ...] = ()
    error: str = ""
    reason: str = ""
    retried: bool = False
    peak_bytes: int = 0

    @classmethod
    def of(cls, job: Job, *, retried: bool = False) -> JobRecord:
        """What a finished job did; `retried` if smaller ones follow that do the same."""
        result, config = job.result, job.config
        assert result is not None
        return cls(
            job_id=job.job_id,
            database=config.database,
            measurement=config.measurement,
            partition=config.partition_path,
            tier=config.tier,
            files=result.files_compacted,
            rows_in=result.rows_in,
            rows_out=result.rows_out,
            duplicates=result.duplicates,
            bytes_before=result.bytes_before,
            bytes_after=result.bytes_after,
            outputs=len(result.outputs),
            seconds=result.seconds or round(job.duration_seconds, 3),
            left_out=tuple((path, reason) for path, _, reason in result.aside),
            error="" if result.success else result.error,
            reason=result.reason,
            retried=retried,
            peak_bytes=result.peak_bytes,
        )

    @property
    def ratio(self) -> float:
        """How many times smaller the outputs are."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 0.0

    def told(self) -> dict[str, Any]:
        """The fields of a log event."""
        return {
            "partition": self.partition,
            "tier": self.tier,
            "files": self.files,
            "outputs": self.outputs,
            "rows": self.rows_out,
            "duplicates": self.duplicates,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "seconds": self.seconds,
        }


@dataclass
class CycleRecord:
    """One cycle: its jobs, the windows that others held, and what somebody should look at."""

    cycle_id: int
    started_at: datetime
    owner: str
    jobs: list[JobRecord] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    recovered: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """Jobs that failed for good; one that was done again in smaller ones does not count."""
        return sum(bool(job.error) and not job.retried for job in self.jobs)


def keep(objects: Objects, record: CycleRecord) -> None:
    """Write a cycle down, and drop those of long ago."""
    body = json.dumps(asdict(record), default=lambda value: value.isoformat()).encode()
    reach("history.before_keep")
    objects.put(f"{HISTORY}/{record.started_at.strftime(_FORM)}-{record.owner}.json", body)
    reach("history.kept")
    limit = (record.started_at - KEPT).strftime(_FORM)
    old = [meta.path for meta in objects.list(HISTORY) if meta.path.rpartition("/")[2] < limit]
    objects.delete(old)


def recall(objects: Objects, most: int = 20) -> Iterator[CycleRecord]:
    """The last cycles, the newest first."""
    paths = [meta.path for meta in objects.list(HISTORY)]
    for path in reversed(paths[-most:] if most else paths):
        found = objects.find(path)
        if found is not None:
            given = json.loads(found.data)
            jobs = [JobRecord(**{**job, "left_out": tuple(map(tuple, job["left_out"]))}) for job in given.pop("jobs")]
            yield CycleRecord(**{**given, "started_at": datetime.fromisoformat(given["started_at"]), "jobs": jobs})
