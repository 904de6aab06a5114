"""The hand-over to the cluster: nothing is told twice, nothing is dropped, and only the leader tells."""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from modak.catalog import migrate
from modak.catalog.lease import Lease
from modak.core import faults
from modak.core.clock import FrozenClock
from modak.core.errors import ModakError, NotLeader, Refused, UsageError
from modak.core.faults import Fault, InjectedFault
from modak.measurements.cluster import CompactedFile, DeleteSourceOp, LeaderGate, PostgresBridge
from modak.measurements.completion import (
    CompactedOutput,
    CompletionManifest,
    CompletionState,
    completion_path,
    pending_completions,
    read_completion,
    write_completion,
)
from modak.measurements.watcher import CompletionWatcher, CompletionWatcherConfig
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.storage.objects import Objects
from tests.measurements.compactor import run
from tests.measurements.support import HOUR, NOW, data_files, fill, manager

KILLED = VISITED = (
    "watcher.before_apply",
    "watcher.applied",
    "watcher.file_removed",
    "cluster.before_apply",
    "cluster.applied",
)
AT = datetime(2026, 11, 1, tzinfo=UTC)


class Recorder:
    """A bridge that remembers, and fails as it is told to."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls: list[tuple[list[str], list[str]]] = []

    def register_compacted_file(self, file: CompactedFile) -> None:
        self.batch_file_ops([file], [])

    def delete_compacted_source(self, path: str, reason: str) -> None:
        self.batch_file_ops([], [DeleteSourceOp(path, reason)])

    def batch_file_ops(self, registers: Sequence[CompactedFile], deletes: Sequence[DeleteSourceOp]) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.calls.append(([file.path for file in registers], [each.path for each in deletes]))


def told(job: str, state: CompletionState, at: datetime = AT) -> CompletionManifest:
    output = CompactedOutput(f"{job}/out", "0" * 64, 5, "db", "cpu", AT, "hourly", AT)
    outputs = () if state is CompletionState.WRITING_OUTPUT else (output,)
    return CompletionManifest(job, "db", "cpu", "p", "hourly", state, outputs, (f"{job}/in",), at, at)


def watcher(folder: Path, bridge: Recorder, **more: float) -> CompletionWatcher:
    return CompletionWatcher(CompletionWatcherConfig(folder, bridge, **more))


def test_a_job_is_registered_once_and_its_sources_deleted_in_one_call(tmp_path: Path) -> None:
    bridge = Recorder()
    watching = watcher(tmp_path, bridge)
    write_completion(tmp_path, told("b", CompletionState.WRITING_OUTPUT))
    watching.poll()
    assert bridge.calls == []
    write_completion(tmp_path, told("b", CompletionState.OUTPUT_WRITTEN))
    write_completion(tmp_path, told("a", CompletionState.SOURCES_DELETED))
    watching.poll()
    watching.poll()
    assert bridge.calls == [(["a/out"], ["a/in"]), (["b/out"], [])]
    write_completion(tmp_path, told("b", CompletionState.SOURCES_DELETED))
    watching.poll()
    assert bridge.calls[2:] == [([], ["b/in"])]
    assert list(pending_completions(tmp_path)) == []
    assert watching.stats()["completed"] == 2


def test_not_being_the_leader_is_no_error_and_is_tried_again(tmp_path: Path) -> None:
    bridge = Recorder(NotLeader("x", "not leading"), NotLeader("x", "not leading"))
    watching = watcher(tmp_path, bridge)
    write_completion(tmp_path, told("a", CompletionState.SOURCES_DELETED))
    for _ in range(3):
        watching.poll()
    assert bridge.calls == [(["a/out"], ["a/in"])]
    stats = watching.stats()
    assert (stats["not_leader"], stats["errors"], stats["pending"]) == (2, 0, 0)


def test_an_error_that_stays_keeps_the_file_and_is_counted(tmp_path: Path) -> None:
    bridge = Recorder(*(ModakError("x", "broken") for _ in range(5)))
    watching = watcher(tmp_path, bridge)
    write_completion(tmp_path, told("a", CompletionState.OUTPUT_WRITTEN))
    for _ in range(5):
        watching.poll()
    assert watching.stats()["errors"] == 5
    assert watching.stats()["pending"] == 1


def test_a_call_that_hangs_does_not_hold_up_the_others(tmp_path: Path) -> None:
    release = threading.Event()

    class Hanging(Recorder):
        def batch_file_ops(self, registers: Sequence[CompactedFile], deletes: Sequence[DeleteSourceOp]) -> None:
            if registers[0].path == "a/out":
                release.wait(30)
            super().batch_file_ops(registers, deletes)

    bridge = Hanging()
    watching = watcher(tmp_path, bridge, apply_timeout=0.1)
    for job in ("a", "b"):
        write_completion(tmp_path, told(job, CompletionState.OUTPUT_WRITTEN))
    watching.poll()
    assert bridge.calls == [(["b/out"], [])]
    assert watching.stats()["errors"] == 1
    release.set()


def test_the_watcher_starts_and_stops_as_often_as_wanted_and_looks_once_more_at_the_end(tmp_path: Path) -> None:
    bridge = Recorder()
    watching = watcher(tmp_path, bridge, poll_interval=30)
    watching.stop()
    for job in ("a", "b"):
        watching.start()
        watching.start()
        write_completion(tmp_path, told(job, CompletionState.SOURCES_DELETED))
        watching.stop()
        watching.stop()
    assert [call[0] for call in bridge.calls] == [["a/out"], ["b/out"]]


def test_what_is_no_whole_completion_is_not_read(tmp_path: Path) -> None:
    bridge = Recorder()
    text = told("x", CompletionState.SOURCES_DELETED).to_json()
    for name in ("x.tmp", "x.json.tmp", "x.txt", ".x.json"):
        (tmp_path / name).write_text(text)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.json").write_text(text)
    (tmp_path / "torn.json").write_text(text[:40])
    watching = watcher(tmp_path, bridge)
    watching.poll()
    assert bridge.calls == []
    assert watching.stats()["errors"] == 1


def test_a_missing_dependency_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bridge"):
        CompletionWatcher(CompletionWatcherConfig(tmp_path, None))
    with pytest.raises(UsageError, match="folder"):
        CompletionWatcher(CompletionWatcherConfig("", Recorder()))


@pytest.mark.parametrize("job", ["", "a/b", "a\\b", "a\0b", "..", "a..b", ".hidden"])
def test_ids_that_lead_elsewhere_are_refused(tmp_path: Path, job: str) -> None:
    with pytest.raises(Refused):
        completion_path(tmp_path, job)


def test_completions_are_private_and_read_back_whole(tmp_path: Path) -> None:
    folder = tmp_path / ".completion" / "pending"
    manifest = told("a", CompletionState.SOURCES_DELETED)
    path = write_completion(folder, manifest)
    assert read_completion(path) == manifest
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_completion(folder / "none.json") is None


def test_orphans_go_by_age_and_later_states_never(folder: Objects, tmp_path: Path) -> None:
    pending = tmp_path / "pending"
    long_ago = NOW - timedelta(days=400)
    write_completion(pending, told("old", CompletionState.WRITING_OUTPUT, NOW - timedelta(minutes=10)))
    write_completion(pending, told("young", CompletionState.WRITING_OUTPUT, NOW - timedelta(minutes=9)))
    write_completion(pending, told("written", CompletionState.OUTPUT_WRITTEN, long_ago))
    compactor = manager(folder, tmp_path, completion_dir=pending)
    for timeout in (timedelta(0), timedelta(-1)):
        compactor.cleanup_orphaned_completion_manifests(timeout)
        assert [path.stem for path in pending_completions(pending)] == ["written", "young"]


def test_temp_folders_of_dead_jobs_go_and_nothing_else(folder: Objects, tmp_path: Path) -> None:
    import fcntl

    temp = tmp_path / "temp"
    for name in ("dead", "alive", "foreign", ".completion"):
        (temp / name).mkdir(parents=True)
    for name in ("dead", "alive", ".completion"):
        (temp / name / ".lock").touch()
    with (temp / "alive" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert manager(folder, temp).cleanup_orphaned_temp_dirs() == 1
    assert sorted(path.name for path in temp.iterdir()) == [".completion", "alive", "foreign"]


def test_whatever_a_bridge_throws_the_others_get_their_turn(tmp_path: Path) -> None:
    bridge = Recorder(ValueError("odd"))
    watching = watcher(tmp_path, bridge)
    for job in ("a", "b"):
        write_completion(tmp_path, told(job, CompletionState.SOURCES_DELETED))
    watching.poll()
    assert bridge.calls == [(["b/out"], ["b/in"])]
    watching.poll()
    assert watching.stats()["errors"] == 1
    assert list(pending_completions(tmp_path)) == []


def test_a_call_that_hangs_is_not_made_again_meanwhile(tmp_path: Path) -> None:
    release, asked = threading.Event(), []

    class Hanging(Recorder):
        def batch_file_ops(self, registers: Sequence[CompactedFile], deletes: Sequence[DeleteSourceOp]) -> None:
            asked.append(registers)
            release.wait(30)
            super().batch_file_ops(registers, deletes)

    bridge = Hanging()
    watching = watcher(tmp_path, bridge, apply_timeout=0.05)
    write_completion(tmp_path, told("a", CompletionState.SOURCES_DELETED))
    for _ in range(3):
        watching.poll()
    assert len(asked) == 1
    release.set()
    deadline = time.monotonic() + 30
    while list(pending_completions(tmp_path)) and time.monotonic() < deadline:
        watching.poll()
    assert list(pending_completions(tmp_path)) == []


def test_a_completion_that_cannot_be_read_stops_neither_start_nor_cycle(folder: Objects, tmp_path: Path) -> None:
    pending = tmp_path / "pending"
    write_completion(pending, told("good", CompletionState.WRITING_OUTPUT, NOW - timedelta(days=1)))
    (pending / "bad.json").write_text("{")
    fill(folder, files=3)
    compactor = manager(folder, tmp_path, completion_dir=pending)
    assert compactor.cleanup_orphaned_completion_manifests() == 1
    compactor.run_compaction_cycle()
    assert (pending / "bad.json").exists()
    assert len(data_files(folder)) == 1


@pytest.mark.parametrize("struck", ["watcher.before_apply", "watcher.applied", "watcher.file_removed"])
def test_a_watcher_that_dies_is_followed_by_one_that_tells_the_same(tmp_path: Path, struck: str) -> None:
    bridge = Recorder()
    write_completion(tmp_path, told("a", CompletionState.SOURCES_DELETED))
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        watcher(tmp_path, bridge).poll()
    faults.arm(None)
    watcher(tmp_path, bridge).poll()
    assert list(pending_completions(tmp_path)) == []
    assert set(map(str, bridge.calls)) == {str((["a/out"], ["a/in"]))}


@pytest.fixture
def catalog(fresh_database: Dsn) -> Dsn:
    with connect(fresh_database) as conn:
        migrate.migrate(conn)
    return fresh_database


def rows(dsn: Dsn) -> list[str]:
    with connect(dsn) as conn:
        return [row[0] for row in conn.execute("SELECT path FROM modak.measurement_files ORDER BY path").fetchall()]


def test_a_cycle_is_handed_over_to_postgres_by_the_leader_alone(catalog: Dsn, folder: Objects, tmp_path: Path) -> None:
    fill(folder, files=3)
    fill(folder, files=3, hour=HOUR + timedelta(hours=1))
    pending = tmp_path / ".completion" / "pending"
    leading, following = Lease(catalog, "one", 30), Lease(catalog, "two", 30)
    assert leading.campaign() is not None
    assert following.campaign() is None
    gate = LeaderGate(lambda: following.epoch)
    assert (gate.can_compact(), gate.role()) == (False, "follower")
    manager(folder, tmp_path, completion_dir=pending, clock=FrozenClock(NOW)).run_compaction_cycle()
    followers = watcher_of(catalog, pending, following)
    followers.poll()
    assert rows(catalog) == []
    assert followers.stats()["errors"] == 0
    leaders = watcher_of(catalog, pending, leading)
    leaders.poll()
    assert rows(catalog) == data_files(folder)
    assert leaders.stats()["pending"] == 0
    leading.release()


def watcher_of(dsn: Dsn, pending: Path, lease: Lease) -> CompletionWatcher:
    return CompletionWatcher(CompletionWatcherConfig(pending, PostgresBridge(dsn, "node", lambda: lease.epoch)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Kill at every point; in the everyday run only at one that is drawn."""
    if "killed_at" in metafunc.fixturenames:
        drawn = random.Random(int(metafunc.config.getoption("randomly_seed", 0))).choice(KILLED)
        full = pytest.mark.full
        metafunc.parametrize(
            "killed_at", [pytest.param(point, marks=() if point == drawn else (full,)) for point in KILLED]
        )


