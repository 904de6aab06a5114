"""Real workers, killed in mid-pass: the next one takes the request up, nothing is lost or revived."""

from __future__ import annotations

import pytest

from modak.core.states import OpPhase
from modak.runtime.opening import open_site
from modak.tables.maintenance import erasures
from tests.tables.conftest import settings_for
from tests.tables.test_fold_kill import EXPECTED, corrected
from tests.tables.test_kill import Place, place, until

__all__ = ["corrected", "place"]

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

IN_A_BIN = ("rewrite.bin_started", "rewrite.bin_written")
IN_A_PASS = (
    "requests.before_claim",
    "requests.after_claim",
    "maintenance.before_begin",
    "maintenance.after_begin",
    "rewrite.before_tasks",
    *IN_A_BIN,
    "rewrite.after_tasks",
    "expiry.before_compare",
    "expiry.before_delete",
    "expiry.after_delete",
    "expiry.after_compare",
    "maintenance.before_end",
    "maintenance.after_end",
    "requests.before_finish",
    "requests.after_finish",
    "health.before_write",
    "health.after_write",
)
IN_AN_ERASURE = (
    "erasures.before_claim",
    "erasures.after_claim",
    "erase.before_heap",
    "erase.after_heap",
    "erase.before_hide",
    "erase.after_hide",
    "erasures.before_erased",
    "erasures.after_erased",
    "erasures.before_finish",
    "erasures.after_finish",
    "erasures.before_answer",
    "erasures.after_answer",
)
ERASING_BY_HAND = ("erasures.before_begin", "erasures.after_begin")
KILLED = (*IN_A_PASS, *IN_AN_ERASURE, *ERASING_BY_HAND)
ERASED = {row for row in EXPECTED if row[0] not in (5, 220)}


@pytest.fixture
def worn(corrected: Place) -> Place:
    """Corrections folded into the lake, so that files carry deletes; a policy that leaves nothing; a request."""
    daemon = corrected.start("daemon")
    until(lambda: not corrected.truth.sql("SELECT 1 FROM modak.delta"), "nobody folds", corrected.workers)
    daemon.terminate()
    corrected.truth.sql(
        "UPDATE modak.tables SET maintenance_policy ="
        ' \'{"snapshot_retention_hours": 0, "snapshot_min_retained": 1, "rewrite_min_input_files": 2}\''
    )
    corrected.truth.sql("INSERT INTO modak.maintenance_requests (table_id) SELECT table_id FROM modak.tables")
    return corrected


@pytest.mark.parametrize("struck", IN_A_PASS)
def test_after_a_kill_in_a_pass_the_next_worker_finishes_it(worn: Place, struck: str) -> None:
    if struck in IN_A_BIN:
        # A task is a part of the process that is struck only where it runs in it.
        worn.environ["MODAK_MAINTENANCE_ENGINE"] = "embedded"
    worn.start("daemon", "--kill", struck).dies()
    assert worn.truth.everything() == EXPECTED
    after = worn.start("daemon")
    until(lambda: "leader.acquired" in after.events(), "nobody leads", worn.workers)

    def done() -> bool:
        left = worn.truth.sql("SELECT 1 FROM modak.maintenance_requests WHERE finished_at IS NULL")
        return not left and not worn.truth.reader.unfinished_ops()

    until(done, "the request is not answered", worn.workers)
    after.terminate()
    assert worn.truth.everything() == EXPECTED
    worn.truth.check_files()
    assert worn.truth.sql("SELECT error FROM modak.maintenance_requests") == [(None,)]
    kinds = {op.kind: op.phase for op in worn.truth.reader.history(worn.truth.state.table.table_id)}
    assert kinds["maintenance"] in (OpPhase.DONE, OpPhase.ABANDONED)


@pytest.fixture
def asked(corrected: Place) -> Place:
    """Somebody has asked for the erasure of a row of the heap and one of the lake, which the delta corrects."""
    with open_site(settings_for(corrected.truth.dsn, corrected.truth.warehouse, corrected.home / "asking")) as site:
        erasures.ask(site, corrected.truth.name, "id = 5 OR id = 220")
    return corrected


def _erased(place: Place) -> bool:
    (found,) = place.truth.sql("SELECT answered_at IS NOT NULL AND finished_at IS NOT NULL FROM modak.erasures")
    return bool(found[0]) and not place.truth.reader.unfinished_ops()


@pytest.mark.parametrize("struck", IN_AN_ERASURE)
def test_after_a_kill_in_an_erasure_the_next_worker_erases_the_rest(asked: Place, struck: str) -> None:
    asked.start("daemon", "--kill", struck).dies()
    after = asked.start("daemon")
    until(lambda: "leader.acquired" in after.events(), "nobody leads", asked.workers)
    until(lambda: _erased(asked), "the rows are not erased", asked.workers)
    after.terminate()
    assert asked.truth.everything() == ERASED
    assert asked.truth.sql("SELECT error, condition FROM modak.erasures") == [(None, None)]
    asked.truth.check_files()


@pytest.mark.parametrize("struck", ERASING_BY_HAND)
def test_who_is_killed_before_the_first_row_is_erased_erases_again(corrected: Place, struck: str) -> None:
    corrected.start("erase", "--kill", struck).dies()
    assert corrected.truth.everything() == EXPECTED
    assert corrected.start("erase").ends() == 0
    assert corrected.truth.everything() == ERASED
    corrected.truth.check_journal()
