"""Rows out of Postgres as Arrow batches, inside a Spark task or in the driver.

COPY in binary form, read through ADBC. A stream owns its connection, joins the exported snapshot of the operation, and
gives back one batch at a time: memory is bounded by `batch_bytes`, never by the table. Row security is switched off in
the sense of Postgres: a policy that would hide rows makes the query fail instead.

What the server says before the first row the driver keeps to itself, so the server is asked again (`asked_again`). That
is the price of its version: the later ones end the whole process when a connection is lost, or are slow.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modak.core.errors import Conflict, ModakError
from modak.postgres.connect import (
    GUARDS,
    SESSION,
    by_state,
    connect,
    refused_at_the_door,
    session_sql,
    translate,
    with_defaults,
)
from modak.postgres.dsn import Dsn

if TYPE_CHECKING:
    import pyarrow as pa

UNEXPLAINED = "postgres.unexplained"
"""The code of what a session cannot ask again, as its statements may have moved something."""
_SNAPSHOT_ID = re.compile(r"[0-9A-Fa-f]+-[0-9A-Fa-f]+-[0-9]+")
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_NO_FIRST_ROW = "ReadHeader failed"
_LOST = ("server closed the connection", "terminating connection", "no connection to the server", "could not receive")


class ArrowStream:
    """An open query: `schema`, then batches. Use it in a `with`, or iterate to the end; both release the connection."""

    def __init__(self, dsn: Dsn, sql: str, snapshot: str | None, batch_bytes: int, statement_millis: int) -> None:
        self._dsn = dsn
        self._sql = sql
        self._snapshot = snapshot
        self._session = _session(statement_millis)
        self._ends = time.monotonic() + statement_millis / 1000 if statement_millis else math.inf
        self._connection: Any = None
        self._cursor: Any = None
        self._reader: Any = None
        try:
            self._open(batch_bytes)
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
                    if _NO_FIRST_ROW in str(error):
                        self.close()
                        if time.monotonic() >= self._ends:
                            # Asked again it would take as long once more.
                            raise by_state("57014", "canceling statement due to statement timeout") from None
                        raise _asked_again(self._dsn, self._sql, self._snapshot, self._session) from None
                    raise _while_reading(self._dsn, error) from None
                yield batch
                # Or it would still be here while the next one is fetched.
                del batch
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

    def _open(self, batch_bytes: int) -> None:
        from adbc_driver_manager import Error

        snapshot = self._snapshot
        if snapshot is not None and not _SNAPSHOT_ID.fullmatch(snapshot):
            raise ValueError(f"{snapshot!r} is not the id of an exported snapshot")
        self._connection = _connected(self._dsn)
        try:
            _run(self._connection, self._session.decode())
            _run(self._connection, _BEGIN)
            if snapshot is not None:
                self._join(snapshot)
            self._cursor = _cursor(self._connection, batch_bytes)
            self._cursor.execute(self._sql)
            self._reader = self._cursor.fetch_record_batch()
        except (Error, OSError) as error:
            raise _of_statement(self._dsn, error) from None

    def _join(self, snapshot: str) -> None:
        from adbc_driver_manager import Error

        try:
            _run(self._connection, _joining(snapshot))
        except Error as error:
            if getattr(error, "sqlstate", None) in ("22023", "42704"):
                raise Conflict(
                    "export.snapshot_lost",
                    f"The exported snapshot {snapshot} is gone.",
                    hint="The connection that held it has ended; the export starts again.",
                ) from None
            raise


class ArrowSession:
    """A connection that runs one statement after the other, each read to its end before the next.

    Every statement is a transaction of its own. Use it in a `with`, from one thread.
    """

    def __init__(self, dsn: Dsn) -> None:
        self._dsn = dsn
        self._connection: Any = _connected(dsn)
        try:
            self.values(_session(0).decode())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ArrowSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def values(self, sql: str) -> tuple[Any, ...]:
        """The first row of a statement."""
        from adbc_driver_manager import Error

        try:
            row: tuple[Any, ...] = _run(self._connection, sql)
        except (Error, OSError) as error:
            raise _of_statement(self._dsn, error) from None
        return row

    def batches(self, sql: str, batch_bytes: int) -> Iterator[pa.RecordBatch]:
        """The rows of a query, batch by batch."""
        from adbc_driver_manager import Error

        with _cursor(self._connection, batch_bytes) as cursor:
            try:
                cursor.execute(sql)
                reader = cursor.fetch_record_batch()
            except (Error, OSError) as error:
                raise _of_statement(self._dsn, error) from None
            while True:
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    return
                except (OSError, ValueError) as error:
                    raise _while_reading(self._dsn, error) from None
                yield batch

    def close(self) -> None:
        """End the connection."""
        part, self._connection = self._connection, None
        if part is not None:
            with contextlib.suppress(Exception):
                part.close()


def _connected(dsn: Dsn) -> Any:
    from adbc_driver_manager import Error
    from adbc_driver_postgresql import dbapi

    try:
        return dbapi.connect(with_defaults(dsn, "modak stream").uri(), autocommit=True)
    except Error as error:
        raise _at_the_door(dsn, error) from None


def _cursor(connection: Any, batch_bytes: int) -> Any:
    from adbc_driver_postgresql import StatementOptions

    cursor = connection.cursor()
    cursor.adbc_statement.set_options(**{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(batch_bytes)})
    return cursor


def _run(connection: Any, sql: str) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        # A result that is left unread keeps the connection in COPY mode.
        rows = cursor.fetchall() if cursor.description else ()
    return rows[0] if rows else ()


def stream(
    dsn: Dsn, sql: str, *, snapshot: str | None = None, batch_bytes: int = 16 << 20, statement_millis: int = 0
) -> ArrowStream:
    """Run a query under an exported snapshot and hand out its rows by batch; `statement_millis` 0 sets no limit."""
    return ArrowStream(dsn, sql, snapshot, batch_bytes, statement_millis)


def asked_again(dsn: Dsn, sql: str) -> ModakError:
    """Why a query ended before its first row: whoever asks again, up to that row, is told."""
    return _asked_again(dsn, sql, None, _session(0))


def _session(statement_millis: int) -> bytes:
    return session_sql({**SESSION, **GUARDS, "statement_timeout": str(statement_millis)})


def _asked_again(dsn: Dsn, sql: str, snapshot: str | None, session: bytes) -> ModakError:
    import psycopg

    copying = f"COPY ({sql}) TO STDOUT (FORMAT binary)".encode()
    try:
        with connect(dsn, autocommit=True, application="modak stream") as conn:
            conn.execute(session)
            conn.execute(_BEGIN)
            if snapshot is not None:
                conn.execute(_joining(snapshot).encode())
            with conn.cursor() as cursor, cursor.copy(copying) as rows:
                rows.read()
    except ModakError as error:
        return error
    except psycopg.Error as error:
        return translate(error)
    return by_state("08006", "the server ended a query before its first row")


def _joining(snapshot: str) -> str:
    return f"SET TRANSACTION SNAPSHOT '{snapshot}'"


def _at_the_door(dsn: Dsn, error: Exception) -> ModakError:
    return refused_at_the_door(dsn, _plain(error))


def _of_statement(dsn: Dsn, error: Exception) -> ModakError:
    state = getattr(error, "sqlstate", None)
    if state:
        return by_state(state, dsn.scrub(_plain(error)))
    return _while_reading(dsn, error)


def _while_reading(dsn: Dsn, error: Exception) -> ModakError:
    said = dsn.scrub(_plain(error))
    if _NO_FIRST_ROW in said:
        return ModakError(UNEXPLAINED, "Postgres ended a query before its first row.", hint="Its log says why.")
    # The driver gives text without SQLSTATE once rows flow.
    if any(sign in said for sign in _LOST):
        return by_state("08006", said)
    return ModakError("postgres.stream", f"Reading rows from Postgres failed: {said}.")


def _plain(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^(?:[A-Z_]+: )?(?:\[libpq\] )?(?:Failed to connect: )?", "", first.strip()).rstrip(". ")
