"""The lake belongs to everybody: Spark, PyIceberg by the SQL catalog and DuckDB by metadata file see the same rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from modak.core.names import TableName
from modak.runtime import demo
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.observe import sync
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from tests.tables import readers
from tests.tables.events import Events

pytestmark = pytest.mark.spark

PAGE = Path(__file__).parents[2] / "docs" / "reading.md"
MIXED = """
    CREATE TYPE public.mood AS ENUM ('sad', 'happy');
    CREATE TABLE public.mixed (
        id bigint, ts bigint, yes boolean, small smallint, medium integer, ratio real, exact double precision,
        price numeric(12, 2), loose numeric, word text, code varchar(8), padded char(4), raw bytea, key uuid, day date,
        at timestamp, moment timestamptz, clock time, zoned timetz, length interval, doc jsonb, feeling public.mood,
        words text[], numbers int[], PRIMARY KEY (id, ts)
    ) PARTITION BY RANGE (ts);
"""
VALUES = """
    (1, 1, true, -32768, -2147483648, 0.1, 0.1, -1234567890.12, 0.000000000000000001, 'ünï ''"\\ \t', 'abc', 'x ',
     '\\x00ff', '00000000-0000-0000-0000-000000000001', '1969-12-31', '1969-12-31 23:59:59.999999',
     '2024-02-29 12:00:00.000001+02', '24:00:00', '12:00:00.5+02', '1 year 2 days 03:04:05.6', '{"a": [1, null]}',
     'happy', '{a,NULL,"b c"}', '{}'),
    (2, 2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
     NULL, NULL, NULL, NULL),
    (3, 3, false, 32767, 2147483647, 'NaN', 'Infinity', 0, 12345678901234567890, '', '', '', '', gen_random_uuid(),
     '9999-12-31', '2024-01-01', '2024-01-01 00:00+00', '00:00:00', '00:00:00+00', '0', 'null', 'sad', '{}',
     '{1,NULL,-1}'),
    (9, 150, true, 0, 0, 0, 0, 0, 0, 'hot', '', '', '', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
     NULL)
"""


@pytest.fixture
def mixed(site: Site, leader: Leader) -> Events:
    table = Events(site, TableName("public", "mixed"))
    table.sql(MIXED)
    table.add_partition(0)
    table.add_partition(100)
    table.sql(f"INSERT INTO public.mixed VALUES {VALUES}")
    register(site, RegisterRequest(table.name, ("id",), "ts"))
    assert table.tier(leader).rows == 3
    return table


def test_three_engines_read_identical_rows(mixed: Events) -> None:
    spark = readers.by_spark(mixed.site, mixed.name)
    assert [row["id"] for row in spark] == [1, 2, 3]
    assert readers.by_pyiceberg(mixed.site, mixed.name) == spark
    assert readers.by_duckdb(mixed.site, mixed.name) == spark


def test_time_of_day_is_text_that_spark_can_open(mixed: Events) -> None:
    first = readers.by_spark(mixed.site, mixed.name)[0]
    assert (first["clock"], first["zoned"], first["length"]) == ("24:00:00", "12:00:00.5+02", "P1Y2DT3H4M5.6S")
    assert (first["padded"], first["feeling"], first["words"]) == ("x", "happy", ["a", None, "b c"])
    lake = mixed.site.lake.load(mixed.site.reader.state(mixed.name).table.lake)
    assert lake is not None
    types = {column.name: column.type for column in lake.schema}
    assert (types["small"], types["medium"], types["clock"], types["zoned"]) == ("int", "int", "string", "string")
    assert (types["price"], types["loose"], types["key"]) == ("decimal(12,2)", "decimal(38,18)", "uuid")
    assert lake.format_version == 3


def test_filters_find_the_same_rows_everywhere(mixed: Events) -> None:
    for condition in ("id = 3", "ts >= 2", "word IS NULL", "day < DATE '2000-01-01'"):
        spark = readers.by_spark(mixed.site, mixed.name, condition)
        assert spark, condition
        assert readers.by_duckdb(mixed.site, mixed.name, condition) == spark, condition
        assert readers.by_pyiceberg(mixed.site, mixed.name, condition.replace("DATE ", "")) == spark, condition


class Page:
    """The page's examples, told where this test's database and lake are."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)

    def code(self, language: str, part: str) -> str:
        (found,) = [text for kind, text in self.blocks if kind == language and part in text]
        dsn = self.site.dsn
        here = {
            "127.0.0.1:5432/modak": f"{dsn.host}:{dsn.port}/{dsn.dbname}",
            "file:///srv/modak/warehouse": self.site.settings.lake.warehouse,
            "//modak:{password}": f"//{dsn.user}:{{password}}",
            '"spark.sql.catalog.modak.jdbc.user", "modak"': f'"spark.sql.catalog.modak.jdbc.user", "{dsn.user}"',
        }
        for there, ours in here.items():
            found = found.replace(there, ours)
        return found


