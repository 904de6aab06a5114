"""Lake values back to Postgres: every type goes in again as text and is the same value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from modak.lake.render import render_text
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.lake.every_type import COLUMNS, ROWS, TYPES_SQL, create_sql, differences, insert, mapped_columns, read_heap


@pytest.fixture(scope="module")
def conn(database: Dsn) -> Iterator[Any]:
    with connect(database, autocommit=True) as opened:
        opened.execute(TYPES_SQL)
        opened.execute(create_sql("every"))
        opened.execute(create_sql("again"))
        yield opened


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(rows=ROWS)
def test_a_row_of_the_lake_comes_back_as_the_same_row(rows: list[tuple[Any, ...]], conn: Any, database: Dsn) -> None:
    conn.execute("TRUNCATE every, again")
    insert(conn, "every", rows)
    mapped = mapped_columns(conn, "every")
    lake = read_heap(database, "every", mapped)

    texts = [
        [render_text(column, lake.column(at)[row]) for row in range(len(lake))] for at, column in enumerate(mapped)
    ]
    slots = ", ".join(f"%s::text::{kind}" for kind, _ in COLUMNS.values())
    with conn.cursor() as cursor:
        cursor.executemany(f"INSERT INTO again VALUES (%s, {slots})", list(zip(*texts, strict=True)))

    assert not differences(lake, read_heap(database, "again", mapped))
