"""What happens while an ingest runs: corrections, folds, files that change, and other files of the same input."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from modak.core import faults
from modak.core.errors import ModakError
from modak.runtime.leader import Leader
from modak.storage import remote
from modak.tables.fold.run import fold
from modak.tables.site import Site
from tests.ingest.history import BASE, Rows, lake, parquet, take
from tests.tables.events import Events


def upsert(number: int, body: str) -> str:
    return f'SELECT modak_upsert(\'public.events\', \'{{"id": {number}, "ts": {number}, "body": "{body}"}}\')'


def test_a_correction_made_while_an_ingest_runs_wins_and_is_not_folded_before(
    site: Site, cold: Events, leader: Leader, tmp_path: Path
) -> None:
    def meanwhile(point: str) -> None:
        if point == "landing.before_prepare":
            faults.watch(None)
            cold.sql(upsert(6, "newer"))
            assert fold(site, leader.epoch, cold.name).blocked == "an ingest is under way"

    faults.watch(meanwhile)
    take(site, cold, parquet(tmp_path / "a.parquet", [(6, 6, "six")]))
    assert (6, 6, "newer") in cold.cold()
    fold(site, leader.epoch, cold.name)
    assert (6, 6, "newer") in lake(cold)


def test_a_correction_made_after_an_ingest_began_wins_however_long_it_takes(
    site: Site, cold: Events, leader: Leader, tmp_path: Path
) -> None:
    cold.sql(upsert(5, "older"))
    cold.sql(upsert(6, "older"))

    def meanwhile(point: str) -> None:
        if point == "ingest.keys_scanned":
            faults.watch(None)
            cold.sql(upsert(6, "newer"))
            cold.sql(upsert(7, "newer"))

    faults.watch(meanwhile)
    rows: Rows = [(at, at, "ingested") for at in (5, 6, 7)]
    assert take(site, cold, parquet(tmp_path / "a.parquet", rows)).corrections == 1
    wins = {(5, 5, "ingested"), (6, 6, "newer"), (7, 7, "newer")}
    assert wins <= cold.cold()
    fold(site, leader.epoch, cold.name)
    assert wins <= lake(cold)


@pytest.mark.parametrize("held", ["journal.after_begin", "fold.before_write"])
def test_a_fold_that_was_under_way_before_an_ingest_takes_no_later_correction_along(
    site: Site, cold: Events, leader: Leader, tmp_path: Path, held: str
) -> None:
    cold.sql(upsert(5, "older"))
    is_there, goes_on = threading.Event(), threading.Event()
    folding = threading.Thread(target=lambda: fold(site, leader.epoch, cold.name))

    def meanwhile(point: str) -> None:
        if threading.current_thread() is folding:
            if point == held:
                is_there.set()
                goes_on.wait(60)
        elif point == "ingest.keys_scanned":
            cold.sql(upsert(6, "newer"))
            goes_on.set()
            folding.join()

    faults.watch(meanwhile)
    folding.start()
    assert is_there.wait(60)
    take(site, cold, parquet(tmp_path / "a.parquet", [(5, 5, "ingested"), (6, 6, "six")]))
    faults.watch(None)
    wins = {(5, 5, "ingested"), (6, 6, "newer")}
    assert wins <= cold.cold()
    fold(site, leader.epoch, cold.name)
    assert wins <= lake(cold)


def test_a_fold_does_not_bring_back_what_an_ingest_has_superseded_meanwhile(
    site: Site, cold: Events, leader: Leader, tmp_path: Path
) -> None:
    cold.sql(upsert(5, "older"))
    cold.sql(upsert(8, "corrected"))
    path = parquet(tmp_path / "a.parquet", [(5, 5, "ingested")])

    def meanwhile(point: str) -> None:
        if point == "fold.after_write":
            faults.watch(None)
            assert take(site, cold, path).corrections == 1

    faults.watch(meanwhile)
    assert fold(site, leader.epoch, cold.name).rows == 1
    assert {(5, 5, "ingested"), (8, 8, "corrected")} <= lake(cold)


@pytest.mark.parametrize("point", ["ingest.keys_scanned", "ingest.before_keys", "ingest.before_rows"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changes_while_it_is_taken_in_is_refused(
    site: Site, cold: Events, tmp_path: Path, kind: str, point: str
) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text('{"id": 1000, "ts": 10, "body": "a"}\n{"id": 1001, "ts": 150, "body": "b"}\n')
    else:
        parquet(path, [(1000, 10, "a"), (1001, 150, "b")])

    def meanwhile(reached: str) -> None:
        if reached == point:
            faults.watch(None)
            if kind == "jsonl":
                with path.open("a") as file:
                    file.write('{"id": 5, "ts": 5, "body": "appended"}\n')
            else:
                parquet(path, [(5, 5, "replaced"), (1001, 150, "b")])

    before = cold.snapshots()
    faults.watch(meanwhile)
    with pytest.raises(ModakError, match=rf"a.{kind} was written to while it was read") as refused:
        take(site, cold, str(path), kind=kind, rewrite=True)
    assert (refused.value.code, refused.value.retryable) == ("storage.changed", False)
    assert (cold.snapshots(), lake(cold)) == (before, BASE)
    assert cold.sql("SELECT count(*) FROM modak.ingested") == [(0,)]
    assert take(site, cold, str(path), kind=kind, rewrite=True).replaced == 1


def test_a_file_that_is_just_being_written_again_is_called_so(site: Site, cold: Events, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, [(1000, 10, "a"), (1001, 150, "b")])

    def meanwhile(reached: str) -> None:
        if reached == "ingest.before_rows":
            faults.watch(None)
            path.write_bytes(path.read_bytes()[:50])

    faults.watch(meanwhile)
    with pytest.raises(ModakError, match="was written to while it was read"):
        take(site, cold, str(path), rewrite=True)
    assert lake(cold) == BASE


def test_keys_are_read_and_files_copied_several_at_a_time_in_the_order_of_the_input(
    site: Site, cold: Events, tmp_path: Path
) -> None:
    together = threading.Barrier(3, timeout=60)

    def meanwhile(point: str) -> None:
        if point in ("ingest.before_keys", "ingest.before_adopt"):
            together.wait()

    rows: Rows = [(1000 + at, 10 + at, "x") for at in range(6)]
    files = [parquet(tmp_path / f"{at}.parquet", [row]) for at, row in enumerate(rows)]
    faults.watch(meanwhile)
    assert take(site, cold, *files).adopted_files == 6
    assert lake(cold) == BASE | set(rows)
    kept = cold.sql("SELECT source FROM modak.ingested ORDER BY ctid")
    assert kept == [(f"file://{path}",) for path in files]


def test_one_file_that_changes_before_its_copy_leaves_nothing_of_the_others(
    site: Site, cold: Events, tmp_path: Path
) -> None:
    files = [parquet(tmp_path / f"{at}.parquet", [(1000 + at, 10 + at, "x")]) for at in range(12)]
    table = site.reader.state(cold.name).table
    before = {entry.uri for entry in site.store.list(table.location)}

    def meanwhile(point: str) -> None:
        if point == "ingest.before_adopt":
            faults.watch(None)
            parquet(Path(files[7]), [(5, 5, "replaced"), (6, 6, "replaced")])

    faults.watch(meanwhile)
    with pytest.raises(ModakError, match=r"7\.parquet was written to") as refused:
        take(site, cold, *files)
    assert refused.value.code == "storage.changed"
    assert {entry.uri for entry in site.store.list(table.location)} == before
    assert lake(cold) == BASE


@pytest.mark.parametrize("able", ["whole", "in part", "never"])
def test_a_copy_is_whole_whatever_the_kernel_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, able: str) -> None:
    real = os.copy_file_range
    asked: list[int] = []

    def copy(source: int, target: int, count: int) -> int:
        asked.append(count)
        if able == "never":
            raise OSError(errno.EXDEV, "another device")
        if able == "in part":
            return 0 if len(asked) > 1 else real(source, target, 1000)
        return real(source, target, count)

    monkeypatch.setattr(os, "copy_file_range", copy)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 40)
    remote.copy(f"file://{source}", f"file://{target}", remote.identity(f"file://{source}")[1])
    assert asked
    assert target.read_bytes() == source.read_bytes()
