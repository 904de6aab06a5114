"""Real commands, killed in the middle of a first copy: the same command again ends it, and the lake equals the heap."""

from __future__ import annotations

import pytest

from modak.tables.mirror.names import slot_name
from tests.tables.readers import duckdb_rows
from tests.tables.test_kill import Place, place

__all__ = ["place"]

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

KILLED = (
    "register.committed",
    "mirror.before_note",
    "mirror.after_note",
    "identity.setting",
    "identity.set",
    "mirror.before_guard",
    "mirror.after_guard",
    "publication.creating",
    "publication.created",
    "mirror.before_mark",
    "mirror.after_mark",
    "slot.creating",
    "slot.created",
    "copy.before_plan",
    "copy.after_plan",
    "copy.before_tasks",
    "export.task_written",
    "copy.after_tasks",
    "landing.prepared",
    "catalog.before_commit",
    "catalog.after_commit",
    "copy.committed",
    "copy.before_frontier",
    "copy.after_frontier",
)


@pytest.mark.parametrize("killed_at", KILLED)
def test_after_a_kill_the_same_command_ends_the_copy(place: Place, killed_at: str) -> None:
    place.start("mirror", "--kill", killed_at).dies()
    assert place.start("mirror").ends() == 0
    state = place.truth.state
    assert state.cutline.frontier is not None
    heap = sorted(place.truth.sql("SELECT * FROM public.events"))
    lake = sorted(tuple(row.values()) for row in duckdb_rows(state.cutline.metadata_location))
    assert lake == heap
    name = slot_name(state.table.table_id, place.truth.dsn.dbname)
    assert place.truth.sql("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == [
        (name,)
    ]
    assert place.start("repair").ends() == 0
    assert place.truth.reader.unfinished_ops() == ()
