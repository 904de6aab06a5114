"""Every kind of tier key, and bounds that do not fit the lake's buckets: nothing is lost to pruning."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from modak.core.names import TableName
from modak.lake.model import Layout
from modak.runtime.leader import Leader
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from tests.support.sample import sample
from tests.tables import readers
from tests.tables.events import Events

pytestmark = pytest.mark.spark


@dataclass(frozen=True)
class Case:
    """Bounds, and the tier keys of the rows; all but the last partition are tiered."""

    kind: str
    bounds: tuple[str, ...]
    keys: tuple[str, ...]
    layout: Layout
    width: str
    files: int
    filters: tuple[str, ...] = field(default=())


CASES = {
    "date by week": Case(
        "date",
        ("2024-02-26", "2024-03-04", "2024-03-11"),
        ("2024-02-26", "2024-02-29", "2024-03-01", "2024-03-03", "2024-03-05"),
        Layout("day", None, "mark"),
        "7d",
        4,
        ("mark = DATE '2024-02-29'", "mark > DATE '2024-02-29' AND mark < DATE '2024-03-02'"),
    ),
    "date before 1970": Case(
        "date",
        ("1969-12-01", "1970-01-01", "1970-02-01"),
        ("1969-12-01", "1969-12-31", "1970-01-01"),
        Layout("month", None, "mark"),
        "1 month",
        1,
        ("mark = DATE '1969-12-31'",),
    ),
    "timestamp by the hour": Case(
        "timestamp",
        ("1969-12-31 22:00", "1969-12-31 23:00", "1970-01-01 00:00", "1970-01-01 01:00"),
        ("1969-12-31 22:00:00", "1969-12-31 22:59:59.999999", "1969-12-31 23:30:00.5", "1970-01-01 00:30:00"),
        Layout("hour", None, "mark"),
        "1h",
        2,
        ("mark >= TIMESTAMP '1969-12-31 22:59:59' AND mark < TIMESTAMP '1969-12-31 23:00:00'",),
    ),
    "timestamptz by the day": Case(
        "timestamptz",
        ("2024-01-01 00:00+00", "2024-01-02 00:00+00", "2024-01-03 00:00+00"),
        ("2024-01-01 00:00:00+00", "2024-01-01 23:59:59.999999+00", "2024-01-02 00:00:00+00"),
        Layout("day", None, "mark"),
        "1d",
        1,
        ("mark >= TIMESTAMP '2024-01-01 23:00:00 UTC'",),
    ),
    "timestamptz by days of Kolkata": Case(
        "timestamptz",
        ("2024-01-01 00:00+05:30", "2024-01-02 00:00+05:30", "2024-01-03 00:00+05:30"),
        ("2023-12-31 18:30:00+00", "2023-12-31 23:59:59+00", "2024-01-01 00:00:00+00", "2024-01-01 18:30:00+00"),
        Layout("day", None, "mark"),
        "1d",
        2,
        ("mark < TIMESTAMP '2024-01-01 00:00:00 UTC'", "mark >= TIMESTAMP '2024-01-01 00:00:00 UTC'"),
    ),
    "timestamptz by the month": Case(
        "timestamptz",
        ("2024-01-01 00:00+00", "2024-02-01 00:00+00", "2024-03-01 00:00+00", "2024-04-01 00:00+00"),
        ("2024-01-01 00:00:00+00", "2024-02-29 12:00:00+00", "2024-02-01 00:00:00+00", "2024-03-01 00:00:00+00"),
        Layout("month", None, "mark"),
        "1 month",
        2,
        ("mark >= TIMESTAMP '2024-02-01 00:00:00 UTC'",),
    ),
    "negative integers": Case(
        "integer",
        ("-300", "-200", "-100", "0", "100"),
        ("-300", "-201", "-200", "-101", "-100", "-1", "0"),
        Layout("truncate", 100, "mark"),
        "100",
        3,
        ("mark = -201", "mark = -200", "mark BETWEEN -101 AND -100", "mark = -1"),
    ),
    "smallint": Case(
        "smallint",
        ("-32768", "0", "1000"),
        ("-32768", "-1", "0"),
        Layout("truncate", 32768, "mark"),
        "32768",
        1,
        ("mark = -32768",),
    ),
    "bounds beside the buckets": Case(
        "bigint",
        ("50", "150", "250", "350"),
        ("50", "99", "100", "149", "150", "199", "200", "249", "250"),
        Layout("truncate", 100, "mark"),
        "100",
        4,
        ("mark = 99", "mark = 100", "mark = 149", "mark = 150", "mark >= 199 AND mark <= 200"),
    ),
    "wider than truncate can be": Case(
        "bigint",
        ("0", "10000000000", "20000000000", "30000000000"),
        ("0", "9999999999", "10000000000", "19999999999", "20000000000"),
        Layout(None, None, "mark"),
        "10000000000",
        2,
        ("mark = 9999999999", "mark >= 10000000000"),
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every case; the everyday run takes a sample."""
    sample(metafunc, "title", CASES, 4)


def test_rows_land_in_the_right_bucket_whatever_the_tier_key(site: Site, leader: Leader, title: str) -> None:
    case = CASES[title]
    table = Events(site, TableName("public", "aged"))
    table.sql(
        f"CREATE TABLE public.aged (id bigint, mark {case.kind}, PRIMARY KEY (id, mark)) PARTITION BY RANGE (mark)"
    )
    for n, (low, high) in enumerate(zip(case.bounds, case.bounds[1:], strict=False)):
        table.sql(f"CREATE TABLE public.aged_{n} PARTITION OF public.aged FOR VALUES FROM ('{low}') TO ('{high}')")
    for n, key in enumerate(case.keys):
        table.sql(f"INSERT INTO public.aged VALUES ({n}, '{key}')")
    heap = {row[0]: row[1] for row in table.sql(f"SELECT id, mark FROM public.aged WHERE mark < '{case.bounds[-2]}'")}
    registered = register(site, RegisterRequest(table.name, ("id",), "mark"))
    report = table.tier(leader)
    assert registered.width == case.width
    assert report.rows == len(heap)
    assert report.files == case.files
    assert len(report.dropped) == len(case.bounds) - 2
    lake = site.lake.load(site.reader.state(table.name).table.lake)
    assert lake is not None
    assert lake.layout == case.layout
    wanted = [{"id": key, "mark": value} for key, value in sorted(heap.items())]
    spark = readers.by_spark(site, table.name)
    assert [row["id"] for row in spark] == sorted(heap)
    assert readers.by_pyiceberg(site, table.name) == readers.by_duckdb(site, table.name) == wanted
    everything = site.spark.sql("SELECT * FROM modak.modak.public.aged").localCheckpoint()
    everything.createOrReplaceTempView("aged_rows")
    for condition in case.filters:
        # The checkpoint holds rows, not files: there is nothing to prune.
        wanted_ids = {row.id for row in site.spark.sql(f"SELECT id FROM aged_rows WHERE {condition}").collect()}
        assert wanted_ids, condition
        assert {row["id"] for row in readers.by_spark(site, table.name, condition)} == wanted_ids
        spoken = condition.replace("TIMESTAMP '", f"{case.kind} '").replace(" UTC'", "+00'")
        assert {row["id"] for row in readers.by_duckdb(site, table.name, spoken)} == wanted_ids
