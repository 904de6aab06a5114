"""As whom a seam read enters Postgres: the worker itself, or a role with rights of its own.

A guest reads what its grants say and nothing else. The lake knows no grants, so a guest's rights on every table are
looked at before any part of it is read, and a table whose policies would show the guest only some rows is refused as a
whole. Partitions are then read through their table, because a grant on the table says nothing of its partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from modak.catalog.records import TableRecord
from modak.core.errors import ModakError, Refused
from modak.lake.types import quoted_identifier
from modak.postgres.connect import connect, translate
from modak.postgres.dsn import Dsn

_RIGHTS = """
SELECT c.oid, has_schema_privilege(c.relnamespace, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'),
       row_security_active(c.oid)
FROM pg_class c WHERE c.oid = ANY(%s)
"""
# By its number: the name of a table in a schema that is closed to the role would be an error.
_DELTA = """
SELECT has_schema_privilege(c.relnamespace, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'modak' AND c.relname = 'delta'
"""


@dataclass(frozen=True, slots=True)
class Access:
    """How the tasks of a read enter Postgres; one statement may take so long (0: as long as it needs)."""

    dsn: Dsn
    snapshot: str
    statement_millis: int = 0


@dataclass(frozen=True, slots=True)
class Reader:
    """Whose rights a read has, and how long one of its statements may take."""

    dsn: Dsn
    seconds: float | None = None
    guest: bool = False
    """A role other than the worker's."""

    @property
    def statement_millis(self) -> int:
        """The limit for Postgres, where 0 is none."""
        return 0 if self.seconds is None else max(1, round(self.seconds * 1000))

    def access(self, snapshot: str) -> Access:
        """The way in for tasks that join a snapshot."""
        return Access(self.dsn, snapshot, self.statement_millis)

    def connect(self) -> psycopg.Connection[Any]:
        """A connection on which nothing can be changed."""
        try:
            conn = connect(self.dsn, application="modak read")
        except ModakError as error:
            if not self.guest or error.code != "postgres.auth":
                raise
            raise ModakError(
                error.code, error.message, hint="Check MODAK_QUERY_PG_USER and MODAK_QUERY_PG_PASSWORD."
            ) from None
        conn.read_only = True
        return conn


def admit(reader: Reader, tables: Sequence[TableRecord]) -> None:
    """Refuse a guest who may not read one of the tables; its lake is then as closed as its heap."""
    if not reader.guest:
        return
    try:
        with reader.connect() as conn:
            found = conn.execute(_RIGHTS, ([table.relid for table in tables],)).fetchall()
            delta = conn.execute(_DELTA).fetchone()
    except psycopg.Error as error:
        raise translate(error) from error
    rights = {oid: (granted, hidden) for oid, granted, hidden in found}
    role = quoted_identifier(reader.dsn.user)
    for table in tables:
        # A table that is gone is told by whoever describes it.
        granted, hidden = rights.get(table.relid, (True, False))
        schema, name = quoted_identifier(table.name.schema), quoted_identifier(table.name.name)
        if not granted:
            raise Refused(
                "sql.not_granted",
                f"The role {reader.dsn.user} may not read {table.name}.",
                hint=f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {schema}.{name} TO {role};",
            )
        if hidden:
            raise Refused(
                "sql.row_security",
                f"Row level security hides rows of {table.name} from the role {reader.dsn.user}, and the lake has no"
                " such policies.",
                hint="Ask Postgres itself for this table, or let a role read it to which no policy applies.",
            )
    if tables and not (delta and delta[0]):
        raise Refused(
            "sql.not_granted",
            f"The role {reader.dsn.user} may not read modak.delta, where corrections of old rows wait.",
            hint=f"GRANT USAGE ON SCHEMA modak TO {role}; GRANT SELECT ON modak.delta TO {role};",
        )
