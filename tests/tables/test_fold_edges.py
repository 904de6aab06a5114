"""Folds at the edges of what there is to fold; one cold table serves all of them, each leaves its delta empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from modak.core.states import OpPhase
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.fold.run import FoldReport, fold
from modak.tables.site import Site
from modak.tables.status import collect
from tests.tables.conftest import settings_for
from tests.tables.corrections import Corrections
from tests.tables.events import Events
from tests.tables.invariants import Invariants


@dataclass
class Cold:
    """Rows 0…199 are in the lake only."""

    site: Site
    leader: Leader
    events: Events
    warehouse: str
    home: Path

    @property
    def corrections(self) -> Corrections:
        return Corrections(self.events)

    @property
    def table_id(self) -> int:
        return self.corrections.table_id

    def fold(self, **settings: str) -> FoldReport:
        """Fold as a worker with these settings would."""
        if not settings:
            return fold(self.site, self.leader.epoch, self.events.name)
        with open_site(settings_for(self.site.dsn, self.warehouse, self.home, **settings)) as other:
            return fold(other, self.leader.epoch, self.events.name)

    def lake(self) -> dict[tuple[int, int], str]:
        rows = self.events.lake()
        found = {(row[0], row[1]): row[2] for row in rows}
        assert len(found) == len(rows)
        return found


@pytest.fixture(scope="module")
def place(database: Dsn, tmp_path_factory: pytest.TempPathFactory, spark_home: Path, gateway: object) -> Iterator[Cold]:
    warehouse = str(tmp_path_factory.mktemp("warehouse"))
    with open_site(settings_for(database, warehouse, spark_home)) as site:
        events = Events.create(site)
        events.register()
        with Leader.campaign(site, 5) as leader:
            events.tier(leader)
            yield Cold(site, leader, events, warehouse, spark_home)


@pytest.fixture
def cold(place: Cold) -> Iterator[Cold]:
    yield place
    place.events.sql("DELETE FROM modak.delta")
    place.events.sql("UPDATE modak.tables SET frozen = NULL")


def test_an_open_transaction_on_a_folded_row_holds_nothing_up(cold: Cold) -> None:
    for key in range(3):
        cold.corrections.upsert(key, key, "old")
    with cold.site.connect() as user:
        user.execute(f"UPDATE modak.delta SET version = version + 1 WHERE table_id = {cold.table_id} AND pk = '1'")
        assert cold.fold().rows == 3
        assert set(cold.events.delta()) == {("1", 1)}
        user.rollback()
    assert cold.fold().rows == 1
    assert cold.events.delta() == {}
    assert [cold.lake()[key, key] for key in range(3)] == ["old"] * 3


def test_a_tombstone_of_a_row_that_is_nowhere_costs_no_snapshot(cold: Cold) -> None:
    before = cold.site.reader.state(cold.events.name).cutline
    cold.corrections.delete(999, 50)
    report = cold.fold()
    assert (report.rows, report.files, report.vectors) == (1, 0, 0)
    assert cold.site.reader.state(cold.events.name).cutline == before
    assert cold.events.delta() == {}
    op = cold.site.reader.history(cold.table_id)[0]
    assert (op.kind, op.phase, op.counters["delta_removed"]) == ("fold", OpPhase.DONE, 1)
    Invariants(cold.site.dsn, cold.warehouse).check_files()


def test_a_backlog_is_folded_batch_by_batch(cold: Cold) -> None:
    # Five rows of one tier key are more than a batch.
    for key in range(300, 305):
        cold.corrections.upsert(key, 50, "tied")
    for key in (10, 20, 60, 70):
        cold.corrections.upsert(key, key, "in batches")
    report = cold.fold(MODAK_COMPACTION_BATCH="3")
    assert (report.rows, report.left) == (9, 0)
    assert report.batches >= 3
    bodies = sorted(body for body in cold.lake().values() if body in ("tied", "in batches"))
    assert bodies == [*["in batches"] * 4, *["tied"] * 5]
    assert cold.events.delta() == {}


def test_corrections_of_a_partition_that_is_not_yet_cold_are_left_alone(cold: Cold) -> None:
    cold.corrections.upsert(220, 220, "still hot")
    assert not cold.fold().changed
    cold.corrections.delete(3, 3)
    assert cold.fold().rows == 1
    assert cold.events.sql("SELECT pk FROM modak.delta") == [("220",)]


def test_a_small_fold_starts_no_spark_job(cold: Cold, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a Spark job")

    monkeypatch.setattr("modak.spark.distribute.distribute", refuse)
    cold.corrections.upsert(5, 5, "corrected")
    assert cold.fold().rows == 1


def test_a_growing_backlog_is_told_once_and_shown_in_the_status(cold: Cold) -> None:
    strict_settings = settings_for(cold.site.dsn, cold.warehouse, cold.home, MODAK_DELTA_BACKLOG_WARN_ROWS="2")
    with open_site(strict_settings) as strict:
        for key in range(220, 223):
            cold.corrections.upsert(key, key, "not yet cold")
        with capture_logs() as logged:
            for _ in range(2):
                fold(strict, cold.leader.epoch, cold.events.name)
        told = [(entry["log_level"], entry["rows"]) for entry in logged if entry["event"] == "delta.debt"]
        assert told == [("warning", 3)]
        (status,) = collect(strict)
        assert "3 corrections wait to be folded (warning from 2)" in status.problems
        for key in range(223, 230):
            cold.corrections.upsert(key, key, "not yet cold")
        with capture_logs() as logged:
            fold(strict, cold.leader.epoch, cold.events.name)
            cold.events.sql("DELETE FROM modak.delta")
            fold(strict, cold.leader.epoch, cold.events.name)
        assert [entry["event"] for entry in logged] == ["delta.debt", "delta.debt_paid"]
        assert logged[0]["log_level"] == "error"


def test_a_frozen_table_is_not_folded(cold: Cold) -> None:
    cold.corrections.upsert(6, 6, "corrected")
    with cold.site.writer(cold.leader.epoch).step() as tx:
        tx.freeze(cold.table_id, {"snapshot": 1})
    report = cold.fold()
    assert (report.changed, report.left) == (False, 1)
    assert report.blocked is not None


def test_one_pass_takes_so_many_batches_and_leaves_the_rest_to_the_next(
    cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.tables.fold.run.MOST_BATCHES", 2)
    for key in range(10, 60, 10):
        cold.corrections.upsert(key, key, "in turn")
    first = cold.fold(MODAK_COMPACTION_BATCH="1")
    assert (first.batches, first.rows, first.left) == (2, 2, 3)
    assert [key for key in range(10, 60, 10) if cold.lake()[key, key] == "in turn"] == [10, 20]
    second = cold.fold(MODAK_COMPACTION_BATCH="2")
    assert (second.batches, second.rows, second.left) == (2, 3, 0)
    assert cold.events.delta() == {}
