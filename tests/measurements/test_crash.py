"""A compactor that dies anywhere: readers see every row once right then, and the next one finishes or starts anew."""

from __future__ import annotations

import random
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

from modak.core import faults
from modak.core.clock import FrozenClock, SystemClock
from modak.core.faults import Fault, InjectedFault
from modak.measurements.completion import CompletionState, pending_completions, read_completion
from modak.measurements.manager import Manager
from modak.storage.objects import Objects
from tests.measurements.compactor import PATIENCE, run, start
from tests.measurements.support import HOUR, NOW, Rows, all_rows, data_files, fill, manager, points, table, write
from tests.s3_fixtures import S3Server

POINTS = (
    "aside.before_remember",
    "aside.remembered",
    "claim.acquired",
    "claim.before_acquire",
    "claim.before_release",
    "claim.released",
    "completion.before_write",
    "completion.draft_written",
    "completion.written",
    "history.before_keep",
    "history.kept",
    "job.answered",
    "job.before_commit",
    "job.before_upload",
    "job.committed",
    "job.uploaded",
    "job.workplace_made",
    "manifest.before_begin",
    "manifest.before_delete",
    "manifest.before_move",
    "manifest.begun",
    "manifest.deleted",
    "manifest.moved",
    "merge.file_written",
    "recovery.before_inputs",
    "recovery.inputs_removed",
    "objects.writing",
    "objects.draft_written",
    "objects.named",
    "objects.written",
    "objects.deleting",
    "objects.deleted",
)
"""Every point that a cycle passes."""
VISITED = (*POINTS, "recovery.before_outputs", "recovery.outputs_removed", "lease.before_register", "lease.registered")


def store(objects: Objects) -> Rows:
    """Two hours with files enough for an hourly and a daily job, and one that is corrupt."""
    expected: Rows = Counter()
    for hour in (HOUR, HOUR + timedelta(hours=1)):
        expected.update(fill(objects, files=3, hour=hour))
    return expected


def compactor(objects: Objects, temp: Path, clock: FrozenClock) -> Manager:
    pending = temp / ".completion" / "pending"
    return manager(objects, temp, clock=clock, completion_dir=pending, storage_props=objects._props)


def settled(objects: Objects, temp: Path, clock: FrozenClock, expected: Rows) -> None:
    """Whoever comes next brings everything to its end, and nothing is left over."""
    after = compactor(objects, temp, clock)
    assert all_rows(after.state) == expected
    after.run_compaction_cycle()
    # A claim of a dead owner must have stood still for a while.
    clock.sleep(1)
    after.run_compaction_cycle()
    assert all_rows(after.state) == expected
    # Tombstones of aborted jobs stay for a day.
    clock.sleep(25 * 3600)
    after.run_compaction_cycle()
    assert all_rows(after.state) == expected
    good = [path for path in data_files(objects) if not path.endswith("_999999999.parquet")]
    assert [path.rpartition("_")[2] for path in good] == ["daily.parquet"]
    assert after.manifest_manager.list_manifests() == []
    assert after.find_candidates() == []


def sequence(root: Path) -> list[str]:
    """The points that a cycle passes, in order, with repetitions."""
    objects = Objects.of(str(root / "store"))
    store(objects)
    passed: list[str] = []
    faults.watch(passed.append)
    corrupt(objects)
    compactor(objects, root / "temp", FrozenClock(NOW)).run_compaction_cycle()
    faults.watch(None)
    return passed


def corrupt(objects: Objects) -> None:
    objects.put("db/cpu/2026/11/01/09/cpu_20261101_090000_999999999.parquet", b"no parquet")


def crash_and_settle(objects: Objects, temp: Path, point: str, after: int, expected: Rows) -> bool:
    clock = FrozenClock(NOW)
    faults.arm(Fault(point, "raise", after))
    try:
        compactor(objects, temp, clock).run_compaction_cycle()
        return False
    except InjectedFault:
        return True
    finally:
        faults.arm(None)
        visible = all_rows_without_corrupt(objects, temp, clock)
        assert visible == expected


def all_rows_without_corrupt(objects: Objects, temp: Path, clock: FrozenClock) -> Rows:
    objects.delete(["db/cpu/2026/11/01/09/cpu_20261101_090000_999999999.parquet"])
    return all_rows(compactor(objects, temp, clock).state)


@pytest.mark.parametrize("point", POINTS)
def test_after_a_fault_anywhere_every_row_is_there_once(folder: Objects, tmp_path: Path, point: str) -> None:
    expected = store(folder)
    corrupt(folder)
    assert crash_and_settle(folder, tmp_path / "temp", point, 0, expected)
    settled(folder, tmp_path / "temp", FrozenClock(NOW), expected)


