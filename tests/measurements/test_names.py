"""Every name of the reference exists here, in Python's spelling, public and documented."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import modak.measurements as measurements
from modak.core.clock import FrozenClock
from modak.storage.objects import Objects
from tests.measurements.support import HOUR, NOW, manager

NAMES = {
    "Manager": """run_compaction_cycle run_compaction_cycle_for_tiers run_compaction_cycle_for_database
        compact_partition find_candidates get_current_cycle_id is_cycle_running get_sort_keys set_on_compaction_complete
        cleanup_orphaned_temp_dirs cleanup_orphaned_completion_manifests stats""",
    "Tier": """get_tier_name get_partition_level find_candidates should_compact is_compacted_file is_enabled
        get_stats""",
    "BaseTier": "get_base_stats should_compact_by_file_suffix is_enabled",
    "HourlyTier": "find_candidates get_partition_level get_stats get_tier_name is_compacted_file should_compact",
    "DailyTier": "find_candidates get_partition_level get_stats get_tier_name is_compacted_file should_compact",
    "Candidate": "file_count",
    "Job": "run",
    "Manifest": "output_path output_size",
    "LockManager": "acquire_lock release_lock is_locked",
    "ManifestManager": """generate_manifest_path write_manifest read_manifest delete_manifest list_manifests
        get_files_in_manifests is_file_in_manifest recover_orphaned_manifests""",
    "ManifestBridge": "register_compacted_file delete_compacted_source batch_file_ops",
    "ClusterGate": "can_compact role",
    "CompletionWatcher": "start stop stats",
    "Scheduler": "start stop trigger_now is_running status",
}
FIELDS = {
    "Candidate": "database measurement partition_path files tier partition_time batch_number total_batches",
    "ManagerConfig": """storage_backend lock_manager min_age_hours min_files target_size_mb max_concurrent
        temp_directory memory_limit completion_dir sort_keys_config default_sort_keys tiers""",
    "BaseTierConfig": "storage_backend min_age_hours min_files target_size_mb enabled",
    "HourlyTierConfig": "storage_backend min_age_hours min_files target_size_mb enabled",
    "DailyTierConfig": "storage_backend min_age_hours min_files target_size_mb enabled skip_file_age_check_days",
    "JobConfig": """measurement partition_path files storage_backend database target_size_mb tier temp_directory
        sort_keys manifest_manager completion_dir job_id partition_time""",
    "Manifest": "input_files database measurement partition_path tier status created_at job_id outputs",
    "CompletionManifest": """job_id database measurement partition_path tier state outputs deleted_sources created_at
        updated_at""",
    "CompactedOutput": "path sha256 size_bytes database measurement partition_time tier created_at",
    "CompactedFile": "path sha256 size_bytes database measurement partition_time tier created_at",
    "DeleteSourceOp": "path reason",
    "CompletionWatcherConfig": "dir bridge poll_interval apply_timeout",
    "SchedulerConfig": "manager schedule tier_names enabled cluster_gate",
    "SubprocessJobConfig": """database measurement partition_path files tier target_size_mb temp_directory sort_keys
        memory_limit storage_type storage_config job_id completion_dir partition_time extra_env""",
    "SubprocessJobResult": "success error files_compacted bytes_before bytes_after output_file",
}
OTHERS = """split_candidate_into_batches run_job_in_subprocess run_subprocess_job classify_subprocess_error JobStatus
    ManifestStatus CompletionState CompactionRoleGated CycleAlreadyRunning NotLeader read State
    Retention export Exported Objects"""
KEPT_BY_MANAGER = """total_jobs_completed total_jobs_failed total_files_compacted total_bytes_saved
    total_manifests_recovered completion_dir memory_limit sort_keys_config default_sort_keys tiers lock_manager
    manifest_manager storage_backend min_age_hours min_files target_size_mb max_concurrent temp_directory"""
KEPT_BY_JOB = """measurement partition_path files storage_backend database target_size_mb tier temp_directory sort_keys
    job_id started_at completed_at status error files_compacted bytes_before bytes_after duration_seconds completion_dir
    partition_time"""
KEPT_BY_TIER = """storage_backend min_age_hours min_files target_size_mb enabled total_compactions total_files_compacted
    total_bytes_saved"""


@pytest.mark.parametrize("name", sorted({*NAMES, *FIELDS, *OTHERS.split()}))
def test_the_name_is_public_and_documented(name: str) -> None:
    assert name in measurements.__all__
    found = getattr(measurements, name)
    assert inspect.getdoc(found)
    for method in NAMES.get(name, "").split():
        assert inspect.getdoc(getattr(found, method)), method
    assert set(FIELDS.get(name, "").split()) <= set(getattr(found, "__dataclass_fields__", {}))


def test_no_module_hides_a_public_name() -> None:
    modules = {path.stem for path in Path(measurements.__file__).parent.glob("*.py")}
    assert modules & set(measurements.__all__) == set()


def test_constants_say_what_the_reference_says() -> None:
    assert measurements.MANIFEST_BASE_PATH == "_compaction_state"
    assert measurements.MANIFEST_MAX_AGE.days == 7
    assert measurements.MAX_FILES_PER_BATCH == 30


def test_what_managers_jobs_and_tiers_keep(folder: Objects, tmp_path: Path) -> None:
    compactor = manager(folder, tmp_path)
    job = measurements.Job(measurements.JobConfig("cpu", "db/cpu/2026/11/01/09", ("a",), folder, "db"))
    daily = measurements.DailyTier(measurements.DailyTierConfig(folder))
    for kept, names in ((compactor, KEPT_BY_MANAGER), (job, KEPT_BY_JOB), (daily, KEPT_BY_TIER)):
        assert [name for name in names.split() if not hasattr(kept, name)] == []
    assert (job.status, job.files, job.partition_time) == (measurements.JobStatus.PENDING, ("a",), HOUR)
    assert (daily.min_age_hours, daily.min_files, daily.target_size_mb) == (24, 12, 2048)
    assert daily.skip_file_age_check_days == 7
    hourly = measurements.HourlyTier(measurements.HourlyTierConfig(folder, min_age_hours=0))
    assert (hourly.min_age_hours, hourly.min_files, hourly.target_size_mb) == (1, 10, 512)


def test_tiers_answer_for_themselves(folder: Objects) -> None:
    clock = FrozenClock(NOW)
    hourly = measurements.HourlyTier(measurements.HourlyTierConfig(folder, min_files=2, clock=clock))
    names = [f"cpu_20261101_09{minute:02d}00_1.parquet" for minute in range(3)]
    assert (hourly.get_tier_name(), hourly.get_partition_level(), hourly.is_enabled()) == ("hourly", "hour", True)
    assert hourly.should_compact(names, HOUR)
    assert not hourly.should_compact(names[:1], HOUR)
    done = "cpu_20261101_090000_1_compacted.parquet"
    assert hourly.is_compacted_file(done)
    assert not hourly.should_compact([done, names[0]], HOUR)
    assert hourly.should_compact([done, *names], HOUR)
    young = [f"cpu_{NOW:%Y%m%d_%H%M%S}_{number}.parquet" for number in range(3)]
    assert not hourly.should_compact(young, HOUR)
    daily = measurements.DailyTier(measurements.DailyTierConfig(folder, min_files=2, clock=clock))
    # The day is so long over that it is being filled in late.
    assert daily.should_compact(young, HOUR)
    assert daily.get_stats()["tier"] == "daily"
    off = measurements.DailyTier(measurements.DailyTierConfig(folder, enabled=False, clock=clock))
    assert not off.should_compact(names * 10, HOUR)
    assert off.find_candidates("db", "cpu") == []


@pytest.mark.parametrize(
    ("error", "stderr", "expected"),
    [
        (None, "", (False, "empty")),
        ("signal: segmentation fault", "", (True, "segfault")),
        ("signal: killed", "", (True, "killed")),
        ("exit status 137", "", (True, "oom_killed")),
        ("exit status 139", "", (True, "segfault")),
        ("exit status 1", "Parser Error: syntax error at or near", (False, "sql_error")),
        ("exit status 1", "Binder Error: no column", (False, "sql_error")),
        ("exit status 1", "Out of Memory Error: failed to allocate", (True, "memory_error")),
        ("exit status 1", "cannot allocate memory", (True, "memory_error")),
        ("exit status 1", "Permission denied", (False, "permanent_error")),
        ("exit status 1", "No such file or directory", (False, "permanent_error")),
        ("exit status 1", "Access Denied", (False, "permanent_error")),
        ("exit status 1", "key not found", (False, "permanent_error")),
        ("exit status 1", "something odd", (True, "unknown")),
        ("exit status 137", "Parser Error", (True, "oom_killed")),
        ("exit status 1", "Binder Error: out of memory", (False, "sql_error")),
    ],
)
def test_the_first_evidence_decides(error: str | None, stderr: str, expected: tuple[bool, str]) -> None:
    assert measurements.classify_subprocess_error(error, stderr) == expected
