"""Real workers, ended by SIGKILL where a table's life takes a turn: foreign rows, a new column's old rows, corrections.

The foreign commits are Spark's own. A worker here starts a session only where it needs one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modak.runtime.opening import open_site
from tests.tables.conftest import settings_for
from tests.tables.test_kill import ROWS, Place, place, until

__all__ = ["place"]

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

FREEZE = ("foreign.before_freeze", "foreign.after_freeze")
ACCEPT = ("foreign.before_accept", "foreign.after_accept")
BACKFILL = ("backfill.before_tasks", "backfill.after_tasks")
AMEND = (
    ("update", "amend.before_commit"),
    ("update", "amend.after_commit"),
    ("upsert", "amend.before_call"),
    ("upsert", "amend.after_call"),
)
KILLED = (*FREEZE, *ACCEPT, *BACKFILL, *(point for _, point in AMEND))

NEW = (350, 350, "new")


@pytest.fixture
def tiered(place: Place) -> Place:
    """Two partitions in the lake, and no worker."""
    daemon = place.start("daemon", "--register", "--light")
    place.until_tiered()
    daemon.terminate()
    return place


@pytest.fixture
def changed(tiered: Place, spark: object, spark_home: Path) -> Place:
    """Somebody has deleted a row from the lake, and a third partition has aged."""
    with open_site(settings_for(tiered.truth.dsn, tiered.truth.warehouse, spark_home)) as site:
        site.spark.sql("DELETE FROM modak.modak.public.events WHERE ts = 7").collect()
    tiered.truth.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    return tiered


@pytest.mark.spark
@pytest.mark.parametrize("point", FREEZE)
def test_a_worker_that_is_killed_while_it_freezes_a_table_leaves_the_next_to_freeze_it(
    changed: Place, point: str
) -> None:
    published = changed.truth.state.cutline
    changed.start("daemon", "--light", "--kill", point).dies()
    assert (changed.truth.state.table.frozen is not None) == (point == "foreign.after_freeze")
    after = changed.start("daemon", "--light")
    until(lambda: changed.truth.state.table.frozen is not None, "nobody freezes it", changed.workers)
    assert changed.truth.state.cutline == published
    assert changed.truth.everything() == {*ROWS, NEW}
    assert changed.start("accept").ends() == 0
    changed.until_tiered(300)
    after.terminate()
    assert changed.truth.everything() == {*ROWS, NEW} - {(7, 7, "row 7")}
    changed.truth.check_journal()
    changed.truth.check_partitions()


@pytest.mark.spark
@pytest.mark.parametrize("point", ACCEPT)
def test_who_is_killed_while_accepting_accepts_again(changed: Place, point: str) -> None:
    daemon = changed.start("daemon", "--light")
    until(lambda: changed.truth.state.table.frozen is not None, "nobody freezes it", changed.workers)
    daemon.terminate()
    changed.start("accept", "--kill", point).dies()
    assert (changed.truth.state.table.frozen is None) == (point == "foreign.after_accept")
    assert changed.start("accept").ends() == 0
    after = changed.start("daemon", "--light")
    changed.until_tiered(300)
    after.terminate()
    assert changed.truth.everything() == {*ROWS, NEW} - {(7, 7, "row 7")}
    changed.truth.check_journal()
    changed.truth.check_partitions()


@pytest.mark.parametrize("point", BACKFILL)
def test_after_a_kill_in_a_back_fill_the_next_worker_gives_old_rows_their_default(tiered: Place, point: str) -> None:
    tiered.truth.sql("ALTER TABLE public.events ADD COLUMN mark uuid DEFAULT gen_random_uuid()")
    tiered.truth.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    tiered.start("daemon", "--light", "--kill", point).dies()
    after = tiered.start("daemon", "--light")
    tiered.until_tiered(300)
    after.terminate()
    rows = tiered.truth.lake_rows()
    assert {row[:3] for row in rows} == ROWS
    assert len({row[3] for row in rows}) == len(rows) == 251
    tiered.truth.check_journal()
    tiered.truth.check_partitions()


@pytest.mark.parametrize(("act", "point"), AMEND)
def test_who_is_killed_while_correcting_has_corrected_or_not(tiered: Place, act: str, point: str) -> None:
    corrected = (ROWS - {(5, 5, "row 5")}) | {(5, 5, "corrected")}
    tiered.start(act, "--light", "--kill", point).dies()
    assert tiered.truth.everything() == (corrected if ".after" in point else ROWS)
    assert tiered.start(act, "--light").ends() == 0
    assert tiered.truth.everything() == corrected
    after = tiered.start("daemon", "--light")
    until(lambda: not tiered.truth.sql("SELECT 1 FROM modak.delta"), "nobody folds", tiered.workers)
    after.terminate()
    assert tiered.truth.everything() == corrected
