"""Measurement stores: many small time-partitioned Parquet files become few large sorted ones.

`Manager` compacts a store, `Scheduler` does so at set times, `read` gives a measurement as a DataFrame with every row
exactly once, `export` shows it as an Iceberg table. Names are resolved on first use, because Arrow and DuckDB take a
good part of the time of a short command. No module has the name of a function here, or importing it would hide that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modak.core.errors import NotLeader
    from modak.measurements.candidates import MAX_FILES_PER_BATCH, Candidate, split_candidate_into_batches
    from modak.measurements.child import run_subprocess_job
    from modak.measurements.claims import LockManager
    from modak.measurements.cluster import (
        ClusterGate,
        CompactedFile,
        CompactionRoleGated,
        DeleteSourceOp,
        ManifestBridge,
    )
    from modak.measurements.completion import CompactedOutput, CompletionManifest, CompletionState
    from modak.measurements.exporting import Exported, export
    from modak.measurements.isolation import (
        SubprocessJobConfig,
        SubprocessJobResult,
        classify_subprocess_error,
        run_job_in_subprocess,
    )
    from modak.measurements.job import Job, JobConfig, JobStatus
    from modak.measurements.manager import CycleAlreadyRunning, Manager, ManagerConfig
    from modak.measurements.manifest import MANIFEST_BASE_PATH, MANIFEST_MAX_AGE, Manifest, ManifestStatus
    from modak.measurements.manifests import ManifestManager
    from modak.measurements.reading import read
    from modak.measurements.retention import Retention
    from modak.measurements.scheduler import Scheduler, SchedulerConfig
    from modak.measurements.state import State
    from modak.measurements.tiers import (
        BaseTier,
        BaseTierConfig,
        DailyTier,
        DailyTierConfig,
        HourlyTier,
        HourlyTierConfig,
        Tier,
    )
    from modak.measurements.watcher import CompletionWatcher, CompletionWatcherConfig
    from modak.storage.objects import Objects

_HOMES = {
    "modak.core.errors": ("NotLeader",),
    "modak.measurements.candidates": ("MAX_FILES_PER_BATCH", "Candidate", "split_candidate_into_batches"),
    "modak.measurements.child": ("run_subprocess_job",),
    "modak.measurements.claims": ("LockManager",),
    "modak.measurements.cluster": (
        "ClusterGate",
        "CompactedFile",
        "CompactionRoleGated",
        "DeleteSourceOp",
        "ManifestBridge",
    ),
    "modak.measurements.completion": ("CompactedOutput", "CompletionManifest", "CompletionState"),
    "modak.measurements.exporting": ("Exported", "export"),
    "modak.measurements.isolation": (
        "SubprocessJobConfig",
        "SubprocessJobResult",
        "classify_subprocess_error",
        "run_job_in_subprocess",
    ),
    "modak.measurements.job": ("Job", "JobConfig", "JobStatus"),
    "modak.measurements.manager": ("CycleAlreadyRunning", "Manager", "ManagerConfig"),
    "modak.measurements.manifest": ("MANIFEST_BASE_PATH", "MANIFEST_MAX_AGE", "Manifest", "ManifestStatus"),
    "modak.measurements.manifests": ("ManifestManager",),
    "modak.measurements.reading": ("read",),
    "modak.measurements.retention": ("Retention",),
    "modak.measurements.scheduler": ("Scheduler", "SchedulerConfig"),
    "modak.measurements.state": ("State",),
    "modak.measurements.tiers": (
        "BaseTier",
        "BaseTierConfig",
        "DailyTier",
        "DailyTierConfig",
        "HourlyTier",
        "HourlyTierConfig",
        "Tier",
    ),
    "modak.measurements.watcher": ("CompletionWatcher", "CompletionWatcherConfig"),
    "modak.storage.objects": ("Objects",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


__all__ = [
    "MANIFEST_BASE_PATH",
    "MANIFEST_MAX_AGE",
    "MAX_FILES_PER_BATCH",
    "BaseTier",
    "BaseTierConfig",
    "Candidate",
    "ClusterGate",
    "CompactedFile",
    "CompactedOutput",
    "CompactionRoleGated",
    "CompletionManifest",
    "CompletionState",
    "CompletionWatcher",
    "CompletionWatcherConfig",
    "CycleAlreadyRunning",
    "DailyTier",
    "DailyTierConfig",
    "DeleteSourceOp",
    "Exported",
    "HourlyTier",
    "HourlyTierConfig",
    "Job",
    "JobConfig",
    "JobStatus",
    "LockManager",
    "Manager",
    "ManagerConfig",
    "Manifest",
    "ManifestBridge",
    "ManifestManager",
    "ManifestStatus",
    "NotLeader",
    "Objects",
    "Retention",
    "Scheduler",
    "SchedulerConfig",
    "State",
    "SubprocessJobConfig",
    "SubprocessJobResult",
    "Tier",
    "classify_subprocess_error",
    "export",
    "read",
    "run_job_in_subprocess",
    "run_subprocess_job",
    "split_candidate_into_batches",
]