@pytest.fixture
def page(site: Site, leader: Leader) -> Page:
    """The page speaks about the demo's table."""
    with site.connect() as conn:
        demo.create(conn, rows=2_000)
    register(site, RegisterRequest(demo.TABLE, demo.PRIMARY_KEY, demo.TIER_KEY))
    assert Events(site, demo.TABLE).tier(leader).rows > 1_000
    return Page(site)


def test_every_example_of_the_page_is_executed() -> None:
    """Who adds an example to the page adds its test here."""
    kinds = [kind for kind, _ in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    across, alone = kinds[:8], kinds[8:]
    # No test runs Trino, and the shell commands are checked against the program with those of all pages.
    assert across == ["python", "sh", "sql", "sql", "sql", "python", "python", "trino"]
    assert alone == ["sql", "python", "python", "sql"]


def test_the_pages_examples_work(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    site = page.site
    cutline = site.reader.state(demo.TABLE).cutline
    with site.connect(autocommit=True) as conn:
        (shown,) = conn.execute(page.code("sql", "modak.status")).fetchall()
    assert shown == ("events", cutline.t, cutline.snapshot_id, cutline.metadata_location)
    (total,) = Events(site, demo.TABLE).sql(
        f"SELECT 2000 - count(*) FROM public.events WHERE occurred_at >= {cutline.t}"
    )

    names: dict[str, Any] = {"password": site.dsn.password, "cutline_s": cutline.snapshot_id}
    exec(page.code("python", "SparkSession"), names)
    assert "purchase" in capsys.readouterr().out
    assert (
        names["spark"].read.option("versionAsOf", cutline.snapshot_id).table("modak.modak.public.events").count()
        == total[0]
    )

    names = {"password": quote(site.dsn.password)}
    code = page.code("python", "SqlCatalog")
    last = code.strip().splitlines()[-1]
    exec(code.replace(last, f"found = {last}"), names)
    purchases = names["found"]
    assert purchases.column_names == ["id", "amount"]
    names["catalog"].close()

    (by_kind,) = (dict(rows) for rows in [_duckdb(page, cutline.metadata_location)])
    assert sum(by_kind.values()) == total[0]
    assert by_kind["purchase"] == purchases.num_rows


def _duckdb(page: Page, metadata_location: str) -> list[Any]:
    import duckdb

    code = page.code("sql", "iceberg_scan")
    code = re.sub(r"iceberg_scan\('[^']*'\)", f"iceberg_scan('{metadata_location}')", code)
    with duckdb.connect() as conn:
        readers.load_extensions(conn)
        return conn.execute(code.replace("INSTALL iceberg; LOAD iceberg;", "")).fetchall()


def test_the_pages_pin_keeps_its_files(page: Page) -> None:
    with page.site.connect() as conn:
        (pin,) = conn.execute(page.code("sql", "modak_read_begin(")).fetchall()
        conn.commit()
        assert page.site.reader.state(demo.TABLE).pins[0].pin_id == pin[0]
        end = page.code("sql", "modak_read_end(")
        assert conn.execute(end.replace(":pin_id", str(pin[0]))).fetchall() == [(True,)]


def test_the_pages_ways_across_the_seam_give_the_same_rows(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """Modak itself, DuckDB and PyIceberg, with a correction and a tombstone lying over the lake."""
    site = page.site
    state = site.reader.state(demo.TABLE)
    events = Events(site, demo.TABLE)
    (gone, changed) = site.spark.sql(
        "SELECT id, occurred_at FROM modak.modak.public.events ORDER BY id LIMIT 2"
    ).collect()
    table = state.table.table_id
    events.sql(f"SELECT modak.record_change({table}, '{gone[0]}', {gone[1]}, NULL, NULL)")
    image = f'{{"id": "{changed[0]}", "occurred_at": "{changed[1]}", "kind": "corrected"}}'
    events.sql(f"SELECT modak.record_change({table}, '{changed[0]}', {changed[1]}, NULL, '{image}')")

    expected = sorted(map(tuple, modak_read(site, ["id", "kind"]).collect()))
    assert len(expected) == 1_999
    assert (changed[0], "corrected") in expected
    url = f"postgresql://{site.dsn.user}:{quote(site.dsn.password)}@{site.dsn.host}:{site.dsn.port}/{site.dsn.dbname}"
    for way in ("duckdb.connect", "StaticTable"):
        names: dict[str, Any] = {"url": url}
        code = page.code("python", way).replace(
            'duck.execute("INSTALL iceberg; LOAD iceberg;")', "load_extensions(duck)"
        )
        names["load_extensions"] = readers.load_extensions
        exec(code, names)
        assert sorted(names["answer"]) == expected, way

    names = {"spark": site.spark}
    with pytest.MonkeyPatch.context() as environ:
        for name, value in _environment(site).items():
            environ.setenv(name, value)
        exec(page.code("python", "modak.snapshot"), names)
    assert names["total"] == 1_999
    assert names["recent"] == sum(1 for row in expected if row[0] > 1900)
    assert "purchase" in capsys.readouterr().out


CHANGES = (
    "RENAME COLUMN kind TO sort",
    "DROP COLUMN mark",
    "ADD COLUMN mark text DEFAULT 'fresh'",
    "RENAME COLUMN a TO spare",
    "RENAME COLUMN b TO a",
    "RENAME COLUMN spare TO b",
)
"""A rename, a name given to a new column, and two columns that swap their names."""


@pytest.fixture
def corrected(site: Site, leader: Leader) -> Page:
    """The page's table with other columns, which have changed between one correction and the next."""
    events = Events(site, demo.TABLE)
    events.sql(
        "CREATE TABLE public.events (id bigint, occurred_at bigint, kind text, mark text, a text, b text,"
        " PRIMARY KEY (id, occurred_at)) PARTITION BY RANGE (occurred_at)"
    )
    events.add_partition(0)
    events.add_partition(100)
    events.sql("INSERT INTO public.events SELECT i, i, 'row ' || i, 'mark', 'a', 'b' FROM generate_series(0, 120) i")
    register(site, RegisterRequest(demo.TABLE, ("id",), demo.TIER_KEY))
    assert events.tier(leader).rows == 100
    correct(events, '{"id": 1, "occurred_at": 1, "kind": "before", "mark": "old", "a": "A1", "b": "B1"}')
    events.sql("SELECT modak_delete('public.events', '2', 2)")
    for change in CHANGES:
        events.sql(f"ALTER TABLE public.events {change}")
    correct(events, '{"id": 3, "occurred_at": 3, "sort": "after", "mark": "new", "a": "A3", "b": "B3"}')
    correct(events, '{"id": 4, "occurred_at": 4, "sort": "after", "a": "A4", "b": "B4"}')
    return Page(site)


def correct(events: Events, image: str) -> None:
    assert events.sql(f"SELECT modak_upsert('public.events', '{image}')") == [("delta",)]


def by_the_page(page: Page, column: str) -> list[tuple[Any, ...]]:
    dsn = page.site.dsn
    code = page.code("python", "duckdb.connect").replace("kind", column)
    names: dict[str, Any] = {
        "url": f"postgresql://{dsn.user}:{quote(dsn.password)}@{dsn.host}:{dsn.port}/{dsn.dbname}",
        "load_extensions": readers.load_extensions,
    }
    exec(code.replace('duck.execute("INSTALL iceberg; LOAD iceberg;")', "load_extensions(duck)"), names)
    return sorted(names["answer"])


def test_another_engine_sees_columns_by_the_age_of_a_correction_as_modak_does(corrected: Page, leader: Leader) -> None:
    site = corrected.site
    for moment in ("before the lake follows", "after it"):
        for column in ("sort", "mark", "a", "b"):
            ours = sorted(map(tuple, modak_read(site, ["id", column]).collect()))
            assert len(ours) == 120
            assert by_the_page(corrected, column) == ours, (moment, column)
        if moment == "before the lake follows":
            assert fold(site, leader.epoch, demo.TABLE).rows == 4
            image = '{"id": 5, "occurred_at": 5, "sort": "later", "a": "A5", "b": "B5"}'
            correct(Events(site, demo.TABLE), image)
    found = {key: value for key, value in by_the_page(corrected, "sort") if key < 6}
    assert found == {0: "row 0", 1: "before", 3: "after", 4: "after", 5: "later"}
    assert [value for key, value in by_the_page(corrected, "mark") if key in (1, 3, 4)] == ["fresh", "new", "fresh"]


def test_a_pin_keeps_the_names_of_its_metadata_file_while_the_lake_follows(corrected: Page, leader: Leader) -> None:
    site = corrected.site
    with site.connect(autocommit=True) as conn:
        (taken,) = conn.execute(corrected.code("sql", "modak_read_begin(")).fetchall()
        columns = corrected.code("sql", "modak_read_columns(").replace(":pin_id", str(taken[0]))
        asked = f"SELECT * FROM ({taken[5]}) d ORDER BY version"
        before = conn.execute(columns).fetchall(), conn.execute(asked).fetchall()
        assert fold(site, leader.epoch, demo.TABLE).rows == 4
        assert (conn.execute(columns).fetchall(), conn.execute(asked).fetchall()) == before
        names, images = before
        assert names == [
            ("id", "id", None),
            ("occurred_at", "occurred_at", None),
            ("sort", "kind", None),
            ("b", "a", None),
            ("a", "b", None),
            ("mark", None, "fresh"),
        ]
        assert images[0][4] == {"id": "1", "occurred_at": "1", "sort": "before", "b": "A1", "a": "B1", "mark": "fresh"}
        assert images[1][1:5:3] == (2, None)
        (later,) = conn.execute(corrected.code("sql", "modak_read_begin(")).fetchall()
        columns = corrected.code("sql", "modak_read_columns(").replace(":pin_id", str(later[0]))
        assert [(name, lake) for name, lake, _ in conn.execute(columns)] == [(n, n) for n, _, _ in names]


def test_a_table_from_before_names_were_written_down_gets_them_with_its_next_pass(
    corrected: Page, leader: Leader
) -> None:
    site = corrected.site
    with site.connect(autocommit=True) as conn:
        (known,) = conn.execute("SELECT numbers, names FROM modak.lake_columns").fetchall()
        conn.execute("DELETE FROM modak.lake_columns")
        (taken,) = conn.execute(corrected.code("sql", "modak_read_begin(")).fetchall()
        sync(site, conn, site.writer(leader.epoch), demo.TABLE)
        assert conn.execute("SELECT numbers, names FROM modak.lake_columns").fetchall() == [known]
        columns = corrected.code("sql", "modak_read_columns(").replace(":pin_id", str(taken[0]))
        assert ("sort", "kind", None) in conn.execute(columns).fetchall()
        images = conn.execute(f"SELECT payload FROM ({taken[5]}) d WHERE pk = '1'").fetchall()
        assert images[0][0]["sort"] == "before"


def modak_read(site: Site, columns: list[str]) -> Any:
    import modak

    return modak.read(site.spark, "public.events", columns, settings=site.settings)


def _environment(site: Site) -> dict[str, str]:
    return {
        "MODAK_PG_URL": site.dsn.safe(),
        "MODAK_PG_PASSWORD": site.dsn.password,
        "MODAK_WAREHOUSE": site.settings.lake.warehouse,
        "MODAK_HOME": str(site.settings.home.path),
    }
