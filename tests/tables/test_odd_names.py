"""A table whose names need quoting everywhere goes the whole way: tiering, corrections, reads, SQL, verify, fold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import modak
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.fold.run import fold
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.seam.query import query
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from modak.tables.verify.run import verify
from tests.tables.conftest import settings_for
from tests.tables.events import Row

pytestmark = pytest.mark.spark

NAME = TableName('Mixed "Case', "Odd `Events")
HEAP = '"Mixed ""Case"."Odd `Events"'
COLUMNS = ['the "id"', "t.s", "a `tick`", "Blank space"]


@pytest.fixture
def site(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Site]:
    """Tiered partitions stay in the heap, so that verify has both sides."""
    settings = settings_for(fresh_database, warehouse, spark_home, MODAK_RECLAIM_LAG=str(2**62))
    with open_site(settings) as opened:
        _ = opened.spark
        yield opened


def run(site: Site, statement: str, *values: Any) -> None:
    with site.connect(autocommit=True) as conn:
        conn.execute(statement, values)  # type: ignore[arg-type]


def rows(frame: Any) -> list[Row]:
    return sorted(tuple(row) for row in frame.collect())


def test_names_with_quotes_ticks_dots_and_blanks_are_names_like_others(site: Site, leader: Leader) -> None:
    run(site, 'CREATE SCHEMA "Mixed ""Case"')
    run(
        site,
        f'CREATE TABLE {HEAP} ("the ""id""" bigint, "t.s" bigint, "a `tick`" text, "Blank space" int DEFAULT 7,'
        ' PRIMARY KEY ("the ""id""", "t.s")) PARTITION BY RANGE ("t.s")',
    )
    for lower in (0, 100, 200):
        leaf = f'"Mixed ""Case"."leaf ""{lower}"""'
        run(site, f"CREATE TABLE {leaf} PARTITION OF {HEAP} FOR VALUES FROM ({lower}) TO ({lower + 100})")
    run(site, f"INSERT INTO {HEAP} SELECT n, n, 'row ' || n, n FROM generate_series(0, 250) n")
    register(site, RegisterRequest(NAME, (COLUMNS[0],), COLUMNS[1]))
    assert tier(site, leader.epoch, NAME).rows == 200
    run(site, f"""UPDATE {HEAP} SET "a `tick`" = 'it''s "new"' WHERE "t.s" = 5""")
    run(site, f'DELETE FROM {HEAP} WHERE "t.s" = 6')
    image = dict(zip(COLUMNS, (1000, 7, "added", None), strict=True))
    run(site, "SELECT modak_upsert(%s, %s)", HEAP, json.dumps(image))

    def check() -> None:
        with modak.snapshot(site.spark, [str(NAME)], settings=site.settings) as now:
            assert now.read(str(NAME)).columns == COLUMNS
            assert now.read(str(NAME)).count() == 251
            few = now.read(str(NAME), [COLUMNS[2], COLUMNS[3]], "`t.s` BETWEEN 5 AND 7")
            assert {tuple(row) for row in few.collect()} == {('it\'s "new"', 5), ("added", None), ("row 7", 7)}
            assert rows(now.read(str(NAME), [COLUMNS[2]], "`a ``tick``` = 'row 250' AND `the \"id\"` > 3")) == [
                ("row 250",)
            ]
            assert rows(now.read(str(NAME), [COLUMNS[0]], "`Blank space` = 5")) == [(5,)]
        text = 'SELECT `a ``tick```, count(*) FROM `Mixed "Case`.`Odd ``Events` WHERE `t.s` < 8 GROUP BY 1 HAVING 1 = 1'
        with query(site, site.spark, text) as frame:
            assert {row[0] for row in frame.collect()} == {f"row {n}" for n in (0, 1, 2, 3, 4, 7)} | {
                'it\'s "new"',
                "added",
            }
        report = verify(site, NAME)
        assert report.sound, report
        assert report.compared_rows == 200

    check()
    assert fold(site, leader.epoch, NAME).rows == 3
    check()
