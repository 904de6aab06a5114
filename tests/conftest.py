"""Real parts for every test: one Postgres per run, a database per module or test, a warehouse folder."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg import sql

from modak.core import faults
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer

if (Path(__file__).parent / "spark_fixtures.py").exists():
    pytest_plugins = ["tests.spark_fixtures"]

_PREFIX = "modak-test-server-"


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
        yield running
    finally:
        running.destroy()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def database(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Dsn]:
    """A database of its own for the module."""
    with _database(server, request.module.__name__.rpartition(".")[2]) as dsn:
        yield dsn


@pytest.fixture
def fresh_database(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Dsn]:
    """A database of its own for one test."""
    with _database(server, request.node.name) as dsn:
        yield dsn


@pytest.fixture
def warehouse(tmp_path: Path) -> str:
    """A folder for lake files, as the path that a user would set."""
    folder = tmp_path / "warehouse"
    folder.mkdir()
    return str(folder)


@pytest.fixture(autouse=True)
def _nothing_armed() -> Iterator[None]:
    yield
    faults.arm(None)
    faults.watch(None)


@contextmanager
def _database(server: EmbeddedServer, label: str) -> Iterator[Dsn]:
    name = f"{re.sub('[^a-z0-9]+', '_', label.lower())[:40]}_{secrets.token_hex(4)}"
    with connect(server.dsn("postgres"), autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        yield server.dsn(name)
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
