"""SQL over HTTP: heap and lake as one, within limits, and nothing beyond the tables."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.web.app import create_app
from modak.runtime.web.context import Context
from modak.tables.seam import delta
from tests.runtime.conftest import Here, led
from tests.runtime.hosted import until
from tests.spark_fixtures import QUICK_JAVA
from tests.tables.conftest import settings_for
from tests.tables.events import Events

pytestmark = [pytest.mark.spark]


@pytest.fixture(scope="module")
def events(
    database: Dsn, spark: object, spark_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Events]:
    """A table that lies on both sides and has corrections; nobody here changes it."""
    quick = {"MODAK_SPARK_CONF_spark_driver_extraJavaOptions": QUICK_JAVA["spark.driver.extraJavaOptions"]}
    settings = settings_for(database, str(tmp_path_factory.mktemp("warehouse")), spark_home, **quick)
    with open_site(settings) as site:
        _ = site.spark
        made = Events.create(site)
        made.register()
        with Leader.campaign(site, 5) as leader:
            made.tier(leader)
        made.sql("INSERT INTO public.events VALUES (7, 7, 'late'), (500, 240, NULL)")
        yield made


@pytest.fixture(scope="module")
def context(events: Events) -> Iterator[Context]:
    """One server for the module, so that its children stay warm."""
    context = led(events.site)
    yield context
    context.queries.close()


@pytest.fixture(scope="module")
def asked(context: Context) -> Iterator[Any]:
    with TestClient(create_app(context), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:

        def ask(sql: str, path: str = "query", **more: Any) -> Any:
            return client.post(f"/api/v1/{path}", json={"sql": sql, **more})

        yield ask


def test_queries_see_one_table_with_exact_values_and_limits(asked: Any) -> None:
    answer = asked("SELECT count(*) AS n, max(id) AS top FROM events;").json()
    assert answer["rows"] == [["252", "500"]]
    assert answer["columns"] == [{"name": "n", "type": "bigint"}, {"name": "top", "type": "bigint"}]
    some = asked("SELECT id, body FROM public.events ORDER BY id DESC", max_rows=2).json()
    assert some["rows"] == [["500", None], ["250", "row 250"]]
    assert some["truncated"] is True
    assert asked("SELECT body FROM events WHERE id = 7").json()["rows"] == [["late"]]


def test_the_plan_tells_which_tier_is_read(asked: Any) -> None:
    told = asked("SELECT body FROM events WHERE ts < 50", "explain").json()
    [scan] = told["scans"]
    assert scan["table"] == "public.events"
    assert (scan["heap"]["from"], scan["lake"]["below"]) == ("200", "200")
    assert told["postgres"] is not None, "Postgres understands this statement too"
    assert asked("SELECT 1", "explain").json()["scans"] == []


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("DROP TABLE events", "sql.not_a_query"),
        ("SET spark.sql.ansi.enabled=false", "sql.not_a_query"),
        ("INSERT INTO events SELECT * FROM events", "sql.not_a_query"),
        ("SELECT * FROM nothing", "sql.no_such_table"),
        ("SELECT FROM WHERE", "sql.wrong"),
        ("SELECT reflect('java.lang.System', 'getProperty', 'user.home')", "sql.not_allowed"),
        ("SELECT * FROM (SELECT java_method('java.lang.Thread', 'activeCount'))", "sql.not_allowed"),
        ("WITH x AS (SELECT try_reflect('java.lang.System', 'exit', 1)) SELECT * FROM x", "sql.not_allowed"),
        ("SELECT (SELECT max(reflect('java.lang.System', 'nanoTime')) FROM events)", "sql.not_allowed"),
        ("SELECT max(1) OVER w WINDOW w AS (ORDER BY reflect('java.lang.System', 'nanoTime'))", "sql.not_allowed"),
        ("FROM events |> SET body = reflect('java.lang.System', 'nanoTime')", "sql.not_allowed"),
        ("SELECT * FROM stack(1, TABLE(SELECT reflect('java.lang.System', 'nanoTime')))", "sql.not_allowed"),
        ("CALL modak.system.rollback_to_snapshot('modak.public.events', 1)", "sql.not_a_query"),
        ("BEGIN SELECT 1; END", "sql.not_a_query"),
        ("SELECT TRANSFORM(id) USING 'cat' AS (x) FROM events", "sql.not_allowed"),
        ("SELECT * FROM other.some.thing", "sql.not_allowed"),
        ("SELECT * FROM IDENTIFIER('other.some.thing')", "sql.not_allowed"),
        ("SELECT * FROM IDENTIFIER('other.' || 'some.thing')", "sql.not_allowed"),
        ("SELECT IDENTIFIER('reflect')('java.lang.System', 'getProperty', 'user.home')", "sql.not_allowed"),
        ("SELECT IDENTIFIER('ref' || 'lect')('java.lang.System', 'getProperty', 'user.home')", "sql.not_allowed"),
        (
            "EXECUTE IMMEDIATE 'SELECT reflect(\\'java.lang.System\\', \\'getProperty\\', \\'user.home\\')'",
            "sql.not_allowed",
        ),
        ("EXECUTE IMMEDIATE 'SELECT * FROM events'", "sql.not_allowed"),
        ("SELECT from_xml('<a/>', 'a INT', map('rowValidationXSDPath', 'file:///etc/passwd'))", "sql.not_allowed"),
        ("SELECT count(FROM_XML(body, 'a INT')) FROM events", "sql.not_allowed"),
        ("SELECT schema_of_xml('<a/>', map('rowValidationXSDPath', 'http://127.0.0.1/x'))", "sql.not_allowed"),
        ("SELECT from_avro(x'00', '{}', map('avroSchemaUrl', 'file:///etc/passwd'))", "sql.not_allowed"),
        ("SELECT system.builtin.to_avro(1, '{}')", "sql.not_allowed"),
        ("SELECT schema_of_avro('{}', map('avroSchemaUrl', 'file:///etc/passwd'))", "sql.not_allowed"),
        ("SELECT from_protobuf(x'00', 'A', '/etc/passwd')", "sql.not_allowed"),
        ("SELECT to_protobuf(struct(1), 'A', '/etc/passwd')", "sql.not_allowed"),
        ("SELECT * FROM text.`/etc/hostname`", "sql.no_such_table"),
        ("   ", "sql.wrong"),
        ("SELECT 1\0", "sql.wrong"),
    ],
)
def test_what_is_no_query_or_reaches_further_is_refused(asked: Any, sql: str, code: str) -> None:
    for path in ("query", "explain"):
        answer = asked(sql, path)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == code
    assert "localhost" not in answer.text


@pytest.mark.parametrize("where", ["", "LOCAL "])
@pytest.mark.parametrize("first", ["", "WITH x AS (SELECT 1) "])
def test_a_query_writes_no_files(asked: Any, tmp_path: Path, first: str, where: str) -> None:
    for path in ("query", "explain"):
        answer = asked(f"{first}INSERT OVERWRITE {where}DIRECTORY '{tmp_path}/out' USING csv SELECT 'x'", path)
        assert answer.json()["error"]["code"] == "sql.not_a_query"
    assert not (tmp_path / "out").exists()


def test_no_text_shows_what_the_process_was_told(asked: Any) -> None:
    text = "${env:PATH} ${system:user.home} ${spark.app.name}"
    answer = asked(f"SELECT '{text}' AS it").json()
    assert answer["rows"] == [[text]]
    # Nor does a name that is put together by the parser hide another one.
    assert asked("SELECT * FROM ${spark.nothing:-events}").json()["error"]["code"] == "sql.wrong"


def test_older_states_of_the_lake_go_by_its_own_names(asked: Any, events: Events) -> None:
    snapshot = events.site.reader.state(events.name).cutline.snapshot_id
    text = f"SELECT count(*) FROM modak.modak.public.events VERSION AS OF {snapshot}"
    assert asked(text).json()["rows"] == [["200"]]
    refused = asked(f"SELECT count(*) FROM events VERSION AS OF {snapshot}").json()["error"]
    assert refused["code"] == "sql.time_travel"


def test_a_statement_of_postgres_ends_once_when_its_time_is_over(
    asked: Any, context: Context, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "queries", Here.of(events.site))
    condition = delta.delta_condition
    monkeypatch.setattr(delta, "delta_condition", lambda *given: f"{condition(*given)} AND pg_sleep(60) IS NOT NULL")
    monkeypatch.setattr("modak.postgres.arrow._asked_again", lambda *_: pytest.fail("it was asked again"))
    answer = asked("SELECT * FROM events", timeout_seconds=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "sql.timeout")


def test_a_query_that_takes_too_long_is_ended(asked: Any) -> None:
    answer = asked("SELECT count(*) FROM range(1000000000000) a WHERE sqrt(a.id) > 3.5", timeout_seconds=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "sql.timeout")
    assert asked("SELECT 1").json()["rows"] == [["1"]]


def test_queries_at_the_same_time_do_not_meet_and_too_many_are_told_so(asked: Any) -> None:
    answers: list[Any] = []

    def one(number: int) -> None:
        answers.append((number, asked(f"SELECT {number}, count(*) FROM events WHERE id >= {number}").json()))

    threads = [threading.Thread(target=one, args=(number,)) for number in (0, 100, 200, 240)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, answer in answers:
        if "error" in answer:
            assert answer["error"]["code"] == "api.busy"
        else:
            assert answer["rows"] == [[str(number), str(252 - number)]]
    assert sum("rows" in answer for _, answer in answers) >= 2


def test_queries_leave_no_connections_to_postgres_behind(asked: Any, events: Events) -> None:
    for number in range(20):
        assert asked(f"SELECT count(*) FROM events WHERE ts >= {number}").json()["rows"] == [[str(252 - number)]]
    left = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = 'PostgreSQL JDBC Driver'"
    )
    # A session of Postgres ends a moment after its connection.
    until(lambda: events.sql(left) == [(0,)])
