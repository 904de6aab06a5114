"""Real workers, killed in mid-pass: the next one takes the request up, nothing is lost or revived."""

from __future__ import annotations

import pytest

from modak.core.states import OpPhase
from tests.tables.test_fold_kill import EXPECTED, corrected
from tests.tables.test_kill import Place, place, until

__all__ = ["corrected", "place"]

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

KILLED = (
    "requests.after_claim",
    "maintenance.after_begin",
    "rewrite.before_tasks",
    "rewrite.bin_started",
    "rewrite.bin_written",
    "rewrite.after_tasks",
    "expiry.before_compare",
    "expiry.after_compare",
    "maintenance.before_end",
    "maintenance.after_end",
    "requests.before_finish",
    "requests.after_finish",
    "health.before_write",
    "health.after_write",
)


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


@pytest.mark.parametrize("struck", KILLED)
def test_after_a_kill_in_a_pass_the_next_worker_finishes_it(worn: Place, struck: str) -> None:
    worn.start("daemon", "--kill", struck).dies()
    assert worn.truth.everything() == EXPECTED
    after = worn.start("daemon")

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
