"""Stores of many files and many windows: listed in pages, planned one window at a time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from modak.core.clock import FrozenClock
from modak.measurements.candidates import TierPolicy
from modak.measurements.discover import Source, by_window, seen_files
from modak.measurements.layout import Place, Stamp, raw_name
from modak.measurements.manifest import Held
from modak.measurements.state import Patience, State
from modak.measurements.tiers import find_candidates
from modak.measurements.windows import Level, window_of
from modak.storage.objects import Meta, Objects
from tests.measurements.support import HOUR, NOW, data_files, fill, manager, tiers

START = datetime(2025, 1, 1, tzinfo=UTC)


def synthetic(windows: int, files: int) -> Iterator[Meta]:
    """The listing of a store as a bucket gives it."""
    for number in range(windows):
        place = Place("db", "cpu", window_of(Level.HOUR, START + timedelta(hours=number)))
        for index in range(files):
            name = raw_name("cpu", Stamp(place.window.start, index))
            yield Meta(f"{place.folder}/{name}", 1000, "e", place.window.start)


def planned(folder: Objects, monkeypatch: pytest.MonkeyPatch, windows: int, files: int) -> tuple[int, int]:
    """How many files candidates have in all, and the memory that finding them took at most."""
    real = folder.list
    monkeypatch.setattr(
        folder,
        "list",
        lambda prefix="", after=None: synthetic(windows, files) if prefix == "db/cpu" else real(prefix, after),
    )
    state = State(folder, FrozenClock(NOW))
    policy = TierPolicy("hourly", Level.HOUR, timedelta(hours=1), 2, 512 << 20)
    tracemalloc.start()
    found = sum(candidate.file_count for candidate in find_candidates(state, policy, Source("db", "cpu")))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    monkeypatch.undo()
    return found, peak


def test_planning_holds_one_window_at_a_time(folder: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = 40, 400
    assert planned(folder, monkeypatch, 10, 3)[0] == 30
    (found, small), (more, large) = (planned(folder, monkeypatch, windows, 10) for windows in (few, many))
    assert (found, more) == (few * 10, many * 10)
    # Ten times the windows, and no more memory than for one of them and what other threads do meanwhile.
    assert large < small + (2 << 20)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("windows", "files"), [(10_000, 3), (1, 100_000)])
def test_planning_of_large_stores_is_bounded(
    folder: Objects, monkeypatch: pytest.MonkeyPatch, windows: int, files: int
) -> None:
    found, peak = planned(folder, monkeypatch, windows, files)
    assert found == windows * files
    assert peak < (400 << 20 if windows == 1 else 24 << 20)


def test_a_window_reads_no_manifests_but_its_own(folder: Objects, tmp_path: Path) -> None:
    """A store of many windows has many manifests while inputs wait for the end of their grace period."""
    for hour in range(12):
        fill(folder, files=2, rows=1, hour=HOUR + timedelta(hours=hour))
    fill(folder, files=2, rows=1, measurement="cpu_2026")
    compactor = manager(folder, tmp_path, patience=Patience(timedelta(minutes=15)))
    compactor.cycle(["hourly"])
    source = Source("db", "cpu")
    assert len(list(compactor.manifest_manager.of(source))) == 12
    (one,) = compactor.manifest_manager.of(source, window_of(Level.HOUR, HOUR))
    assert isinstance(one, Held)
    assert one.manifest.partition_path == "db/cpu/2026/11/01/09"
    assert len(list(compactor.manifest_manager.of(source, window_of(Level.DAY, HOUR)))) == 12
    assert list(compactor.manifest_manager.of(source, window_of(Level.DAY, HOUR + timedelta(days=1)))) == []


def test_jobs_that_only_wait_are_not_claimed_at_every_cycle(folder: Objects, tmp_path: Path) -> None:
    fill(folder, files=2)
    clock = FrozenClock(NOW)
    compactor = manager(folder, tmp_path, clock=clock, patience=Patience(timedelta(minutes=15)))
    compactor.cycle(["hourly"])
    claims = {meta.path: meta.etag for meta in folder.list("_compaction_state/claims")}
    compactor.cycle(["hourly"])
    assert {meta.path: meta.etag for meta in folder.list("_compaction_state/claims")} == claims
    clock.sleep(900)
    compactor.cycle(["hourly"])
    assert len(data_files(folder)) == 1


def test_windows_come_in_order_and_wider_ones_gather_their_files(folder: Objects) -> None:
    for day in (1, 2, 9, 30):
        for hour in (3, 4):
            fill(folder, files=1, hour=datetime(2026, 11, day, hour, tzinfo=UTC))
    source = Source("db", "cpu")
    for level, expected in ((Level.HOUR, [1] * 8), (Level.DAY, [2] * 4), (Level.WEEK, [4, 2, 2]), (Level.MONTH, [8])):
        groups = list(by_window(seen_files(folder, source), level))
        assert [len(files) for _, files in groups] == expected
        starts = [place.window.start for place, _ in groups]
        assert starts == sorted(starts)


def test_weeks_and_months_work_by_configuration_alone(folder: Objects, tmp_path: Path) -> None:
    from modak.measurements.tiers import BaseTierConfig, WindowTier
    from tests.measurements.support import all_rows

    expected = fill(folder, files=2)
    for day in range(1, 12):
        expected += fill(folder, files=2, hour=HOUR + timedelta(days=day))
    config = BaseTierConfig(folder, min_age_hours=1, min_files=2, clock=FrozenClock(NOW))
    compactor = manager(
        folder, tmp_path, tiers=(WindowTier("weekly", Level.WEEK, config), WindowTier("monthly", Level.MONTH, config))
    )
    compactor.cycle(["weekly"])
    assert [path.split("/")[4] for path in data_files(folder)] == ["w1", "w2"]
    assert all(path.endswith("_weekly.parquet") for path in data_files(folder))
    compactor.cycle(["monthly"])
    (left,) = data_files(folder)
    assert left.startswith("db/cpu/2026/11/cpu_")
    assert left.endswith("_monthly.parquet")
    assert all_rows(compactor.state) == expected


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_partition_of_many_files_is_compacted_within_its_memory(folder: Objects, tmp_path: Path) -> None:
    from tests.measurements.support import parquet, points, table

    data = parquet(table(points(HOUR, 3)))
    place = Place("db", "cpu", window_of(Level.HOUR, HOUR))
    local = folder.local(place.folder + "/x")
    assert local is not None
    local.parent.mkdir(parents=True)
    for index in range(100_000):
        (local.parent / raw_name("cpu", Stamp(HOUR, index))).write_bytes(data)
    from modak.measurements.runners import ProcessRunner

    memory = 1 << 30
    (job,) = manager(folder, tmp_path, runner=ProcessRunner(1), memory_limit=memory).cycle(["hourly"]).jobs
    assert (job.error, job.files, job.rows_out) == ("", 100_000, 3)
    assert job.peak_bytes < memory
    assert len(data_files(folder)) == 1


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_store_of_many_partitions_is_compacted(folder: Objects, tmp_path: Path) -> None:
    from tests.measurements.support import parquet, points, table

    windows = 10_000
    for number in range(windows):
        hour = START + timedelta(hours=number)
        place = Place("db", "cpu", window_of(Level.HOUR, hour))
        local = folder.local(place.folder + "/x")
        assert local is not None
        local.parent.mkdir(parents=True)
        for index in range(2):
            (local.parent / raw_name("cpu", Stamp(hour, index))).write_bytes(
                parquet(table(points(hour, 1, f"h{index}")))
            )
    clock = FrozenClock(START + timedelta(hours=windows + 100))
    compactor = manager(folder, tmp_path, clock=clock, tiers=tiers(folder, clock))
    record = compactor.cycle(["hourly"])
    assert (len(record.jobs), record.failed) == (windows, 0)
    assert len(data_files(folder)) == windows