@pytest.mark.parametrize("struck", ["job.uploaded", "job.before_commit", "job.committed", "recovery.before_inputs"])
def test_on_a_bucket_as_well(s3_server: S3Server, tmp_path: Path, struck: str) -> None:
    bucket = Objects.of(f"s3://{s3_server.new_bucket()}/store", s3_server.props)
    expected = store(bucket)
    assert crash_and_settle(bucket, tmp_path / "temp", struck, 0, expected)
    settled(bucket, tmp_path / "temp", FrozenClock(NOW), expected)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_after_a_fault_at_every_single_step_every_row_is_there_once(tmp_path: Path) -> None:
    counted = Counter(sequence(tmp_path / "count"))
    for point, times in counted.items():
        for after in range(times):
            root = tmp_path / f"{point}-{after}"
            objects = Objects.of(str(root / "store"))
            expected = store(objects)
            corrupt(objects)
            crash_and_settle(objects, root / "temp", point, after, expected)
            settled(objects, root / "temp", FrozenClock(NOW), expected)


def test_the_list_of_points_is_what_a_cycle_passes(tmp_path: Path) -> None:
    assert set(sequence(tmp_path)) == set(POINTS)


@pytest.mark.parametrize("struck", ["recovery.before_outputs", "recovery.outputs_removed"])
def test_a_recovery_that_dies_is_done_again(folder: Objects, tmp_path: Path, struck: str) -> None:
    expected = store(folder)
    assert crash_and_settle(folder, tmp_path, "job.before_commit", 0, expected)
    assert crash_and_settle(folder, tmp_path, struck, 0, expected)
    settled(folder, tmp_path, FrozenClock(NOW), expected)


@pytest.mark.parametrize("struck", ["lease.before_register", "lease.registered"])
def test_a_reader_that_dies_holds_nothing_up_for_long(folder: Objects, tmp_path: Path, struck: str) -> None:
    expected = store(folder)
    reader = compactor(folder, tmp_path, FrozenClock(NOW))
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        reader.state.lease()
    faults.arm(None)
    folder.delete([meta.path for meta in folder.list("_compaction_state/readers")])
    settled(folder, tmp_path, FrozenClock(NOW), expected)


def test_completions_tell_the_cluster_after_a_crash_too(folder: Objects, tmp_path: Path) -> None:
    expected = store(folder)
    crash_and_settle(folder, tmp_path, "recovery.inputs_removed", 0, expected)
    settled(folder, tmp_path, FrozenClock(NOW), expected)
    told = [read_completion(path) for path in pending_completions(tmp_path / ".completion" / "pending")]
    states = {each.state for each in told if each}
    assert CompletionState.OUTPUT_WRITTEN not in states
    outputs = [output.path for each in told if each for output in each.outputs if each.tier == "daily"]
    assert set(data_files(folder)) <= set(outputs)


@pytest.mark.parametrize("struck", ["job.committed", "completion.draft_written"])
def test_a_job_that_committed_and_died_before_it_could_say_so_is_told_of(
    folder: Objects, tmp_path: Path, struck: str
) -> None:
    expected = store(folder)
    # The first draft is that of a job which begins.
    crash_and_settle(folder, tmp_path, struck, 2 if struck == "completion.draft_written" else 0, expected)
    clock = FrozenClock(NOW)
    clock.sleep(3600)
    after = compactor(folder, tmp_path, clock)
    after.cleanup_orphaned_completion_manifests()
    after.run_compaction_cycle()
    clock.sleep(1)
    after.run_compaction_cycle()
    told = [read_completion(path) for path in pending_completions(tmp_path / ".completion" / "pending")]
    assert {each.state for each in told if each} == {CompletionState.SOURCES_DELETED}
    gone = {source for each in told if each for source in each.deleted_sources}
    made = {output.path for each in told if each for output in each.outputs}
    assert made - gone == set(data_files(folder))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kill at every point; in the everyday run only at one or two that are drawn."""
    for name, some, few in (("killed_at", POINTS, 2), ("killed_on_bucket", BUCKET_POINTS, 1), ("died_at", AFTER, 1)):
        if name in metafunc.fixturenames:
            drawn = random.Random(int(metafunc.config.getoption("randomly_seed", 0))).sample(some, few)
            full = pytest.mark.full
            metafunc.parametrize(name, [pytest.param(point, marks=() if point in drawn else (full,)) for point in some])


BUCKET_POINTS = tuple(point for point in POINTS if point not in ("objects.draft_written", "objects.named"))
AFTER = ("recovery.before_outputs", "recovery.outputs_removed", "claim.acquired", "manifest.moved", "objects.deleted")
"""Points that a recovery passes which finds a job that did not commit."""
KILLED = {*POINTS, *AFTER}
ODD_FILE = "db/cpu/2026/11/01/09/cpu_20261101_090000_999999999.parquet"


def settled_by_others(objects: Objects, root: Path, expected: Rows) -> None:
    """Compactors that come afterwards bring everything to its end, and every row is there once at any time."""
    state = manager(objects, root / "temp", clock=SystemClock(), patience=PATIENCE).state
    assert all_rows(state) == expected
    deadline = time.monotonic() + 200
    while [path.rpartition("_")[2] for path in data_files(objects)] != ["daily.parquet"]:
        assert time.monotonic() < deadline, data_files(objects)
        assert run(root=root, objects=objects) == 0
        assert all_rows(state) == expected
        time.sleep(0.6)
    # Whoever was killed between the last delete and telling of it is told for by the next.
    assert run(root=root, objects=objects) == 0
    assert known_to_the_cluster(root / "temp" / ".completion" / "pending") == set(data_files(objects))


def known_to_the_cluster(pending: Path) -> set[str]:
    """The files in the cluster's table once all completions are handed over: what was made and is not merged since."""
    told = [each for path in pending_completions(pending) if (each := read_completion(path)) is not None]
    assert CompletionState.OUTPUT_WRITTEN not in {each.state for each in told}
    made = {output.path for each in told for output in each.outputs}
    gone = {path for each in told if each.state is CompletionState.SOURCES_DELETED for path in each.deleted_sources}
    return made - gone


