"""Every state in which a job can be found, and what is done about it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from modak.core.clock import FrozenClock
from modak.core.errors import ModakError
from modak.measurements.claims import LockManager, claim_path, claimed_names
from modak.measurements.discover import Source
from modak.measurements.layout import Place
from modak.measurements.manifest import NEXT, Manifest, ManifestOutput, ManifestStatus
from modak.measurements.manifests import ManifestManager
from modak.measurements.recovery import Fate, Recovered, Recovery
from modak.measurements.state import Patience, State
from modak.measurements.windows import Level, window_of
from modak.storage.objects import Objects
from tests.measurements.support import (
    AT_ONCE,
    HOUR,
    NOW,
    all_rows,
    as_tuples,
    data_files,
    fill,
    manager,
    points,
    table,
    write,
)

JOB = "20261130t090000000-0123abcd"
FOLDER = "db/cpu/2026/11/01/09"
OUTPUT = f"{FOLDER}/cpu_20261101_090000_000000000_{JOB}-0000_compacted.parquet"


def committed(state: State, *, size: int = 3, at: timedelta = timedelta(0)) -> str:
    """A committed job of all files that are there."""
    files = [meta for meta in state.objects.list("db") if meta.path != OUTPUT]
    manifest = Manifest(
        "db",
        "cpu",
        FOLDER,
        "hourly",
        JOB,
        NOW - at,
        tuple(meta.path for meta in files),
        tuple((meta.size, meta.etag) for meta in files),
        (ManifestOutput(OUTPUT, size),),
        ManifestStatus.COMMITTED,
    )
    return state.manifests.write_manifest(manifest)


@pytest.fixture
def state(objects: Objects) -> State:
    return State(objects, FrozenClock(NOW), AT_ONCE)


def recover(state: State) -> Recovered:
    return Recovery(state).recover()


def test_a_pending_job_is_aborted_and_everything_of_it_removed(state: State) -> None:
    fill(state.objects)
    before = data_files(state.objects)
    state.objects.put(OUTPUT, b"new")
    path = state.manifests.write_manifest(Manifest("db", "cpu", FOLDER, "hourly", JOB, NOW, tuple(before)))
    assert recover(state).fates == {path: Fate.ABORTED}
    assert data_files(state.objects) == before
    # A compactor that slept brings an output back: the tombstone knows.
    state.objects.put(OUTPUT, b"late")
    assert recover(state).fates == {path: Fate.WAITING}
    assert data_files(state.objects) == before
    state.clock.sleep(24 * 3600)
    assert recover(state).fates == {path: Fate.FORGOTTEN}
    assert state.manifests.list_manifests() == []


def test_a_committed_job_whose_outputs_are_right_loses_its_inputs(state: State) -> None:
    fill(state.objects)
    state.objects.put(OUTPUT, b"new")
    committed(state)
    found = recover(state)
    assert found.recovered == 1
    assert data_files(state.objects) == [OUTPUT]
    assert state.manifests.list_manifests() == []


@pytest.mark.parametrize("stored", [None, b"longer"])
def test_a_committed_output_that_is_missing_or_wrong_stops_everything(state: State, stored: bytes | None) -> None:
    fill(state.objects)
    if stored is not None:
        state.objects.put(OUTPUT, stored)
    path = committed(state)
    before = data_files(state.objects)
    found = recover(state)
    assert found.fates == {path: Fate.BROKEN}
    assert found.recovered == 0
    assert OUTPUT in found.problems[0]
    assert data_files(state.objects) == before


def test_an_input_that_changed_stays(state: State) -> None:
    fill(state.objects, files=2)
    state.objects.put(OUTPUT, b"new")
    committed(state)
    changed = data_files(state.objects)[-1]
    state.objects.put(changed, b"other rows")
    found = recover(state)
    assert data_files(state.objects) == [OUTPUT, changed]
    assert changed in found.problems[0]


def test_inputs_that_are_gone_already_are_fine(state: State) -> None:
    fill(state.objects)
    state.objects.put(OUTPUT, b"new")
    committed(state)
    state.objects.delete([path for path in data_files(state.objects) if path != OUTPUT])
    assert recover(state).recovered == 1


def test_a_manifest_that_cannot_be_read_stays_and_its_partition_is_left_alone(state: State, tmp_path: Path) -> None:
    fill(state.objects)
    path = f"_compaction_state/hourly/db/db_cpu_2026_11_01_09_{JOB}.json"
    state.objects.put(path, b"{torn")
    found = recover(state)
    assert found.fates == {path: Fate.BROKEN}
    assert state.objects.head(path) is not None
    compactor = manager(state.objects, tmp_path, clock=FrozenClock(NOW))
    assert [each for each in compactor.find_candidates() if each.tier == "hourly"] == []
    with pytest.raises(ModakError, match="cannot be read"):
        list(state.account(Source("db", "cpu")).visible([], "db/cpu"))


def test_an_old_manifest_goes_the_same_way(state: State) -> None:
    fill(state.objects)
    state.objects.put(OUTPUT, b"new")
    committed(state, at=timedelta(days=8))
    assert recover(state).recovered == 1
    assert data_files(state.objects) == [OUTPUT]


def test_storage_that_does_not_answer_says_nothing(folder: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(folder, FrozenClock(NOW), AT_ONCE)
    fill(folder)
    folder.put(OUTPUT, b"new")
    committed(state)
    before = data_files(folder)

    def fails(*_: object) -> None:
        raise ModakError("storage.failed", "Storage cannot look.", retryable=True)

    real = folder.head
    monkeypatch.setattr(folder, "head", lambda path: fails() if path == OUTPUT else real(path))
    found = recover(state)
    assert (found.recovered, list(found.fates.values())) == (0, [Fate.WAITING])
    monkeypatch.undo()
    assert data_files(folder) == before
    monkeypatch.setattr(folder, "_folders", fails)
    with pytest.raises(ModakError):
        ManifestManager(folder).list_manifests()


def test_deletes_that_fail_keep_the_manifest(folder: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(folder, FrozenClock(NOW), AT_ONCE)
    fill(folder)
    folder.put(OUTPUT, b"new")
    path = committed(state)

    def fails(*_: object) -> None:
        raise ModakError("storage.denied", "Storage refuses.")

    monkeypatch.setattr(folder, "_delete", fails)
    assert recover(state).fates == {path: Fate.WAITING}
    monkeypatch.undo()
    assert recover(state).recovered == 1


def test_an_unreadable_manifest_of_a_day_keeps_its_hours_from_being_merged(folder: Objects, tmp_path: Path) -> None:
    fill(folder)
    fill(folder, hour=HOUR + timedelta(days=1))
    fill(folder, measurement="mem")
    compactor = manager(folder, tmp_path)
    hints = [each for each in compactor.find_candidates() if each.tier == "hourly"]
    folder.put(f"_compaction_state/daily/db/db_cpu_2026_11_01_{JOB}.json", b"{")
    left = {each.partition_path for each in compactor.find_candidates() if each.tier == "hourly"}
    assert left == {"db/cpu/2026/11/02/09", "db/mem/2026/11/01/09"}
    (of_that_day,) = [each for each in hints if each.partition_path == FOLDER]
    compactor.compact_partition(of_that_day)
    assert not any("_compacted" in path for path in data_files(folder))
    with pytest.raises(ModakError, match="cannot be read"):
        list(compactor.state.account(Source("db", "cpu")).visible([], "db/cpu"))
    assert list(compactor.state.account(Source("db", "mem")).visible([], "db/mem")) == []


def test_clocks_that_differ_take_nothing_from_a_live_owner_and_keep_every_row(folder: Objects, tmp_path: Path) -> None:
    """Writers stamp files days ahead and days behind, and two compactors disagree about the time by an hour."""
    expected = fill(folder, files=2, stamp=NOW + timedelta(days=3))
    slow = points(HOUR, 5, host="slow")
    for row in slow:
        write(folder, table([row]), stamp=NOW - timedelta(days=9))
    expected += as_tuples(slow)
    ahead, behind = FrozenClock(NOW + timedelta(hours=1)), FrozenClock(NOW)
    patience = Patience(timedelta(0), 60, timedelta(seconds=30), timedelta(hours=2))
    one, other = (
        manager(folder, tmp_path / name, clock=clock, patience=patience)
        for name, clock in (("a", ahead), ("b", behind))
    )
    claim = claim_path(Place("db", "cpu", window_of(Level.DAY, HOUR)))
    assert other.state.claims.acquire(claim)
    assert one.cycle(["hourly"]).held == [FOLDER]
    other.state.claims.release(claim)
    reader = other.state.lease()
    (job,) = one.cycle(["hourly"]).jobs
    assert job.files == 7
    # By its own clock the reader came an hour before the commit; the files that it may have listed stay.
    assert len(data_files(folder)) == 8
    reader.release()
    other.cycle(["hourly"])
    ahead.sleep(60)
    behind.sleep(3700)
    other.cycle(["hourly"])
    assert all_rows(one.state) == all_rows(other.state) == expected
    assert len(data_files(folder)) == 1


def test_a_live_owner_is_never_disturbed(folder: Objects) -> None:
    clock = FrozenClock(NOW)
    working, other = (State(folder, clock, Patience(timedelta(0), 60)) for _ in range(2))
    fill(folder)
    path = working.manifests.write_manifest(Manifest("db", "cpu", FOLDER, "hourly", JOB, NOW))
    claim = claim_path(Place("db", "cpu", window_of(Level.DAY, HOUR)))
    assert working.claims.acquire(claim)
    for _ in range(5):
        assert Recovery(other).recover().fates == {path: Fate.HELD}
        clock.sleep(59)
        working.claims.heartbeat()
    assert Recovery(other).recover().fates == {path: Fate.HELD}
    clock.sleep(61)
    assert Recovery(other).recover().fates == {path: Fate.ABORTED}
    working.claims.heartbeat()
    assert not working.claims.holds(claim)


def test_a_job_that_was_given_up_can_never_commit(folder: Objects) -> None:
    state = State(folder, FrozenClock(NOW), AT_ONCE)
    held = state.manifests.begin(Manifest("db", "cpu", FOLDER, "hourly", JOB, NOW))
    recover(state)
    assert state.manifests.move(held, ManifestStatus.COMMITTED) is None


@pytest.mark.parametrize("start", ManifestStatus)
@pytest.mark.parametrize("end", ManifestStatus)
def test_only_the_steps_that_exist_can_be_taken(start: ManifestStatus, end: ManifestStatus) -> None:
    manifest = Manifest("db", "cpu", FOLDER, "hourly", JOB, NOW, status=start)
    if end in NEXT[start]:
        assert manifest.moved(end, NOW).status is end
    else:
        with pytest.raises(ModakError, match="cannot be"):
            manifest.moved(end, NOW)


def test_manifests_are_read_back_whole_and_claim_inputs_and_outputs(state: State) -> None:
    fill(state.objects, files=2)
    inputs = set(data_files(state.objects))
    path = committed(state)
    assert path == f"_compaction_state/hourly/db/db_cpu_2026_11_01_09_{JOB}.json"
    manifest = state.manifests.read_manifest(path)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert (manifest.output_path, manifest.output_size) == (OUTPUT, 3)
    for _ in range(2):
        assert state.manifests.get_files_in_manifests() == inputs | {OUTPUT}
    assert state.manifests.is_file_in_manifest(OUTPUT)
    assert not state.manifests.is_file_in_manifest("db/other")
    state.manifests.delete_manifest(path)
    state.manifests.delete_manifest(path)
    assert state.manifests.list_manifests() == []


def test_recovery_by_the_name_of_the_reference_counts_what_it_brought_to_an_end(state: State) -> None:
    fill(state.objects, files=2)
    state.objects.put(OUTPUT, b"new")
    committed(state, at=timedelta(minutes=20))
    assert ManifestManager(state.objects, state.clock).recover_orphaned_manifests() == 1
    assert data_files(state.objects) == [OUTPUT]
    assert ManifestManager(state.objects, state.clock).recover_orphaned_manifests() == 0


def test_a_manifest_in_the_form_of_the_reference_is_understood() -> None:
    data = (
        b'{"output_path": "o", "output_size": 5, "input_files": ["a"], "database": "db", "measurement": "cpu",'
        b' "partition_path": "db/cpu/2026/11/01/09", "tier": "hourly", "status": "pending",'
        b' "created_at": "2026-11-01T09:00:00+00:00", "job_id": "j"}'
    )
    assert Manifest.from_json(data).outputs == (ManifestOutput("o", 5),)


def test_locks_of_a_process() -> None:
    locks = LockManager()
    assert locks.acquire_lock("a")
    assert not locks.acquire_lock("a")
    assert locks.is_locked("a")
    locks.release_lock("a")
    locks.release_lock("a")
    assert locks.acquire_lock("a")


def test_names_in_a_claim_can_be_read_back() -> None:
    place = Place("team/eu %2F", "cpu load", window_of(Level.DAY, HOUR))
    assert claimed_names(claim_path(place)) == ("team/eu %2F", "cpu load")


def test_a_claim_changes_hands_only_when_it_is_free_or_dead(state: State) -> None:
    clock = state.clock
    other = State(state.objects, clock, AT_ONCE)
    claim = claim_path(Place("db", "cpu", window_of(Level.DAY, HOUR)))
    assert state.claims.acquire(claim)
    assert not state.claims.acquire(claim)
    assert not other.claims.acquire(claim)
    state.claims.release(claim)
    assert other.claims.acquire(claim)
    assert not state.claims.acquire(claim)
    clock.sleep(0.5)
    assert state.claims.acquire(claim)
    other.claims.heartbeat()
    assert not other.claims.holds(claim)
    other.claims.release(claim)
    assert state.claims.holder(claim).owner == state.owner  # type: ignore[union-attr]
