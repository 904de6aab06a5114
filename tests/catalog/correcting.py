"""Tables whose old rows have left the heap, and short ways to correct them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.catalog.build import Built, build, delta, scalar

Conn = psycopg.Connection[Any]

ODD_SESSION = (
    "SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'German, DMY'; SET IntervalStyle = 'sql_standard';"
    " SET extra_float_digits = -5; SET bytea_output = 'escape'; SET standard_conforming_strings = off;"
    " SET search_path = ''"
)


def run(conn: Conn, table: Built, statement: str, *params: Any) -> psycopg.Cursor[Any]:
    return conn.execute(sql.SQL(statement).format(table.ident), params)


def leave(conn: Conn, table: Built, *numbers: int, to: str = "dropped") -> None:
    """Take partitions through the states of tiering; the leaf itself is the test's."""
    steps = ("hot", "sealing", "tiering", "tiered", "dropped")
    for before, state in itertools.pairwise(steps[: steps.index(to) + 1]):
        conn.execute(
            "UPDATE modak.partitions SET state = %s WHERE table_id = %s AND leaf_oid = ANY (%s) AND state = %s",
            (state, table.table_id, [table.leaves[n] for n in numbers], before),
        )


def reclaimed(
    conn: Conn, columns: str = "id bigint, ts bigint, body text", *, drop: Sequence[int] = (0, 1), **how: Any
) -> Built:
    """A table with history from its first leaf on, whose leaves in `drop` are gone, without transparent writes."""
    table = build(conn, columns, **how)
    leave(conn, table, *drop)
    for number in drop:
        conn.execute(sql.SQL("DROP TABLE {}").format(table.leaf(number)))
    conn.execute(
        "UPDATE modak.cutline c SET t = (SELECT max(upper_bound) FROM modak.partitions p"
        " WHERE p.table_id = c.table_id AND p.state = 'dropped') WHERE table_id = %s",
        (table.table_id,),
    )
    return table


def upsert(conn: Conn, table: Built, **row: Any) -> str:
    return str(scalar(conn, "SELECT public.modak_upsert(%s, %s)", str(table.name), json.dumps(row)))


def bulk(conn: Conn, table: Built, rows: Any, function: str = "modak_upsert_rows") -> tuple[int, int]:
    found = conn.execute(
        f"SELECT heap, delta FROM public.{function}(%s, %s)".encode(), (str(table.name), json.dumps(rows))
    )
    return found.fetchone() or (0, 0)


def image(conn: Conn, table: Built, pk: str, key: int) -> dict[str, str | None]:
    found = delta(conn, table)[pk, key]
    assert found is not None
    return found


@contextmanager
def role(dsn: Dsn, name: str, grants: str, table: Built) -> Iterator[Conn]:
    """A session of somebody with nothing but the given rights on the table."""
    with connect(dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
        if grants:
            run(admin, table, f"GRANT {grants} ON {{}} TO {name}")
        try:
            with connect(dsn, autocommit=True) as conn:
                conn.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(name)))
                yield conn
        finally:
            admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))
