"""Brings schema `modak` to the version that this worker knows, and refuses to work with any other.

Migrations are numbered SQL files, applied in order, each in a transaction of its own under one advisory lock, and never
changed afterwards: `modak.schema_meta` holds the checksum of every file applied. There is no way back; a catalog newer
than the worker is refused, because an older worker would not know what it must keep intact. Nothing here needs more
than the ownership of the database.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, LiteralString

import psycopg
import structlog
from psycopg import errors

from modak import __version__
from modak.core.clock import Clock, SystemClock
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.postgres.connect import translate

Conn = psycopg.Connection[Any]

_LOG = structlog.get_logger()
_OLDEST_SERVER = 140_000
_LOCK = 5570746397223387135
"""Advisory lock key of migrations, next to the keys of pins (`modak.pin_lock_key`)."""
_PATIENCE_SECONDS, _PAUSE_SECONDS = 30.0, 0.5

_FOUNDATION: LiteralString = """
    CREATE SCHEMA IF NOT EXISTS modak;
    CREATE TABLE IF NOT EXISTS modak.schema_meta (
        version integer PRIMARY KEY,
        name text NOT NULL,
        checksum text NOT NULL,
        worker text NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered file."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """What `schema_meta` remembers of the file."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@cache
def known() -> tuple[Migration, ...]:
    """The migrations that come with this worker, in order."""
    found = []
    for file in resources.files("modak.catalog").joinpath("migrations").iterdir():
        stem, dot, kind = file.name.rpartition(".")
        if dot and kind == "sql":
            found.append(Migration(int(stem.partition("_")[0]), stem, file.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda migration: migration.version))


def migrate(conn: Conn, migrations: Sequence[Migration] | None = None, clock: Clock | None = None) -> list[str]:
    """Apply what is missing and say what was applied; safe to run from many workers at once."""
    if conn.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
        raise ModakError("catalog.in_transaction", "Migrations need a connection without an open transaction.")
    if conn.info.server_version < _OLDEST_SERVER:
        raise Refused("postgres.too_old", f"Postgres {conn.info.server_version // 10_000} is too old.", hint="Use 14+.")
    wanted = known() if migrations is None else tuple(migrations)
    applied: list[str] = []
    try:
        while (name := _apply_patiently(conn, wanted, clock or SystemClock())) is not None:
            applied.append(name)
            _LOG.info("catalog.migrated", migration=name)
    except psycopg.Error as error:
        raise translate(error) from error
    return applied


def check(conn: Conn, migrations: Sequence[Migration] | None = None) -> None:
    """Refuse a catalog that this worker does not fit; changes nothing."""
    wanted = known() if migrations is None else tuple(migrations)
    try:
        with conn.transaction():
            found = conn.execute("SELECT to_regclass('modak.schema_meta') IS NOT NULL").fetchone()
            behind = _pending(_applied(conn), wanted) if found and found[0] else wanted
    except psycopg.Error as error:
        raise translate(error) from error
    if behind:
        raise Refused(
            "catalog.older",
            f"The catalog lacks {len(behind)} of {len(wanted)} migrations.",
            hint="Start the worker once (modak-worker run), or register a table: both migrate the catalog.",
        )


def _apply_patiently(conn: Conn, wanted: Sequence[Migration], clock: Clock) -> str | None:
    """Between two tries everybody who has queued behind the lock of a migration goes on."""
    until = clock.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return _apply_next(conn, wanted)
        except (errors.LockNotAvailable, errors.DeadlockDetected) as busy:
            if clock.monotonic() >= until:
                raise
            _LOG.info("catalog.migration_deferred", because=busy.diag.message_primary)
            clock.sleep(_PAUSE_SECONDS)


def _apply_next(conn: Conn, wanted: Sequence[Migration]) -> str | None:
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        # A leader of the version before may be at work: who waits for a lock makes its readers and writers wait too.
        conn.execute("SET LOCAL lock_timeout = '200ms'")
        found = conn.execute("SELECT to_regclass('modak.schema_meta') IS NOT NULL").fetchone()
        if not (found and found[0]):
            conn.execute(_FOUNDATION)
        behind = _pending(_applied(conn), wanted)
        if not behind:
            return None
        migration = behind[0]
        reach("catalog.before_migration")
        # A new function may look at tables that the same file makes further down, and at the text of the session.
        conn.execute("SET LOCAL check_function_bodies = off; SET LOCAL standard_conforming_strings = on")
        conn.execute(migration.text.encode())
        conn.execute(
            "INSERT INTO modak.schema_meta (version, name, checksum, worker) VALUES (%s, %s, %s, %s)",
            (migration.version, migration.name, migration.checksum, __version__),
        )
    reach("catalog.after_migration")
    return migration.name


def _applied(conn: Conn) -> dict[int, tuple[str, str]]:
    rows = conn.execute("SELECT version, name, checksum FROM modak.schema_meta ORDER BY version").fetchall()
    return {version: (name, checksum) for version, name, checksum in rows}


def _pending(applied: dict[int, tuple[str, str]], wanted: Sequence[Migration]) -> tuple[Migration, ...]:
    ours = {migration.version: migration for migration in wanted}
    for version, (name, checksum) in applied.items():
        if version not in ours:
            raise Refused(
                "catalog.newer",
                f"The catalog is newer than this worker {__version__}: it has {name}.",
                hint="Upgrade the worker.",
            )
        if ours[version].checksum != checksum:
            raise Refused(
                "catalog.changed",
                f"Migration {ours[version].name} differs from the one that was applied to this catalog.",
                hint="Install an unchanged worker; an applied migration is never edited.",
            )
    return tuple(migration for migration in wanted if migration.version not in applied)
