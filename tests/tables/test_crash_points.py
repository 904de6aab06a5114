"""A crash at every fault point of a table's life, by exception: the next start goes on as if nothing had happened.

The everyday run takes a sample of the points, drawn by `--randomly-seed` (printed when a test fails); the full run
takes all of them, and each point every time that a step comes by it.
"""

from __future__ import annotations

import contextlib
import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from modak.core import faults
from modak.core.errors import Conflict, ModakError
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from modak.postgres.snapshot import ExportSnapshot
from tests.tables.conftest import settings_for
from tests.tables.life import LIFE, SHORT_LIFE, World, first_tiering, live, record, registering

LIFE_POINTS = (
    "capture.after_install",
    "capture.before_install",
    "catalog.after_commit",
    "catalog.after_step",
    "catalog.before_commit",
    "catalog.before_step",
    "export.after_tasks",
    "export.before_tasks",
    "export.snapshot_taken",
    "journal.after_begin",
    "journal.after_note",
    "journal.after_phase",
    "journal.before_begin",
    "journal.before_note",
    "journal.before_phase",
    "lake.create_started",
    "lake.create_written",
    "lake.manifests_written",
    "lake.metadata_written",
    "lake.prepare_started",
    "landing.before_prepare",
    "landing.committed",
    "landing.prepared",
    "partitions.after_sync",
    "partitions.before_sync",
    "premake.after_attach",
    "premake.before_attach",
    "purge.after_delete",
    "purge.before_delete",
    "reclaim.after_detach",
    "reclaim.after_drop",
    "reclaim.before_detach",
    "reclaim.before_drop",
    "register.before_prepare",
    "register.committed",
    "register.prepared",
    "seal.after_trigger",
    "seal.before_trigger",
    "spill.after_disable",
    "spill.after_enable",
    "spill.after_widen",
    "spill.before_disable",
    "spill.before_enable",
    "spill.before_widen",
    "storage.deleted",
    "storage.deleting",
    "unregister.committed",
)
SHORT_LIFE_POINTS = ("capture.before_remove", "capture.after_remove")
AT_THE_END = ("unregister.", "purge.", "storage.", "spill.before_disable", "spill.after_disable")
"""The short life comes by these sooner."""
TASK_POINTS = (
    "export.task_started",
    "files.before_create",
    "files.created",
    "files.durable",
    "export.task_read",
    "export.task_written",
)
ABORT_POINTS = ("files.before_abort", "files.aborted")
REPAIR_POINTS = ("tidy.before_attempt", "tidy.after_attempt", "tidy.before_data", "tidy.after_data")
TERMINATE_POINTS = ("repair.before_terminate", "repair.after_terminate")
LEFTOVER_POINTS = ("tidy.before_delete", "tidy.after_delete")
VISITED = {
    *LIFE_POINTS,
    *SHORT_LIFE_POINTS,
    *TASK_POINTS,
    *ABORT_POINTS,
    *REPAIR_POINTS,
    *LEFTOVER_POINTS,
    *TERMINATE_POINTS,
}
SAMPLE = 8

