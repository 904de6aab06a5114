"""The password file that `run` writes for psql."""

from __future__ import annotations

import stat
from pathlib import Path

import psycopg

from modak.cli.passfile import write
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer


def test_psql_gets_in_with_the_file_and_nothing_else(server: EmbeddedServer, tmp_path: Path) -> None:
    dsn = server.dsn("postgres")
    path = write(tmp_path, dsn)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with psycopg.connect(dsn.safe(), passfile=str(path)) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_a_changed_port_or_open_file_is_put_right(tmp_path: Path) -> None:
    path = write(tmp_path, Dsn("127.0.0.1", 5000, "modak", "modak", r"a:b\c"))
    assert path.read_text() == "127.0.0.1:5000:*:modak:a\\:b\\\\c\n"
    path.chmod(0o644)
    write(tmp_path, Dsn("127.0.0.1", 5001, "modak", "modak", "x"))
    assert path.read_text() == "127.0.0.1:5001:*:modak:x\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["pgpass"]
