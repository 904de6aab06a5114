"""Real processes, ended by SIGKILL at points beside the usual life of a table: the same thing done again goes well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest

from modak import config
from modak.catalog import operators, pins, spill
from modak.catalog.journal import Journal
from modak.catalog.migrate import check, known, migrate
from modak.catalog.read import CatalogReader
from modak.catalog.write import CatalogWriter
from modak.core.clock import SystemClock
from modak.core.errors import Conflict
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.iceberg.output import local_path
from modak.measurements.leases import READERS, Readers
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.snapshot import ExportSnapshot
from modak.runtime import demo
from modak.storage.objects import Objects
from modak.storage.store import Store
from tests.catalog.build import Built, build, scalar
from tests.support.aside import ACTS

pytestmark = pytest.mark.full

Conn = psycopg.Connection[Any]

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0
MIGRATION = ("catalog.before_migration", "catalog.after_migration")
BEGIN = ("pins.before_begin", "pins.after_begin")
RENEW = ("pins.before_renew", "pins.after_renew")
END = ("pins.before_end", "pins.after_end")
SWEEP = ("pins.before_sweep", "pins.after_sweep")
NOTE = ("journal.before_note", "journal.after_note")
TERMINATE = ("catalog.before_terminate", "catalog.after_terminate")
FORGET = ("spill.before_forget", "spill.after_forget")
REPAIR = ("repair.before_terminate", "repair.after_terminate")
ABORT = ("files.before_abort", "files.aborted")
DEMO = ("demo.before_create", "demo.after_create")
PROFILE = ("profiles.before_create", "profiles.created")
PAUSE = ("operators.before_pause", "operators.after_pause")
RESUME = ("operators.before_resume", "operators.after_resume")
REQUEST = ("operators.before_request", "operators.after_request")
FILE = ("requests.before_file", "requests.after_file")
POLICY = ("policy.before_edit", "policy.after_edit")
ASK = ("erasures.before_ask", "erasures.after_ask")
WITHDRAW = ("erasures.before_withdraw", "erasures.after_withdraw")
READ = ("lease.before_register", "lease.registered")
KILLED = (
    *MIGRATION,
    *BEGIN,
    *RENEW,
    *END,
    *SWEEP,
    *NOTE,
    *TERMINATE,
    *FORGET,
    *REPAIR,
    "files.before_create",
    *ABORT,
    *DEMO,
    *PROFILE,
    *PAUSE,
    *RESUME,
    *REQUEST,
    *FILE,
    *POLICY,
    *ASK,
    *WITHDRAW,
    *READ,
)
"""Every point at which a process dies here."""


@dataclass(frozen=True)
class Place:
    """A database, and the settings with which one comes to it."""

    environ: dict[str, str]

    def dies(self, point: str, act: str, on: object = "", after: int = 0) -> None:
        """Do something in a process of its own, which SIGKILL strikes at the point."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MODAK_")}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.support.aside", act, str(on), "--kill", point, "--after", str(after)],
            cwd=ROOT,
            env={**clean, **self.environ},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr

    def again(self, act: str, on: object = "") -> Any:
        """Do the same thing here, out of danger."""
        return ACTS[act](config.load(self.environ), str(on))


@pytest.fixture
def place(fresh_database: Dsn, warehouse: str, tmp_path: Path) -> Place:
    return Place(
        {
            "MODAK_PG_URL": fresh_database.safe(),
            "MODAK_PG_PASSWORD": fresh_database.password,
            "MODAK_WAREHOUSE": warehouse,
            "MODAK_HOME": str(tmp_path / "home"),
            "MODAK_LEASE_SECONDS": "2",
            "MODAK_CAMPAIGN_INTERVAL_SECONDS": "1",
        }
    )


@pytest.fixture
def catalog(fresh_database: Dsn) -> Dsn:
    """A migrated database for each test: the repair looks at all that is in it."""
    with connect(fresh_database) as conn:
        migrate(conn)
    return fresh_database


@pytest.fixture
def table(conn: Conn) -> Built:
    return build(conn)


@pytest.mark.bare
@pytest.mark.parametrize("point", MIGRATION)
def test_a_start_that_is_killed_between_migrations_is_made_good_by_the_next(
    place: Place, fresh_database: Dsn, point: str
) -> None:
    place.dies(point, "migrate", after=1)
    landed = 2 if point == "catalog.after_migration" else 1
    assert place.again("migrate") == [migration.name for migration in known()[landed:]]
    with connect(fresh_database) as conn:
        check(conn)


@pytest.mark.parametrize("point", BEGIN)
def test_a_reader_that_is_killed_while_it_pins_leaves_at_most_a_pin(
    place: Place, catalog: Dsn, table: Built, point: str
) -> None:
    place.dies(point, "begin", table.name)
    left = CatalogReader(catalog).live_pins(table.table_id)
    assert len(left) == (1 if point == "pins.after_begin" else 0)
    pin = place.again("begin", table.name)
    assert {*left, pin} == set(CatalogReader(catalog).live_pins(table.table_id))


