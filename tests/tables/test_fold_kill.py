"""Real workers, killed in the middle of a fold: whoever comes next folds the rest, nothing is lost or doubled."""

from __future__ import annotations

import random
import signal

import pytest

from tests.tables.invariants import Row
from tests.tables.test_kill import ROWS, Place, place, until

__all__ = ["place"]

pytestmark = [pytest.mark.timeout(900)]

STRUCK = (
    "fold.snapshot_taken",
    "fold.before_write",
    "fold.share_started",
    "locate.before_keys",
    "fold.share_read",
    "locate.keys_written",
    "files.created",
    "files.durable",
    "fold.share_written",
    "fold.after_write",
    "fold.before_locate",
    "vectors.before_write",
    "vectors.durable",
    "fold.after_locate",
    "landing.before_prepare",
    "lake.manifests_written",
    "lake.metadata_written",
    "landing.prepared",
    "catalog.before_commit",
    "catalog.after_commit",
    "landing.committed",
    "tidy.before_delete",
    "tidy.after_delete",
)
STRUCK_WHEN_LARGE = (
    "fold.after_write",
    "landing.before_prepare",
    "landing.prepared",
    "delta.retired_early",
    "catalog.before_commit",
    "catalog.after_commit",
)
"""From where Spark has written the rows, and the delta is emptied while the commit is prepared."""
KILLED = (*STRUCK, *STRUCK_WHEN_LARGE)
EXPECTED: set[Row] = {row for row in ROWS if row[0] not in (5, 150)} | {(5, 5, "corrected"), (900, 60, "new")}


@pytest.fixture
def corrected(place: Place) -> Place:
    """Two partitions in the lake, three corrections in the delta, and no worker."""
    daemon = place.start("daemon", "--register", "--light")
    place.until_tiered()
    daemon.terminate()
    record = "SELECT modak.record_change(table_id, {}) FROM modak.tables"
    place.truth.sql(record.format('\'5\', 5, NULL, \'{"id": "5", "ts": "5", "body": "corrected"}\''))
    place.truth.sql(record.format('\'900\', 60, NULL, \'{"id": "900", "ts": "60", "body": "new"}\''))
    place.truth.sql(record.format("'150', 150, NULL, NULL"))
    return place


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every point; all but one that is drawn only to the full run."""
    if "struck" in metafunc.fixturenames:
        drawn = random.Random(int(metafunc.config.getoption("randomly_seed", 0))).choice(STRUCK)
        metafunc.parametrize(
            "struck", [pytest.param(point, marks=() if point == drawn else (pytest.mark.full,)) for point in STRUCK]
        )


def test_after_a_kill_in_a_fold_the_next_worker_goes_on(corrected: Place, struck: str) -> None:
    _struck_and_resumed(corrected, struck)


@pytest.mark.full
@pytest.mark.parametrize("point", STRUCK_WHEN_LARGE)
def test_after_a_kill_in_a_large_fold_the_next_worker_goes_on(corrected: Place, point: str) -> None:
    _struck_and_resumed(corrected, point, "--large-folds")


def _struck_and_resumed(corrected: Place, struck: str, *options: str) -> None:
    corrected.start("daemon", *options, "--kill", struck).dies()
    assert corrected.truth.everything() == EXPECTED
    after = corrected.start("daemon", "--light")

    def folded() -> bool:
        left = corrected.truth.sql("SELECT 1 FROM modak.delta")
        return not left and not corrected.truth.reader.unfinished_ops()

    until(folded, "the corrections are not folded", corrected.workers)
    after.terminate()
    corrected.truth.check(EXPECTED)


@pytest.mark.full
def test_a_leader_that_sleeps_through_its_lease_in_a_fold_changes_nothing(
    corrected: Place,
) -> None:
    first = corrected.start("daemon", "--stop", "landing.prepared")
    until(first.asleep, "the first worker does not come to its point", corrected.workers)
    second = corrected.start("daemon", "--light")
    until(lambda: not corrected.truth.sql("SELECT 1 FROM modak.delta"), "nobody folds", corrected.workers)
    snapshot = corrected.truth.state.cutline.snapshot_id
    first.process.send_signal(signal.SIGCONT)
    until(lambda: bool({"lease.lost", "leader.lost"} & first.events()), "the first leads for ever", corrected.workers)
    assert corrected.truth.state.cutline.snapshot_id == snapshot
    second.terminate()
    first.terminate()
    corrected.truth.check(EXPECTED)