def test_after_a_kill_of_a_watcher_the_next_one_tells_the_rest(
    catalog: Dsn, folder: Objects, tmp_path: Path, killed_at: str
) -> None:
    for hour in range(2):
        fill(folder, files=2, hour=HOUR + timedelta(hours=hour))
    pending = tmp_path / "temp" / ".completion" / "pending"
    manager(folder, tmp_path / "temp", completion_dir=pending).run_compaction_cycle()
    assert run("--do", "watch", "--kill", killed_at, root=tmp_path, dsn=catalog) == -9
    assert run("--do", "watch", root=tmp_path, dsn=catalog) == 0
    assert rows(catalog) == data_files(folder)
    assert list(pending_completions(pending)) == []


def test_a_leader_that_slept_through_its_lease_changes_nothing(catalog: Dsn, tmp_path: Path) -> None:
    slept = Lease(catalog, "one", 0.2)
    epoch = slept.campaign()
    time.sleep(0.3)
    assert Lease(catalog, "two", 30).campaign() is not None
    bridge = PostgresBridge(catalog, "node", lambda: epoch)
    with pytest.raises(NotLeader):
        bridge.register_compacted_file(CompactedFile("a", "0" * 64, 1, "db", "cpu", AT, "hourly", AT))
    assert rows(catalog) == []


@pytest.mark.parametrize("struck", ["cluster.before_apply", "cluster.applied"])
def test_a_bridge_that_dies_is_asked_again(catalog: Dsn, tmp_path: Path, struck: str) -> None:
    lease = Lease(catalog, "one", 30)
    lease.campaign()
    bridge = PostgresBridge(catalog, "node", lambda: lease.epoch)
    file = CompactedFile("a", "0" * 64, 1, "db", "cpu", AT, "hourly", AT)
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        bridge.register_compacted_file(file)
    faults.arm(None)
    bridge.register_compacted_file(file)
    assert rows(catalog) == ["a"]
    bridge.delete_compacted_source("a", "compaction")
    bridge.delete_compacted_source("a", "compaction")
    assert rows(catalog) == []
    lease.release()
    assert os.listdir(tmp_path) == []