@pytest.mark.parametrize("after", [0, pytest.param(3, marks=pytest.mark.full)])
def test_after_a_kill_anywhere_the_next_compactor_goes_on(
    folder: Objects, tmp_path: Path, killed_at: str, after: int
) -> None:
    expected = store(folder)
    corrupt(folder)
    killed = run("--kill", killed_at, "--after", str(after), root=tmp_path)
    folder.delete([ODD_FILE])
    assert killed in (0, -9)
    settled_by_others(folder, tmp_path, expected)


def test_after_a_kill_anywhere_on_a_bucket_as_well(s3_server: S3Server, tmp_path: Path, killed_on_bucket: str) -> None:
    bucket = Objects.of(f"s3://{s3_server.new_bucket()}/store", s3_server.props)
    expected = store(bucket)
    corrupt(bucket)
    assert run("--kill", killed_on_bucket, root=tmp_path, objects=bucket) == -9
    bucket.delete([ODD_FILE])
    settled_by_others(bucket, tmp_path, expected)


def test_after_a_kill_of_a_recovery_the_next_one_goes_on(folder: Objects, tmp_path: Path, died_at: str) -> None:
    expected = store(folder)
    assert run("--kill", "job.before_commit", root=tmp_path) == -9
    # The claim of the dead must have stood still for a while.
    time.sleep(0.6)
    assert run("--do", "recover", "--kill", died_at, root=tmp_path) == -9
    settled_by_others(folder, tmp_path, expected)


def test_a_child_that_is_killed_is_an_answer_and_smaller_batches_follow(folder: Objects, tmp_path: Path) -> None:
    expected = fill(folder, files=4)
    assert run("--kill", "merge.file_written", "--children", root=tmp_path) == 0
    state = manager(folder, tmp_path / "temp", clock=SystemClock(), patience=PATIENCE).state
    assert all_rows(state) == expected
    from modak.measurements.history import recall

    (record,) = recall(folder)
    assert {job.reason for job in record.jobs} == {"killed"}
    # Four files, then twice two; then it is given up.
    assert len([job for job in record.jobs if job.tier == "hourly"]) == 3


@pytest.mark.parametrize("objects", ["folder", pytest.param("bucket", marks=pytest.mark.full)], indirect=True)
def test_two_compactors_on_one_store_do_no_work_twice(objects: Objects, tmp_path: Path) -> None:
    expected: Rows = Counter()
    for measurement in ("cpu", "mem", "disk"):
        for hour in range(2):
            expected.update(fill(objects, files=3, measurement=measurement, hour=HOUR + timedelta(hours=hour)))
    # Both live, so neither may ever take the other for dead, however slow this machine is.
    both = [start("--claim-seconds", "60", root=tmp_path, objects=objects) for _ in range(2)]
    state = manager(objects, tmp_path, clock=SystemClock(), patience=PATIENCE).state
    looks = 0
    while any(process.poll() is None for process in both):
        lease = state.lease()
        try:
            assert all_rows(state) == expected
        finally:
            lease.release()
        looks += 1
    assert [process.wait() for process in both] == [0, 0]
    assert looks > 0
    from modak.measurements.history import recall

    jobs = [job for record in recall(objects) for job in record.jobs]
    assert [job.error for job in jobs if job.error] == []
    hourly = Counter((job.measurement, job.partition) for job in jobs if job.tier == "hourly")
    assert set(hourly.values()) <= {1}
    run(root=tmp_path, objects=objects)
    time.sleep(0.6)
    run(root=tmp_path, objects=objects)
    assert all_rows(state) == expected
    # An hour that comes late to its day waits there for others.
    assert len(data_files(objects)) <= 6


def test_late_files_for_an_old_day_are_taken_up(folder: Objects, tmp_path: Path) -> None:
    clock = FrozenClock(NOW)
    expected = store(folder)
    compactor(folder, tmp_path, clock).run_compaction_cycle()
    late = points(HOUR, 3, host="late")
    for row in late:
        write(folder, table([row]), stamp=NOW - timedelta(hours=2))
        expected.update({tuple(sorted((k, v.isoformat() if k == "time" else v) for k, v in row.items())): 1})
    compactor(folder, tmp_path, clock).run_compaction_cycle_for_tiers(["daily"])
    assert len(data_files(folder)) == 1
    assert all_rows(compactor(folder, tmp_path, clock).state) == expected
