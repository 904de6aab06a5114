"""Rows that were erased are nowhere: not in the heap, the delta, the lake or any snapshot that is kept."""

from __future__ import annotations

import random
from typing import Any

import pytest

from modak.catalog import pins
from modak.core import faults
from modak.core.errors import UsageError
from modak.core.faults import Fault, InjectedFault
from modak.tables.maintenance.erase import by_key, count, erase_rows
from modak.tables.repair import repair
from tests.cli.conftest import modak  # noqa: F401
from tests.maintenance.lake import Lake, original
from tests.maintenance.test_requests import environ
from tests.tables import readers
from tests.tables.corrections import Corrections

__all__ = ["environ"]

pytestmark = pytest.mark.spark

POINTS = (
    "erasures.before_begin",
    "erasures.after_begin",
    "erase.before_heap",
    "erase.after_heap",
    "erase.before_hide",
    "erase.after_hide",
    "erasures.before_erased",
    "erasures.after_erased",
    "erasures.before_finish",
    "erasures.after_finish",
)
VISITED = set(POINTS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every point; all but one that is drawn only to the full run."""
    if "struck" in metafunc.fixturenames:
        drawn = random.Random(int(metafunc.config.getoption("randomly_seed", 0))).choice(POINTS)
        marks = {point: () if point == drawn else (pytest.mark.full,) for point in POINTS}
        metafunc.parametrize("struck", [pytest.param(point, marks=marks[point]) for point in POINTS])


def everywhere(lake: Lake) -> set[str]:
    """Every text that any file of the lake, any snapshot or the heap still shows."""
    found = {row[2] for row in lake.events.sql("SELECT * FROM public.events")}
    table = lake.table
    for each in lake.site.lake.snapshots(table):
        found |= {row["body"] for row in readers.static_rows(table.metadata_location, each.id)}
    import pyarrow.parquet as pq

    for entry in lake.site.store.list(f"{table.location}/data"):
        if entry.uri.endswith(".parquet"):
            found |= set(pq.read_table(entry.uri.removeprefix("file://")).column("body").to_pylist())
    found |= {str(image.get("body")) for image in lake.events.delta().values() if image is not None}
    return found


def test_rows_are_gone_from_every_file_and_snapshot(lake: Lake) -> None:
    lake.correct(3, body="secret")
    lake.correct(3, body="public again")
    lake.correct(120, body="secret")
    Corrections(lake.events).upsert(4, 4, "secret")
    lake.events.sql("UPDATE public.events SET body = 'secret' WHERE id = 230")
    assert "secret" in everywhere(lake)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "body = 'secret'")
    assert (done.heap_rows, done.lake_rows, done.waiting, done.found) == (1, 2, 0, 0)
    assert done.files_rewritten >= 2
    assert done.snapshots_expired >= 3
    assert "secret" not in everywhere(lake)
    assert lake.rows() == original(3, 4, 120) | {(3, 3, "public again")}
    assert lake.events.sql("SELECT finished_at IS NOT NULL, digest ~ '^[0-9a-f]{64}$' FROM modak.erasures") == [
        (True, True)
    ]


def test_a_pinned_snapshot_defers_the_end_and_a_later_pass_finishes(lake: Lake) -> None:
    lake.policy(maintenance_enabled=False)
    pin = pins.begin(lake.site.dsn, lake.events.name)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5")
    assert done.waiting >= 1
    assert len(readers.static_rows(pin.metadata_location)) == 200, "the reader still has what it pinned"
    assert lake.rows() == original(5)
    lake.maintain("spark")
    assert lake.events.sql("SELECT finished_at IS NULL FROM modak.erasures") == [(True,)]
    with lake.site.connect() as conn:
        assert pins.end(conn, pin.pin_id)
    lake.maintain("spark")
    assert lake.events.sql("SELECT finished_at IS NOT NULL FROM modak.erasures") == [(True,)]
    assert "row 5" not in everywhere(lake)


def test_a_crash_in_an_erasure_is_made_good_by_running_it_again(lake: Lake, struck: str) -> None:
    faults.arm(Fault(struck))
    with pytest.raises(InjectedFault):
        erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5 OR id = 220")
    faults.arm(None)
    repair(lake.site, lake.leader.epoch)
    done = erase_rows(lake.site, lake.leader.epoch, lake.events.name, "id = 5 OR id = 220")
    assert (done.waiting, done.found) == (0, 0)
    assert not {"row 5", "row 220"} & everywhere(lake)
    assert lake.rows() == original(5)
    assert lake.site.reader.unfinished_ops() == ()


def test_a_condition_that_cannot_be_read_changes_nothing(lake: Lake) -> None:
    for where in ("no_such_column = 1", "id = 5; DELETE FROM public.events", "id ="):
        with pytest.raises(UsageError, match="condition"):
            erase_rows(lake.site, lake.leader.epoch, lake.events.name, where)
    assert count(lake.site, lake.events.name, "id < 3 AND body LIKE 'row %'") == (0, 3)
    assert lake.rows() == original()


def test_a_key_names_one_row(lake: Lake) -> None:
    assert by_key(lake.site, lake.events.name, "7") == "id = '7'"
    assert by_key(lake.site, lake.events.name, {"id": "a'b"}) == "id = 'a''b'"
    with pytest.raises(UsageError, match="The key of"):
        by_key(lake.site, lake.events.name, {"ts": "7"})


def test_the_command_counts_erases_and_shows_evidence(lake: Lake, modak: Any, environ: dict[str, str]) -> None:  # noqa: F811
    lake.leader.__exit__(None, None, None)
    dry = modak("erase", "--table", "public.events", "--pk", "7", "--dry-run", **environ)
    assert dry.exit_code == 0, dry.output
    assert "0 rows of the heap and 1 of the lake would be erased." in dry.stdout
    done = modak("erase", "--table", "public.events", "--pk", "7", **environ)
    assert done.exit_code == 0, done.output
    assert "1 of the lake; 1 files rewritten" in done.stdout
    assert "found 0 matching rows" in done.stdout
