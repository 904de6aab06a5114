"""A failure before or after each effect of this room leaves a state from which the same call goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from modak.catalog import capture, pins, spill
from modak.catalog.journal import Journal
from modak.catalog.lease import Lease
from modak.catalog.read import CatalogReader
from modak.catalog.records import DeltaRange
from modak.catalog.write import CatalogWriter
from modak.core import faults
from modak.core.clock import SystemClock
from modak.core.errors import Conflict
from modak.core.faults import Fault, InjectedFault
from modak.core.ids import new_op_id
from modak.core.states import OpPhase
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build

Conn = psycopg.Connection[Any]
Act = Callable[[], object]


def fail_at(point: str, act: Act) -> None:
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        act()
    faults.arm(None)


@pytest.fixture
def table(conn: Conn) -> Built:
    return build(conn)


@pytest.mark.parametrize("point", ["capture.before_install", "capture.after_install"])
def test_the_trigger_is_installed_at_the_second_try(conn: Conn, table: Built, point: str) -> None:
    leaf = table.leaves[0]
    fail_at(point, lambda: capture.install(conn, table.table_id, leaf))
    oid = capture.install(conn, table.table_id, leaf)
    assert capture.verify(conn, table.table_id, leaf, oid).holds


@pytest.mark.parametrize("point", ["capture.before_remove", "capture.after_remove"])
def test_the_trigger_is_removed_at_the_second_try(conn: Conn, table: Built, point: str) -> None:
    leaf = table.leaves[0]
    oid = capture.install(conn, table.table_id, leaf)
    fail_at(point, lambda: capture.remove(conn, leaf))
    capture.remove(conn, leaf)
    assert capture.verify(conn, table.table_id, leaf, oid).broken == "the capture trigger is missing"


@pytest.mark.parametrize(
    "point",
    [f"spill.{side}_{what}" for side in ("before", "after") for what in ("enable", "widen", "disable")],
)
def test_the_spill_gets_where_it_should_at_the_second_try(conn: Conn, table: Built, point: str) -> None:
    acts: dict[str, Act] = {
        "enable": lambda: spill.enable(conn, table.name),
        "widen": lambda: spill.widen(conn, table.table_id, 100),
        "disable": lambda: spill.disable(conn, table.name),
    }
    for what, act in acts.items():
        if what == "widen":
            conn.execute(f"DROP TABLE {table.name}_0".encode())
            conn.execute("UPDATE modak.cutline SET t = 100 WHERE table_id = %s", (table.table_id,))
        if point.endswith(what):
            fail_at(point, act)
        act()
        found = spill.find(conn, table.table_id)
        assert (found.upper if found else None) == {"enable": 0, "widen": 100, "disable": None}[what]


@pytest.mark.parametrize(
    "point",
    [f"pins.{side}_{what}" for side in ("before", "after") for what in ("begin", "renew", "end", "sweep")],
)
def test_a_reader_that_fails_leaves_at_most_a_pin_that_expires(
    conn: Conn, catalog: Dsn, table: Built, point: str
) -> None:
    if point.endswith("begin"):
        fail_at(point, lambda: pins.begin(catalog, table.name))
        assert len(CatalogReader(catalog).live_pins(table.table_id)) == (1 if "after" in point else 0)
    pin = pins.begin(catalog, table.name)
    acts: dict[str, Act] = {
        "renew": lambda: pins.renew(conn, pin.pin_id),
        "end": lambda: pins.end(conn, pin.pin_id),
        "sweep": lambda: pins.sweep(conn),
    }
    for what, act in acts.items():
        if point.endswith(what):
            fail_at(point, act)
        act()
    assert pin not in CatalogReader(catalog).live_pins(table.table_id)


@pytest.mark.parametrize(
    "point", [f"lease.{side}_{what}" for side in ("before", "after") for what in ("campaign", "renew", "release")]
)
def test_a_worker_that_fails_in_the_election_blocks_it_no_longer_than_the_lease(
    conn: Conn, catalog: Dsn, point: str
) -> None:
    conn.execute("UPDATE modak.leader SET expires_at = '-infinity'")
    lease = Lease(catalog, "failing", 0.5)
    if not point.endswith("campaign"):
        assert lease.campaign()
    acts: dict[str, Act] = {"campaign": lease.campaign, "renew": lease.renew, "release": lease.release}
    fail_at(point, acts[point.partition("_")[2]])
    conn.execute("SELECT pg_sleep(0.6)")
    successor = Lease(catalog, "next", 30)
    assert successor.campaign()
    assert not lease.renew()
    successor.release()
    lease.close()


@pytest.mark.parametrize(
    "point",
    [
        *(f"journal.{side}_{what}" for side in ("before", "after") for what in ("begin", "phase", "note")),
        "catalog.before_step",
        "catalog.after_step",
    ],
)
def test_the_journal_shows_an_intent_or_nothing(conn: Conn, catalog: Dsn, table: Built, point: str) -> None:
    journal = Journal(CatalogWriter(catalog))
    op_id = new_op_id(SystemClock())
    acts: dict[str, Act] = {
        "begin": lambda: journal.begin(op_id, table.table_id, "tiering", {}),
        "phase": lambda: journal.phase(op_id, OpPhase.PLANNED, OpPhase.WRITING),
        "note": lambda: journal.note(op_id, folders=["file:///f"]),
    }
    landed = point.startswith(("journal.after", "catalog.after"))
    for what, act in acts.items():
        if point.endswith(what) or (what == "phase" and point.startswith("catalog.")):
            fail_at(point, act)
            if landed and what == "phase":
                with pytest.raises(Conflict):
                    act()
                continue
            if landed and what == "begin":
                continue
        act()
    op = CatalogReader(catalog).op(op_id)
    assert op is not None
    assert op.phase is OpPhase.WRITING
    assert "file:///f" in op.folders
    journal.abandon(op_id, OpPhase.WRITING)


@pytest.mark.parametrize("point", ["catalog.before_terminate", "catalog.after_terminate"])
def test_a_failure_while_ending_a_half_open_commit_is_made_good_by_asking_again(
    conn: Conn, catalog: Dsn, table: Built, point: str
) -> None:
    journal = Journal(CatalogWriter(catalog))
    op_id = new_op_id(SystemClock())
    journal.begin(op_id, table.table_id, "tiering", {})
    journal.phase(op_id, OpPhase.PLANNED, OpPhase.PREPARED)
    with psycopg.connect(catalog.conninfo()) as half_open:
        half_open.execute("UPDATE modak.op_log SET backend_pid = pg_backend_pid() WHERE op_id = %s", (op_id,))
        half_open.commit()
        half_open.execute("UPDATE modak.op_log SET phase = 'committed' WHERE op_id = %s", (op_id,))
        fail_at(point, lambda: journal.landed(op_id))
        assert journal.landed(op_id) is False
        half_open.close()


@pytest.mark.parametrize("point", ["delta.retired_early", "catalog.before_commit"])
def test_corrections_whose_early_removal_fails_stay_until_the_second_try(
    conn: Conn, catalog: Dsn, table: Built, point: str
) -> None:
    capture.install(conn, table.table_id, table.leaves[0])
    conn.execute(f"INSERT INTO {table.name} VALUES (1, 10, 'a'), (2, 20, 'b')".encode())
    seen = str(conn.execute("SELECT pg_current_snapshot()::text").fetchone()[0])  # type: ignore[index]
    writer, rows = CatalogWriter(catalog), DeltaRange(0, 100)
    journal, op_id = Journal(writer), new_op_id(SystemClock())
    journal.begin(op_id, table.table_id, "fold", {})
    journal.phase(op_id, OpPhase.PLANNED, OpPhase.PREPARED)

    def left() -> int:
        found = conn.execute("SELECT count(*) FROM modak.delta WHERE table_id = %s", (table.table_id,)).fetchone()
        assert found is not None
        return int(found[0])

    def retire() -> None:
        with writer.transaction_retiring(op_id, table.table_id, rows, seen) as tx:
            tx.retire_delta(table.table_id, rows, seen)

    fail_at(point, retire)
    assert left() == 2
    retire()
    assert left() == 0
