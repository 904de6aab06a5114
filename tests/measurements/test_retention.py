"""Measurements are kept for as long as they should be, each its own time, and go as safely as a merge does."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.faults import Fault, InjectedFault
from modak.measurements.completion import CompletionState, pending_completions, read_completion
from modak.measurements.discover import Source
from modak.measurements.exporting import export
from modak.measurements.manager import Manager
from modak.measurements.manifest import ManifestStatus
from modak.measurements.recovery import Recovery
from modak.measurements.retention import Retention, expired
from modak.measurements.state import Patience
from modak.measurements.windows import Level
from modak.storage.objects import Objects
from tests.measurements.support import HOUR, NOW, Rows, all_rows, data_files, fill, manager, tiers, write

DAY = timedelta(days=1)
KEPT = Retention({"cpu": 10 * DAY, "*": 20 * DAY})


def aged(objects: Objects, days: dict[str, tuple[int, ...]]) -> dict[tuple[str, int], Rows]:
    """Files of measurements, so many days old each."""
    return {
        (name, ago): fill(objects, files=2, measurement=name, hour=NOW - ago * DAY)
        for name, ages in days.items()
        for ago in ages
    }


def keeper(objects: Objects, temp: Path, **more: object) -> Manager:
    quiet = tiers(objects, FrozenClock(NOW), min_files=100)
    return manager(
        objects,
        temp,
        **{"tiers": quiet, "retention": KEPT, "storage_props": objects._props, **more},  # type: ignore[arg-type]
    )


def test_every_measurement_is_kept_for_its_own_time(objects: Objects, tmp_path: Path) -> None:
    made = aged(objects, {"cpu": (12, 8), "mem": (25, 12)})
    compactor = keeper(objects, tmp_path)
    record = compactor.cycle(["hourly"])
    assert {(job.measurement, job.tier, job.files) for job in record.jobs} == {
        ("cpu", "retention", 2),
        ("mem", "retention", 2),
    }
    assert all_rows(compactor.state) == made["cpu", 8] + made["mem", 12]
    assert len(data_files(objects)) == 4
    assert compactor.manifest_manager.list_manifests() == []
    assert compactor.stats()["total_files_expired"] == 4
    assert compactor.total_jobs_completed == 0


def test_without_a_word_everything_is_kept_for_ever(folder: Objects, tmp_path: Path) -> None:
    made = aged(folder, {"cpu": (3000,)})
    compactor = keeper(folder, tmp_path, retention=Retention({"mem": DAY}))
    assert compactor.cycle(["hourly"]).jobs == []
    assert all_rows(compactor.state) == made["cpu", 3000]


def test_a_file_goes_when_its_whole_window_is_old_enough(folder: Objects, tmp_path: Path) -> None:
    from modak.measurements.tiers import BaseTierConfig, WindowTier

    clock = FrozenClock(NOW)
    for day in range(4):
        fill(folder, files=2, hour=HOUR + day * DAY)
    config = BaseTierConfig(folder, min_age_hours=1, min_files=2, clock=clock)
    monthly = (WindowTier("monthly", Level.MONTH, config),)
    manager(folder, tmp_path, tiers=monthly, clock=clock).cycle(["monthly"])
    # The tier is switched off by now; what it made is kept until the end of its month is old enough.
    fill(folder, files=2, hour=HOUR)
    compactor = keeper(folder, tmp_path, clock=clock)
    compactor.cycle(["hourly"])
    assert [path.rpartition("_")[2] for path in data_files(folder)] == ["monthly.parquet"]
    clock.sleep(9 * 86_400)
    compactor.cycle(["hourly"])
    assert len(data_files(folder)) == 1
    clock.sleep(86_400)
    compactor.cycle(["hourly"])
    assert data_files(folder) == []


def test_files_that_cannot_be_read_go_as_well(folder: Objects, tmp_path: Path) -> None:
    write(folder, b"no parquet", hour=NOW - 12 * DAY)
    keeper(folder, tmp_path).cycle(["hourly"])
    assert data_files(folder) == []


def test_readers_and_exported_tables_keep_what_they_show(folder: Objects, tmp_path: Path) -> None:
    clock = FrozenClock(NOW)
    aged(folder, {"cpu": (12,)})
    compactor = keeper(folder, tmp_path, clock=clock, export_kept=timedelta(hours=1))
    lease = compactor.state.lease()
    export(compactor.state, Source("db", "cpu"), timedelta(hours=1))
    clock.sleep(1)
    compactor.cycle(["hourly"])
    assert all_rows(compactor.state) == Counter()
    assert len(data_files(folder)) == 2
    lease.release()
    compactor.cycle(["hourly"])
    assert len(data_files(folder)) == 2
    clock.sleep(3600)
    for _ in range(2):
        compactor.cycle(["hourly"])
    assert data_files(folder) == []


def test_another_compactor_is_left_to_its_work(folder: Objects, tmp_path: Path) -> None:
    aged(folder, {"cpu": (12,)})
    working = keeper(folder, tmp_path, patience=Patience(timedelta(0), 60))
    (hint,) = expired(working.state, KEPT, Source("db", "cpu"), Level.DAY)
    from modak.measurements.claims import claim_path
    from modak.measurements.layout import parse_folder

    place = parse_folder(hint.partition_path)
    assert place is not None
    assert working.state.claims.acquire(claim_path(place))
    record = keeper(folder, tmp_path, patience=Patience(timedelta(0), 60)).cycle(["hourly"])
    assert (record.jobs, record.held) == ([], [hint.partition_path])
    assert len(data_files(folder)) == 2


@pytest.mark.parametrize(
    "struck",
    ["manifest.begun", "job.before_commit", "job.committed", "recovery.before_inputs", "manifest.before_delete"],
)
def test_a_job_of_retention_that_dies_is_finished_or_begun_anew(folder: Objects, tmp_path: Path, struck: str) -> None:
    made = aged(folder, {"cpu": (12, 8)})
    clock = FrozenClock(NOW)
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        keeper(folder, tmp_path, clock=clock).cycle(["hourly"])
    faults.arm(None)
    after = keeper(folder, tmp_path, clock=clock)
    seen = all_rows(after.state)
    assert seen in (made["cpu", 8], made["cpu", 8] + made["cpu", 12])
    after.cycle(["hourly"])
    clock.sleep(1)
    after.cycle(["hourly"])
    assert all_rows(after.state) == made["cpu", 8]
    assert len(data_files(folder)) == 2


def test_the_cluster_is_told(folder: Objects, tmp_path: Path) -> None:
    aged(folder, {"cpu": (12,)})
    gone = data_files(folder)
    pending = tmp_path / "pending"
    keeper(folder, tmp_path, completion_dir=pending).cycle(["hourly"])
    (told,) = (read_completion(path) for path in pending_completions(pending))
    assert told is not None
    assert (told.state, told.outputs, list(told.deleted_sources)) == (CompletionState.SOURCES_DELETED, (), gone)


def test_what_was_let_go_comes_back_only_by_being_written_again(folder: Objects, tmp_path: Path) -> None:
    aged(folder, {"cpu": (12,)})
    clock = FrozenClock(NOW)
    compactor = keeper(folder, tmp_path, clock=clock, patience=Patience(timedelta(minutes=15)))
    compactor.cycle(["hourly"])
    (held,) = compactor.manifest_manager.held()
    assert held.manifest.status is ManifestStatus.COMMITTED  # type: ignore[union-attr]
    assert all_rows(compactor.state) == Counter()
    assert len(data_files(folder)) == 2
    clock.sleep(900)
    Recovery(compactor.state, compactor.claim_level).recover()
    assert data_files(folder) == []