@pytest.mark.parametrize("point", RENEW)
def test_a_reader_that_is_killed_while_it_renews_keeps_its_pin(
    place: Place, catalog: Dsn, table: Built, point: str
) -> None:
    pin = pins.begin(catalog, table.name)
    place.dies(point, "renew", pin.pin_id)
    assert place.again("renew", pin.pin_id)
    (held,) = CatalogReader(catalog).live_pins(table.table_id)
    assert held.pin_id == pin.pin_id


@pytest.mark.parametrize("point", END)
def test_a_reader_that_is_killed_while_it_ends_is_pinned_no_longer_at_the_second_try(
    place: Place, catalog: Dsn, table: Built, point: str
) -> None:
    pin = pins.begin(catalog, table.name)
    place.dies(point, "end", pin.pin_id)
    assert place.again("end", pin.pin_id) == (point == "pins.before_end")
    assert CatalogReader(catalog).live_pins(table.table_id) == ()


@pytest.mark.parametrize("point", SWEEP)
def test_pins_that_have_lapsed_go_at_the_second_try(
    place: Place, conn: Conn, catalog: Dsn, table: Built, point: str
) -> None:
    pins.begin(catalog, table.name)
    conn.execute("UPDATE modak.read_pins SET expires_at = clock_timestamp() - interval '1 hour'")
    held = pins.begin(catalog, table.name)
    place.dies(point, "sweep")
    assert place.again("sweep") == (1 if point == "pins.before_sweep" else 0)
    assert conn.execute("SELECT pin_id FROM modak.read_pins").fetchall() == [(held.pin_id,)]


@pytest.mark.parametrize("point", NOTE)
def test_a_folder_is_noted_at_the_second_try(place: Place, catalog: Dsn, table: Built, point: str) -> None:
    op_id = writing(catalog, table)
    place.dies(point, "note", op_id)
    left = CatalogReader(catalog).op(op_id)
    assert left is not None
    assert ("file:///f" in left.folders) == (point == "journal.after_note")
    place.again("note", op_id)
    op = CatalogReader(catalog).op(op_id)
    assert op is not None
    assert op.phase is OpPhase.WRITING
    assert "file:///f" in op.folders


@pytest.mark.parametrize("point", TERMINATE)
def test_a_half_open_commit_is_ended_by_asking_again(place: Place, catalog: Dsn, table: Built, point: str) -> None:
    op_id = writing(catalog, table)
    Journal(CatalogWriter(catalog)).phase(op_id, OpPhase.WRITING, OpPhase.PREPARED)
    with psycopg.connect(catalog.conninfo()) as half_open:
        half_open.execute("UPDATE modak.op_log SET backend_pid = pg_backend_pid() WHERE op_id = %s", (op_id,))
        half_open.commit()
        half_open.execute("UPDATE modak.op_log SET phase = 'committed' WHERE op_id = %s", (op_id,))
        place.dies(point, "landed", op_id)
        assert place.again("landed", op_id) is False
        with pytest.raises(psycopg.OperationalError):
            half_open.execute("SELECT 1")


@pytest.mark.parametrize("point", FORGET)
def test_the_shadow_of_a_table_that_was_dropped_goes_at_the_second_try(
    place: Place, conn: Conn, table: Built, point: str
) -> None:
    spill.enable(conn, table.name)
    conn.execute(f"DROP TABLE {table.name}".encode())
    shadows = "SELECT count(*) FROM pg_class WHERE relname LIKE 'shadow%%' AND relkind = 'r'"
    place.dies(point, "forget", table.table_id)
    assert scalar(conn, shadows) == (1 if point == "spill.before_forget" else 0)
    place.again("forget", table.table_id)
    assert scalar(conn, shadows) == 0


@pytest.mark.parametrize("point", REPAIR)
def test_the_export_of_an_earlier_leader_is_ended_by_the_next_repair(
    place: Place, catalog: Dsn, table: Built, point: str
) -> None:
    leaf = TableName(table.name.schema, f"{table.name.name}_0")
    with ExportSnapshot(catalog, [(table.leaves[0], leaf)]) as asleep:
        place.dies(point, "repair")
        assert place.again("repair") == 0
        with pytest.raises(Conflict):
            asleep.check()


