"""Rows out of Postgres as Arrow batches, inside a Spark task or in the driver.

COPY in binary form, read through ADBC. A stream owns its connection, joins the exported snapshot of the operation, and
gives back one batch at a time: memory is bounded by `batch_bytes`, never by the table. Row security is switched off in
the sense of Postgres: a policy that would hide rows makes the query fail instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modak.core.errors import Conflict, ModakError
from modak.postgres.connect import GUARDS, SESSION, by_state, refused_at_the_door, session_sql, with_defaults
from modak.postgres.dsn import Dsn

if TYPE_CHECKING:
    import pyarrow as pa

_SNAPSHOT_ID = re.compile(r"[0-9A-Fa-f]+-[0-9A-Fa-f]+-[0-9]+")
_LOST = ("server closed the connection", "terminating connection", "no connection to the server", "could not receive")


class ArrowStream:
    """An open query: `schema`, then batches. Use it in a `with`, or iterate to the end; both release the connection."""

    def __init__(self, dsn: Dsn, sql: str, snapshot: str | None, batch_bytes: int) -> None:
        self._dsn = dsn
        self._connection: Any = None
        self._cursor: Any = None
        self._reader: Any = None
        try:
            self._open(sql, snapshot, batch_bytes)
            self.schema: pa.Schema = self._reader.schema  # type: ignore[attr-defined]
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            while self._reader is not None:
                try:
                    batch = self._reader.read_next_batch()
                except StopIteration:
                    return
                except (OSError, ValueError) as error:
                    # What goes wrong after the first row comes as an Arrow error, of one kind or the other.
                    raise _while_reading(self._dsn, error) from None
                yield batch
        finally:
            self.close()

    def __enter__(self) -> ArrowStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Release reader, cursor and connection; an unfinished COPY is abandoned with its connection."""
        for name in ("_reader", "_cursor", "_connection"):
            part, self.__dict__[name] = self.__dict__.get(name), None
            if part is None:
                continue
            try:
                part.close()
            except Exception:  # noqa: S112 - the connection is given up; what it says about that helps nobody
                continue

    def _open(self, sql: str, snapshot: str | None, batch_bytes: int) -> None:
        from adbc_driver_manager import Error
        from adbc_driver_postgresql import StatementOptions, dbapi

        if snapshot is not None and not _SNAPSHOT_ID.fullmatch(snapshot):
            raise ValueError(f"{snapshot!r} is not the id of an exported snapshot")
        try:
            self._connection = dbapi.connect(with_defaults(self._dsn, "modak stream").uri(), autocommit=True)
        except Error as error:
            raise _at_the_door(self._dsn, error) from None
        try:
            self._run(session_sql({**SESSION, **GUARDS}).decode())
            self._run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if snapshot is not None:
                self._join(snapshot)
            self._cursor = self._connection.cursor()
            self._cursor.adbc_statement.set_options(**{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(batch_bytes)})
            self._cursor.execute(sql)
            self._reader = self._cursor.fetch_record_batch()
        except (Error, OSError) as error:
            raise _of_statement(self._dsn, error) from None

    def _run(self, sql: str) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            # A result that is left unread keeps the connection in COPY mode.
            if cursor.description:
                cursor.fetchall()

    def _join(self, snapshot: str) -> None:
        from adbc_driver_manager import Error

        try:
            self._run(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
        except Error as error:
            if getattr(error, "sqlstate", None) in ("22023", "42704"):
                raise Conflict(
                    "export.snapshot_lost",
                    f"The exported snapshot {snapshot} is gone.",
                    hint="The connection that held it has ended; the export starts again.",
                ) from None
            raise


def stream(dsn: Dsn, sql: str, *, snapshot: str | None = None, batch_bytes: int = 16 << 20) -> ArrowStream:
    """Run a query under an exported snapshot and hand out its rows batch by batch."""
    return ArrowStream(dsn, sql, snapshot, batch_bytes)


def _at_the_door(dsn: Dsn, error: Exception) -> ModakError:
    return refused_at_the_door(dsn, _plain(error))


def _of_statement(dsn: Dsn, error: Exception) -> ModakError:
    state = getattr(error, "sqlstate", None)
    if state:
        return by_state(state, dsn.scrub(_plain(error)))
    return _while_reading(dsn, error)


def _while_reading(dsn: Dsn, error: Exception) -> ModakError:
    said = dsn.scrub(_plain(error))
    # The driver gives text without SQLSTATE once rows flow.
    if any(sign in said for sign in _LOST):
        return by_state("08006", said)
    return ModakError("postgres.stream", f"Reading rows from Postgres failed: {said}.")


def _plain(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^(?:[A-Z_]+: )?(?:\[libpq\] )?(?:Failed to connect: )?", "", first.strip()).rstrip(". ")
