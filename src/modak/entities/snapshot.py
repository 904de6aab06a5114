"""The point in time of a flow: three tables under lock, one exported snapshot, and a connection that looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from modak.entities.store import EntityStore
from modak.entities.tables import Installed
from modak.postgres.connect import GUARDS, connect, session_sql, translate
from modak.postgres.snapshot import ExportSnapshot


@dataclass(frozen=True)
class Snapshot:
    """An exported snapshot while it is held."""

    held: ExportSnapshot
    conn: psycopg.Connection[Any]

    @property
    def id(self) -> str:
        """What tasks join it by."""
        return self.held.id

    def check(self) -> None:
        """Raise if it has not been held without a gap until now."""
        self.held.check()


@contextmanager
def holding(store: EntityStore, installed: Installed) -> Iterator[Snapshot]:
    """Hold one snapshot of the three tables for a block."""
    with ExportSnapshot(store.address.fresh(), installed.leaves) as held:
        conn = connect(store.address.fresh(), autocommit=True, application="modak entities")
        try:
            conn.execute(session_sql(GUARDS))
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(held.id)))
            yield Snapshot(held, conn)
        except psycopg.Error as error:
            raise translate(error) from error
        finally:
            conn.close()
