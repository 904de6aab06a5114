"""`modak-console` as it is installed: its pages are there from the start, its API only for who has the token."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from modak import __version__
from modak.postgres.dsn import Dsn
from tests.runtime.conftest import ADMIN, READ
from tests.support.ports import free_port

PROGRAM = Path(sys.executable).with_name("modak-console")
PATIENCE = 120.0


def environ(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MODAK_")}
    return {**clean, **more}


@pytest.fixture
def started(fresh_database: Dsn, warehouse: str, spark_home: Path, tmp_path: Path) -> Iterator[str]:
    """The program with both tokens set, on a port of its own; ended as a supervisor ends it."""
    port, log = free_port(), tmp_path / "console.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [PROGRAM, "run"],
            env=environ(
                MODAK_PG_URL=fresh_database.safe(),
                MODAK_PG_PASSWORD=fresh_database.password,
                MODAK_HOME=str(spark_home),
                MODAK_WAREHOUSE=warehouse,
                MODAK_CONSOLE_PORT=str(port),
                MODAK_API_TOKEN=ADMIN,
                MODAK_API_READ_TOKEN=READ,
            ),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + PATIENCE
        while not answers(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
        said = log.read_text()
        assert "Traceback" not in said
        assert ADMIN not in said
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_the_installed_console_serves_its_pages_and_keeps_the_api_behind_the_tokens(started: str) -> None:
    page = httpx.get(f"{started}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "/static/js/main.js" in page.text
    assert httpx.get(f"{started}/static/js/main.js").status_code == 200
    refused = httpx.get(f"{started}/api/v1/overview")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "api.unauthorised")
    assert httpx.get(f"{started}/console/session").json()["needs_login"] is True
    shown = httpx.get(f"{started}/api/v1/overview", headers={"Authorization": f"Bearer {READ}"})
    assert (shown.status_code, shown.json()["version"], shown.json()["tables"]) == (200, __version__, [])


def test_the_console_takes_the_commands_of_the_worker_under_its_own_name() -> None:
    done = subprocess.run([PROGRAM, "--help"], env=environ(), capture_output=True, text=True, timeout=60, check=True)
    assert "modak-console [OPTIONS]" in done.stdout
    assert "register" in done.stdout
