"""Real parts for every test: one Postgres per run, a database per module or test, a warehouse folder."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from psycopg import sql

from modak.catalog.migrate import migrate
from modak.core import faults
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from modak.runtime import working
from tests.support.role import way_in

if (Path(__file__).parent / "spark_fixtures.py").exists():
    pytest_plugins = ["tests.spark_fixtures"]

_PREFIX = "modak-test-server-"

# How long an example takes says what else the machine is doing.
settings.register_profile("modak", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("modak")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever asks for the Spark session is a Spark test: the gate runs those beside all others, with one session."""
    for item in items:
        if isinstance(item, pytest.Function) and "spark" in item.fixturenames:
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """One real Postgres for the whole run."""
    _sweep_servers_of_dead_runs()
    # Not below pytest's own folder: that is closed to the account which runs Postgres when the tests run as root.
    home = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    home.chmod(0o711)
    running = EmbeddedServer(home, extra_options={"fsync": "off"})
    try:
        running.start()
        _quick_to_enter(running)
        yield running
    finally:
        running.destroy()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def database(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Dsn]:
    """A database of its own for the module."""
    with _database(server, request.module.__name__.rpartition(".")[2]) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def catalog_template(server: EmbeddedServer) -> str | None:
    """A database with an empty catalog: a copy of it costs a fraction of the migration that most tests begin with."""
    if os.environ.get("LEAST_PRIVILEGE"):
        # Each database has a role of its own there, which has to make the catalog itself.
        return None
    name = "modak_test_template"
    with connect(server.dsn("postgres"), autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    with connect(server.dsn(name)) as conn:
        migrate(conn)
    return name


@pytest.fixture
def fresh_database(
    server: EmbeddedServer, catalog_template: str | None, request: pytest.FixtureRequest
) -> Iterator[Dsn]:
    """A database of its own for one test; `@pytest.mark.bare` if it is not to have a catalog yet."""
    template = None if request.node.get_closest_marker("bare") else catalog_template
    with _database(server, request.node.name, template) as dsn:
        yield dsn


@pytest.fixture
def warehouse(tmp_path: Path) -> str:
    """A folder for lake files, as the path that a user would set."""
    folder = tmp_path / "warehouse"
    folder.mkdir()
    return str(folder)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    faults.arm(None)
    faults.watch(None)
    working.forget()
    # A command that ran in this process has set up logs for its own terminal.
    structlog.reset_defaults()


def pytest_sessionstart() -> None:
    """A run in the background inherits that Ctrl-C is ignored, and would pass that on to the workers it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _quick_to_enter(server: EmbeddedServer) -> None:
    """A run makes tens of thousands of connections; most of what each costs its client is the stretching of the key."""
    dsn = server.dsn("postgres")
    with connect(dsn, autocommit=True) as conn:
        conn.execute("SET scram_iterations = 1")
        role, password = sql.Identifier(dsn.user), sql.Literal(dsn.password)
        conn.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(role, password))


@contextmanager
def _database(server: EmbeddedServer, label: str, template: str | None = None) -> Iterator[Dsn]:
    name = f"{re.sub('[^a-z0-9]+', '_', label.lower())[:40]}_{secrets.token_hex(4)}"
    with connect(server.dsn("postgres"), autocommit=True) as conn:
        like = sql.SQL(" TEMPLATE {}").format(sql.Identifier(template)) if template else sql.SQL("")
        conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)) + like)
    try:
        yield way_in(server, name)
    finally:
        with connect(server.dsn("postgres"), autocommit=True) as conn:
            conn.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = %s", (name,)
            )
            slots = conn.execute("SELECT slot_name FROM pg_replication_slots WHERE database = %s", (name,)).fetchall()
            for (slot,) in slots:
                conn.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _sweep_servers_of_dead_runs() -> None:
    """A run that was killed leaves its server behind; the next run ends it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        # Another run that starts at the same moment may be sweeping too.
        with suppress(FileNotFoundError):
            if owner.isdigit() and folder.stat().st_uid == os.geteuid() and not _alive(int(owner)):
                EmbeddedServer(folder).destroy()
                shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
