"""The installed command as a user meets it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from modak import __version__
from modak.cli.family import with_default
from modak.cli.main import app
from modak.cli.main import program as whole
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from tests.cli.conftest import Worker, program


@pytest.mark.parametrize("args", [("version",), ("--version",)])
def test_the_version_is_printed(worker: Worker, args: tuple[str, ...]) -> None:
    done = worker(*args)
    assert (done.returncode, done.stdout) == (0, f"modak-worker {__version__}\n")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], ["run"]),
        (["--demo"], ["run", "--demo"]),
        (["--debug"], ["--debug", "run"]),
        (["--debug", "--demo"], ["--debug", "run", "--demo"]),
        (["--debug", "status", "--json"], ["--debug", "status", "--json"]),
        (["--help"], ["--help"]),
        (["--version"], ["--version"]),
        (["status"], ["status"]),
    ],
)
def test_run_is_meant_when_no_command_is_named(given: list[str], meant: list[str]) -> None:
    assert with_default(given) == meant


@pytest.mark.parametrize("command", [("config",), ("status",), ("run",), ("stop",), ("tier", "--table", "public.t")])
def test_an_unknown_setting_is_refused_with_a_suggestion(worker: Worker, command: tuple[str, ...]) -> None:
    done = worker(*command, MODAK_TIERING_LGA="5")
    assert done.returncode == 2
    assert "MODAK_TIERING_LGA" in done.stderr
    assert "MODAK_TIERING_LAG" in done.stderr.replace("MODAK_TIERING_LGA", "")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_config_shows_values_and_where_they_come_from(worker: Worker) -> None:
    done = worker("config", MODAK_TIERING_LAG="7d", MODAK_PG_PASSWORD="hunter2", MODAK_API_TOKEN="hunter3")
    assert done.returncode == 0
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert lines["MODAK_TIERING_LAG"] == ["7d", "environment"]
    assert lines["MODAK_CYCLE_INTERVAL_SECONDS"][-1] == "default"
    assert "hunter" not in done.stdout + done.stderr


def test_config_as_json_is_a_list_of_settings(worker: Worker) -> None:
    done = worker("config", "--json", MODAK_PG_URL="postgresql://me:hunter2@db.example:5432/shop")
    settings = json.loads(done.stdout)
    assert all(set(entry) == {"name", "value", "source", "secret", "help", "concern"} for entry in settings)
    by_name = {entry["name"]: entry for entry in settings}
    assert by_name["MODAK_PG_URL"]["source"] == "environment"
    assert by_name["MODAK_PG_PASSWORD"]["secret"] is True
    assert "hunter2" not in done.stdout


def test_stop_without_a_server_says_so(worker: Worker) -> None:
    done = worker("stop")
    assert (done.returncode, done.stdout) == (0, "The embedded Postgres is not running.\n")


def test_stop_leaves_a_server_of_the_users_own_alone(worker: Worker) -> None:
    done = worker("stop", MODAK_PG_URL="postgresql://me@127.0.0.1:1/shop")
    assert done.returncode == 0
    assert "not ours to stop" in done.stdout


def test_a_reader_that_stops_reading_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program()} config --json | head -1; {program()} --help | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""


def test_the_first_command_says_that_it_starts_a_server(worker: Worker) -> None:
    try:
        first, second = worker("status"), worker("status")
    finally:
        EmbeddedServer(Path(os.environ["MODAK_HOME"])).destroy()
    assert first.stderr.startswith("Starting the embedded Postgres of ")
    assert second.stderr == ""
    assert first.stdout == second.stdout
    assert first.stdout.startswith("No table is registered.")


@pytest.mark.parametrize("command", [("status",), ("tier", "--table", "public.t"), ("accept", "--table", "public.t")])
def test_an_unreachable_postgres_is_told_without_password_or_traceback(
    worker: Worker, command: tuple[str, ...]
) -> None:
    done = worker(*command, MODAK_PG_URL="postgresql://me:hunter2@127.0.0.1:1/shop")
    assert done.returncode == 1
    assert "error: Postgres at postgresql://me@127.0.0.1:1/shop cannot be reached: Connection refused.\n" in done.stderr
    assert "hint: " in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_where_it_happened_and_still_no_password(worker: Worker) -> None:
    done = worker("--debug", "status", MODAK_PG_URL="postgresql://me:hunter2@127.0.0.1:1/shop")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_a_fault_of_ours_is_one_line_and_a_way_to_see_more(modak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("password=hunter2 is odd")

    monkeypatch.setattr("modak.config.explain", broken)
    done = modak("config")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[0] == "error: RuntimeError: password=*** is odd"
    assert "--debug" in done.stderr
    debugged = modak("--debug", "config")
    assert "Traceback" in debugged.stderr
    assert "hunter2" not in debugged.stderr


def test_ctrl_c_ends_a_command_with_130(modak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("modak.config.explain", interrupted)
    done = modak("config")
    assert (done.exit_code, done.output) == (130, "")


def test_a_connection_that_breaks_is_not_taken_for_a_closed_terminal(
    modak: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("modak.config.explain", broken)
    done = modak("config")
    assert done.exit_code == 1
    assert "connection was closed" in done.stderr


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_shows_frames_and_colour_unless_it_wants_none(environ: dict[str, str], coloured: bool) -> None:
    shown = _in_terminal([program(), "--help"], {**os.environ, "TERM": "xterm-256color", **environ})
    assert "╭" in shown
    assert "modak-worker run --demo" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)) is coloured


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_errors_are_red_in_a_terminal_unless_it_wants_no_colour(environ: dict[str, str], coloured: bool) -> None:
    nowhere = {"MODAK_PG_URL": "postgresql://me@127.0.0.1:1/shop", "TERM": "xterm-256color"}
    shown = _in_terminal([program(), "status"], {**os.environ, **nowhere, **environ})
    assert ("\x1b[31merror:" in shown) is coloured
    assert "error:" in shown


def test_importing_the_program_loads_no_heavy_library() -> None:
    code = (
        "import sys, modak.cli.main; "
        "heavy = {'pyspark', 'pyarrow', 'psycopg', 'pydantic', 'duckdb', 'structlog', 'rich', 'obstore'}; "
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [os.path.join(os.path.dirname(program()), "python"), "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


SHORT = [
    ("status",),
    ("profile", "list"),
    ("policy", "--table", "public.t"),
    ("maintain", "--table", "public.t"),
    ("unregister", "--table", "public.t"),
    ("--help",),
]


@pytest.mark.parametrize("command", SHORT, ids=" ".join)
def test_a_short_command_loads_nothing_that_moves_data_and_connects_once(
    fresh_database: Dsn, command: tuple[str, ...], tmp_path: Path
) -> None:
    code = (
        "import sys, json, psycopg.connection as at\n"
        "opened, connect = [], at.Connection.connect\n"
        "at.Connection.connect = lambda *a, **k: (opened.append(1), connect(*a, **k))[1]\n"
        "import psycopg; psycopg.connect = at.Connection.connect\n"
        "from modak.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'pyspark', 'py4j', 'pyarrow', 'numpy', 'duckdb', 'obstore', 'fastapi', 'rich'}\n"
        "print(json.dumps([len(opened), sorted(heavy & sys.modules.keys())]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        env={**os.environ, "MODAK_PG_URL": fresh_database.uri(), "MODAK_WAREHOUSE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    opened, loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded == []
    assert opened == (0 if command == ("--help",) else 1), done.stderr


def test_only_the_command_that_is_asked_for_is_made() -> None:
    def made(*args: str) -> list[str]:
        return sorted(get_command(whole(args)).commands)  # type: ignore[attr-defined]

    assert made("status", "--json") == made("--debug", "status") == ["status"]
    assert made("profile", "list") == ["profile"]
    assert made() == made("--demo") == ["run"]
    everything = sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert made("--help") == made("stats") == everything


def _in_terminal(command: list[str], environ: dict[str, str]) -> str:
    import pty

    parent, child = pty.openpty()
    process = subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environ, close_fds=True)
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    process.wait(timeout=30)
    os.close(parent)
    return shown.decode()