NewWorld = Callable[[], World]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every point of the lives; those outside the sample only to the full run."""
    if "point" not in metafunc.fixturenames or "seed" not in metafunc.fixturenames:
        return
    seed = int(metafunc.config.getoption("randomly_seed", 0))
    everywhere = [*LIFE_POINTS, *SHORT_LIFE_POINTS, *TASK_POINTS]
    drawn = set(random.Random(seed).sample(everywhere, SAMPLE))
    marks = {point: () if point in drawn else (pytest.mark.full,) for point in everywhere}
    metafunc.parametrize("point", [pytest.param(point, marks=marks[point]) for point in everywhere])


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """What drew the sample; captured output shows it when a test fails."""
    drawn_by = int(request.config.getoption("randomly_seed", 0))
    print(f"the sample was drawn with --randomly-seed={drawn_by}")
    return drawn_by


@pytest.fixture
def new_world(
    server: EmbeddedServer, tmp_path: Path, spark_home: Path, request: pytest.FixtureRequest
) -> Iterator[NewWorld]:
    """Worlds of their own, each with a new database and an empty warehouse; the last one ends with the test."""
    with_spark = request.node.get_closest_marker("spark") is not None
    request.getfixturevalue("spark" if with_spark else "gateway")
    with contextlib.ExitStack() as last:

        def make() -> World:
            last.close()
            name = f"life_{secrets.token_hex(4)}"
            warehouse = tmp_path / name
            warehouse.mkdir()
            last.enter_context(_database(server, name))
            settings = settings_for(server.dsn(name), str(warehouse), spark_home, MODAK_PREMAKE_PARTITIONS="1")
            world = World(settings, str(warehouse), with_spark)
            last.callback(world.close)
            return world

        yield make


@contextlib.contextmanager
def _database(server: EmbeddedServer, name: str) -> Iterator[Dsn]:
    with connect(server.dsn("postgres"), autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield server.dsn(name)
    with connect(server.dsn("postgres"), autocommit=True) as conn:
        conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def world(new_world: NewWorld) -> World:
    """One world."""
    return new_world()


def test_the_points_that_crash_here_are_those_that_a_life_comes_by(world: World) -> None:
    passed = record(world)
    assert {point for points in passed.values() for point in points} == {*LIFE_POINTS, *TASK_POINTS}


def test_a_crash_anywhere_is_made_good_by_the_next_start(world: World, point: str, seed: int) -> None:
    leaving = point in SHORT_LIFE_POINTS or point.startswith(AT_THE_END)
    live(world, Fault(point), SHORT_LIFE if leaving else LIFE)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("step", [act.__name__ for act, ours in LIFE if ours])
def test_a_crash_at_each_passage_of_a_step_is_made_good(new_world: NewWorld, step: str) -> None:
    come_by: Counter[str] = Counter()
    for point in record(new_world())[step]:
        print(f"{step}: {point}, time {come_by[point] + 1}")
        live(new_world(), Fault(point, after=come_by[point]), on=step)
        come_by[point] += 1


@pytest.mark.parametrize("point", ABORT_POINTS)
def test_a_crash_while_a_failed_task_removes_its_files_leaves_none(world: World, point: str) -> None:
    world.events.sql("ALTER TABLE public.events ADD COLUMN amount numeric")
    world.events.sql("UPDATE public.events SET amount = 1e30 WHERE id = 150")
    registering(world)
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        first_tiering(world)
    (said,) = world.restart()
    assert said["was"] == "writing, undone"
    with pytest.raises(ModakError, match="amount"):
        first_tiering(world)
    world.events.sql("UPDATE public.events SET amount = NULL WHERE id = 150")
    first_tiering(world)
    world.rows = {(*row, None) for row in world.rows}
    world.check()


@pytest.mark.parametrize("point", REPAIR_POINTS)
def test_a_crash_in_the_repair_is_made_good_by_the_next_one(world: World, point: str) -> None:
    registering(world)
    faults.arm(Fault("landing.prepared"))
    with pytest.raises(InjectedFault):
        first_tiering(world)
    with pytest.raises(InjectedFault):
        world.restart(Fault(point))
    (said,) = world.restart()
    assert said["was"] == "prepared, undone"
    first_tiering(world)
    world.check()


@pytest.mark.parametrize("point", TERMINATE_POINTS)
def test_the_export_of_an_earlier_leader_gives_up_its_locks(world: World, point: str) -> None:
    registering(world)
    (leaf,) = world.events.sql("SELECT 'public.events_0'::regclass::oid::int8")
    with ExportSnapshot(world.site.dsn, [(leaf[0], TableName("public", "events_0"))]) as asleep:
        with pytest.raises(InjectedFault):
            world.restart(Fault(point))
        world.restart()
        with pytest.raises(Conflict):
            asleep.check()
        first_tiering(world)
        world.check()


def test_an_earlier_leader_that_sleeps_in_a_drop_is_in_nobodys_way(world: World) -> None:
    registering(world)
    record = world.site.reader.state(world.events.name).table
    dsn = world.site.dsn
    with connect(dsn, autocommit=True) as dropping, connect(dsn, application="modak step") as stepping:
        dropping.execute("SELECT pg_advisory_lock(modak.pin_lock_key(%s))", (record.table_id,))
        stepping.execute("LOCK TABLE public.events_100 IN ACCESS EXCLUSIVE MODE")
        world.restart()
        first_tiering(world)
        world.check()
        for asleep in (dropping, stepping):
            with pytest.raises(psycopg.OperationalError):
                asleep.execute("SELECT 1")


@pytest.mark.parametrize("point", LEFTOVER_POINTS)
def test_leftovers_of_a_landed_operation_go_even_if_their_removal_crashes(world: World, point: str) -> None:
    registering(world)
    faults.arm(Fault("landing.committed"))
    with pytest.raises(InjectedFault):
        first_tiering(world)
    (op,) = world.site.reader.unfinished_ops()
    assert op.phase is OpPhase.COMMITTED
    # A task that Spark ran twice has written its file twice; the driver knows of one.
    twice = Path(op.folders[0].removeprefix("file://"), "00000-00000-again.parquet")
    twice.write_bytes(b"rows")
    with pytest.raises(InjectedFault):
        world.restart(Fault(point))
    world.restart()
    assert not twice.exists()
    first_tiering(world)
    world.check()


@pytest.mark.spark
@pytest.mark.usefixtures("through_spark")
@pytest.mark.parametrize("point", ["export.task_started", "export.task_written"])
def test_a_crash_inside_a_spark_task_is_made_good_too(world: World, point: str) -> None:
    live(world, Fault(point), SHORT_LIFE)


@pytest.mark.spark
@pytest.mark.usefixtures("through_spark")
@pytest.mark.parametrize("point", ["export.task_read", "files.durable"])
def test_a_spark_worker_process_that_is_killed_costs_only_the_attempt(world: World, point: str) -> None:
    registering(world)
    faults.arm(Fault(point, "kill"))
    with pytest.raises(ModakError) as failed:
        first_tiering(world)
    assert failed.value.retryable
    faults.arm(None)
    first_tiering(world)
    world.check()


def test_a_new_registration_survives_the_end_of_an_interrupted_purge(world: World) -> None:
    live(world, Fault("register.committed"))
    faults.arm(Fault("purge.before_delete"))
    with pytest.raises(InjectedFault):
        LIFE[-1][0](world)
    faults.arm(None)
    registering(world)
    world.restart()
    world.registered = True
    first_tiering(world)
    world.check()
