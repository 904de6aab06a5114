"""SQL across the seam: what each table is asked for, and that the answer is that of one table at one moment."""

from __future__ import annotations

from typing import Any

import pytest

from modak.core.errors import ModakError, UsageError
from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.tables.seam.mentions import understand
from modak.tables.seam.pinned import Point
from modak.tables.seam.predicate import All, Compare, Null
from modak.tables.seam.query import Scan, query, scans, schemas_of
from modak.tables.site import Site
from tests.tables.events import Events, Row
from tests.tables.test_seam import correct

pytestmark = pytest.mark.spark
EVENTS, OTHER = TableName("public", "events"), TableName("side", "events")


@pytest.fixture
def tables(events: Events, leader: Leader) -> Events:
    """public.events with T at 200 and two corrections; side.events, never tiered."""
    events.register()
    assert events.tier(leader).rows == 200
    correct(events, 5, "corrected")
    correct(events, 6, None)
    events.sql("CREATE SCHEMA side")
    side = Events(events.site, OTHER)
    side.sql(
        "CREATE TABLE side.events (id bigint, ts bigint, label text, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts);"
        "CREATE TABLE side.events_0 PARTITION OF side.events FOR VALUES FROM (0) TO (100);"
        "INSERT INTO side.events VALUES (5, 5, 'five'), (6, 6, 'six'), (7, 7, NULL)"
    )
    side.register()
    return events


def ask(site: Site, text: str) -> list[Row]:
    with query(site, site.spark, text) as frame:
        return [tuple(row) for row in frame.collect()]


ANSWERS: list[tuple[str, list[Row]]] = [
    ("select count(*) from events", [(250,)]),
    ("SELECT count(*) FROM `public` . `events` WHERE ts >= 200;", [(51,)]),
    ("select events.body from public.events where events.id = 5", [("corrected",)]),
    ("select e.id from events tablesample (100 percent) e where body = 'row 6'", []),
    ("with events as (select * from public.events where id < 3) select count(*) from events", [(3,)]),
    ("with mine as (select id from events) select count(*) from mine a join mine b on a.id = b.id", [(250,)]),
    ("with events as (select 1 as one) select count(*) from public.events", [(250,)]),
    (
        "select a.body, b.label from public.events a join side.events b on a.id = b.id order by a.id",
        [("corrected", "five"), ("row 7", None)],
    ),
    ("select count(*) from events where id in (select id from side.events where label is not null)", [(1,)]),
    ("select (select max(ts) from events) - (select min(ts) from events) as span", [(250,)]),
    ("select x from (select id as x, body from events where body like 'corr%') where x > 1", [(5,)]),
    ("select count(*) from events where 1 = 0", [(0,)]),
    ("select 1 as one", [(1,)]),
    ("values (1, 'a')", [(1, "a")]),
    ("select '${env:PATH}' as written, body from events where id = 5", [("${env:PATH}", "corrected")]),
    ("select count(*) from (select * from events union all select * from side.events)", [(253,)]),
    (
        "select count(*) over w from events where id = 5 window w as (order by (select max(id) from side.events))",
        [(1,)],
    ),
    ("select col0.label from stack(1, table(side.events)) where col0.id = 5", [("five",)]),
    ("from events |> where id = 5 |> set body = (select max(label) from side.events) |> select body", [("six",)]),
    (
        "from events |> aggregate count(*) as n |> extend n + 1 as m |> drop n |> as x |> order by m |> limit 1",
        [(251,)],
    ),
    ("select * from (select id % 2 as two from events) pivot (count(*) for two in (0, 1))", [(125, 125)]),
    ("select v from (select 1 as a) unpivot (v for n in (a))", [(1,)]),
    ("select count(*) from (select /*+ repartition(2) */ * from events distribute by id sort by ts)", [(250,)]),
    (
        "select id from events e lateral view explode(array(1, 2)) x as y where id < 1 order by id limit 1 offset 1",
        [(0,)],
    ),
    (
        "select s.label from events e, lateral (select label from side.events s where s.id = e.id) s order by 1",
        [(None,), ("five",)],
    ),
    ("select count(*) from events group by cube(id > 9, ts > 9) having count(*) < 10", [(9,), (9,), (9,)]),
    ("with recursive r as (select 1 as n union all select n + 1 from r where n < 3) select max(n) from r", [(3,)]),
    ("select 1 except select 2 intersect select 3", [(1,)]),
    ("select id from range(2) order by id limit all", [(0,), (1,)]),
]


def test_queries_see_registered_tables_as_one(tables: Events) -> None:
    assert {text: ask(tables.site, text) for text, _ in ANSWERS} == dict(ANSWERS)


def test_a_query_needs_only_its_columns_and_pushes_its_filters(tables: Events) -> None:
    site = tables.site
    spark = site.spark

    def needs(text: str) -> set[Scan]:
        statement = understand(spark, text, {EVENTS: None, OTHER: None})
        point = Point(site, sorted(statement.views))
        try:
            return set(scans(spark, statement, schemas_of(point, statement)))
        finally:
            point.close()

    assert needs("select count(*) from events") == {Scan(EVENTS, frozenset(), None)}
    narrow = All((Null("ts", True), Compare("ts", ">=", 200), Compare("body", "=", "x"), Null("body", True)))
    (found,) = needs("select id from events where ts >= 200 and body = 'x'")
    assert found.columns == {"id", "ts", "body"}
    assert isinstance(found.predicate, All)
    assert set(_flat(found.predicate)) == set(narrow.parts)
    two = needs("select a.body from events a join side.events b on a.id = b.id where a.ts < 10")
    assert {scan.table: scan.columns for scan in two} == {EVENTS: {"id", "ts", "body"}, OTHER: {"id"}}
    assert len(needs("select * from events a where id = (select max(id) from events b where b.ts = a.ts)")) == 2


def _flat(predicate: Any) -> list[Any]:
    return [part for each in predicate.parts for part in (_flat(each) if isinstance(each, All) else [each])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("insert into events values (1, 1, 'x')", "INSERT is not a query"),
        ("drop table events", "DROP is not a query"),
        ("-- hello\nset spark.x = 1", "SET is not a query"),
        ("create view v as select * from events", "CREATE is not a query"),
        ("from events insert into other select *", "FROM is not a query"),
        ("insert overwrite directory '/tmp/x' using csv select 1", "INSERT is not a query"),
        ("call modak.system.rollback_to_snapshot('modak.public.events', 1)", "CALL is not a query"),
        ("execute immediate 'select 1'", "EXECUTE is not a query"),
        ("begin select 1; end", "BEGIN is not a query"),
        ("select * from events version as of 1", "not AS OF another time"),
        ("selec 1", "(?i)syntax error"),
    ],
)
def test_what_is_no_query_is_refused_by_name(spark: Any, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        understand(spark, text, {EVENTS: None})


def test_a_wrong_name_is_told_in_a_line(tables: Events) -> None:
    with pytest.raises(UsageError, match="`nothing` cannot be resolved"):
        ask(tables.site, "select nothing from events")
    with pytest.raises(UsageError, match="`nowhere` cannot be found"):
        ask(tables.site, "select * from nowhere")


def test_an_error_of_a_task_arrives_as_itself(tables: Events) -> None:
    with query(tables.site, tables.site.spark, "select sum(ts) from events where ts >= 200") as frame:
        pass
    with pytest.raises(ModakError, match="snapshot of this read has ended") as raised:
        frame.collect()
    assert raised.value.code == "seam.snapshot_ended"