@pytest.mark.parametrize("point", ["files.before_create", *ABORT])
def test_files_of_a_killed_writer_lie_in_its_folder_and_go_with_it(place: Place, warehouse: str, point: str) -> None:
    store = Store.of(f"file://{warehouse}", {})
    folder = f"file://{warehouse}/data/op-1"
    act = "write" if point == "files.before_create" else "abort"
    place.dies(point, act, folder)
    left = {entry.uri for entry in store.list()}
    assert len(left) == (1 if point == "files.before_abort" else 0)
    place.again("abort", folder)
    assert {entry.uri for entry in store.list()} == left
    (file,) = place.again("write", folder)
    assert pq.read_table(local_path(file.path))["k"].to_pylist() == [1, 2, 3]
    assert store.delete_prefix(folder) == len(left) + 1
    assert list(store.list()) == []


@pytest.mark.parametrize("point", DEMO)
def test_a_demo_that_is_killed_at_its_start_has_the_whole_table_or_none(
    place: Place, fresh_database: Dsn, point: str
) -> None:
    place.dies(point, "demo")
    with connect(fresh_database) as conn:
        assert demo.has_user_tables(conn) == (point == "demo.after_create")
    assert place.again("demo")
    with connect(fresh_database) as conn:
        assert scalar(conn, "SELECT count(*) FROM public.events") == 1000


@pytest.mark.parametrize("point", PROFILE)
def test_a_profile_is_made_at_the_second_try_and_there_is_one_default(place: Place, catalog: Dsn, point: str) -> None:
    place.dies(point, "profile", "cold")
    before = {one.name for one in CatalogReader(catalog).profiles()}
    assert before == ({"default", "cold"} if point == "profiles.created" else {"default"})
    place.again("profile", "cold")
    defaults = {one.name: one.is_default for one in CatalogReader(catalog).profiles()}
    assert defaults == {"cold": True, "default": False}


@pytest.mark.parametrize("point", [*PAUSE, *RESUME])
def test_a_table_is_held_back_and_let_go_at_the_second_try(
    place: Place, conn: Conn, catalog: Dsn, table: Built, point: str
) -> None:
    act = "pause" if point in PAUSE else "resume"
    if act == "resume":
        place.again("pause", table.table_id)
    place.dies(point, act, table.table_id)
    assert place.again(act, table.table_id) == (".before" in point)
    assert (table.table_id in operators.pauses(conn)) == (act == "pause")


@pytest.mark.parametrize("point", [*REQUEST, *FILE])
def test_a_pass_is_asked_for_once_though_the_first_who_asked_was_killed(
    place: Place, conn: Conn, catalog: Dsn, table: Built, point: str
) -> None:
    act, on = ("request", table.table_id) if point in REQUEST else ("file", table.name)
    place.dies(point, act, on)
    place.again(act, on)
    assert scalar(conn, "SELECT count(*) FROM modak.maintenance_requests") == 1


@pytest.mark.parametrize("point", POLICY)
def test_a_policy_is_edited_at_the_second_try(place: Place, conn: Conn, catalog: Dsn, table: Built, point: str) -> None:
    place.dies(point, "policy", table.name)
    own = "SELECT maintenance_policy FROM modak.tables"
    assert scalar(conn, own) == ({"orphan_grace_hours": 1} if point == "policy.after_edit" else {})
    place.again("policy", table.name)
    assert scalar(conn, own) == {"orphan_grace_hours": 1}


@pytest.mark.parametrize("point", [*ASK, *WITHDRAW])
def test_an_erasure_is_asked_for_and_taken_back_at_the_second_try(
    place: Place, conn: Conn, catalog: Dsn, table: Built, point: str
) -> None:
    if point in ASK:
        place.dies(point, "ask", table.name)
        assert scalar(conn, "SELECT count(*) FROM modak.erasures") == (1 if point == "erasures.after_ask" else 0)
        assert place.again("ask", table.name)
        return
    asked = place.again("ask", table.name)
    place.dies(point, "withdraw", asked)
    assert place.again("withdraw", asked) == (point == "erasures.before_withdraw")
    assert scalar(conn, "SELECT count(*) FROM modak.erasures WHERE answered_at IS NULL") == 0


@pytest.mark.parametrize("point", READ)
def test_a_reader_of_measurements_that_is_killed_holds_nothing_up_for_long(
    place: Place, tmp_path: Path, point: str
) -> None:
    objects = Objects.of(str(tmp_path / "store"))
    place.dies(point, "read", tmp_path / "store")
    assert len(list(objects.list(READERS))) == (1 if point == "lease.registered" else 0)
    # Nobody renews it, so it gets older than any lease may be.
    assert Readers(objects, "compactor", ttl=timedelta(0)).since() is None
    assert list(objects.list(READERS)) == []
    lease = place.again("read", tmp_path / "store")
    assert Readers(objects, "compactor").since() is not None
    lease.release()
    assert Readers(objects, "compactor").since() is None


def writing(catalog: Dsn, table: Built) -> OpId:
    """An operation of the table that is under way."""
    journal, op_id = Journal(CatalogWriter(catalog)), new_op_id(SystemClock())
    journal.begin(op_id, table.table_id, "tiering", {})
    journal.phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
    return op_id
