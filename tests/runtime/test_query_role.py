"""SQL over HTTP as a role of its own: what Postgres grants is readable, heap and lake alike, and nothing else is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from starlette.testclient import TestClient

from modak.core.names import TableName
from modak.postgres.arrow import stream
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.postgres.embedded import EmbeddedServer
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.web.app import create_app
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.seam import delta
from modak.tables.seam.heap import heap_frame
from modak.tables.site import Site
from tests.runtime.conftest import Here, led
from tests.support.role import reader
from tests.tables.conftest import settings_for
from tests.tables.events import Events

pytestmark = [pytest.mark.spark, pytest.mark.superuser]

Ask = Callable[..., Any]


@pytest.fixture
def guest(server: EmbeddedServer, events: Events, leader: Leader) -> Dsn:
    """The role of the page; `public.events` is tiered up to 200 and has corrections, `public.secret` too."""
    events.register()
    events.tier(leader)
    events.sql("INSERT INTO public.events VALUES (7, 7, 'late'), (500, 240, NULL)")
    secret = Events.create(events.site, name="secret")
    secret.register()
    secret.tier(leader)
    secret.sql("INSERT INTO public.secret VALUES (7, 7, 'hidden')")
    return reader(server, events.site.dsn.dbname, "public.events")


@pytest.fixture
def opened(events: Events, warehouse: str, spark_home: Path) -> Iterator[Callable[..., Ask]]:
    """Asks a server whose queries are of a role; inside, they run in this process."""
    with ExitStack() as stack:

        def as_role(dsn: Dsn, inside: bool = True) -> Ask:
            who = {"MODAK_QUERY_PG_USER": dsn.user, "MODAK_QUERY_PG_PASSWORD": dsn.password}
            site = stack.enter_context(open_site(settings_for(events.site.dsn, warehouse, spark_home, **who)))
            site.use(events.site.spark)
            context = led(site)
            stack.callback(context.queries.close)
            if inside:
                context.queries = Here.of(site)
            client = stack.enter_context(TestClient(create_app(context), base_url="http://127.0.0.1"))

            def ask(sql: str, path: str = "query", **more: Any) -> Any:
                return client.post(f"/api/v1/{path}", json={"sql": sql, **more})

            return ask

        yield as_role


@pytest.fixture
def api(site: Site) -> Iterator[TestClient]:
    """The API whose queries are the worker's own, and run in this process."""
    context = led(site)
    context.queries = Here.of(site)
    with TestClient(create_app(context), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def ask(opened: Callable[..., Ask], guest: Dsn) -> Ask:
    return opened(guest)


def code_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("local", [True, False], ids=["small-delta", "large-delta"])
def test_the_role_of_the_page_reads_heap_lake_and_corrections(
    ask: Ask, events: Events, guest: Dsn, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not local:
        monkeypatch.setattr(delta, "LOCAL_ROWS", 0)
        monkeypatch.setattr(delta, "LOCAL_KEYS", 0)
    with connect(guest, autocommit=True) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("SELECT * FROM public.events_200")
    found = ask("SELECT id, ts, body FROM events").json()["rows"]
    expected = {(str(i), str(i), f"row {i}") for i in range(251) if i != 7}
    assert len(found) == 252
    assert set(map(tuple, found)) == expected | {("7", "7", "late"), ("500", "240", None)}
    assert ask("SELECT body FROM events WHERE id = 240 AND ts = 240").json()["rows"] == [["row 240"]]


def test_every_partition_is_read_once_through_its_table(
    ask: Ask, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.add_partition(300)
    events.add_partition(400)
    events.sql("INSERT INTO public.events SELECT i, i, repeat('x', 200) FROM generate_series(300, 499) AS i")
    monkeypatch.setattr("modak.tables.seam.heap.SPLIT_BYTES", 8192)
    told = ask("SELECT count(*), count(DISTINCT id), sum(ts) FROM events WHERE ts >= 200").json()["rows"]
    assert told == [["252", "252", str(sum(range(200, 251)) + 240 + sum(range(300, 500)))]]
    events.sql("CREATE TABLE public.events_rest PARTITION OF public.events DEFAULT")
    events.sql("INSERT INTO public.events VALUES (900, 900, 'far')")
    assert ask("SELECT count(*), max(ts) FROM events").json()["rows"] == [["453", "900"]]


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("RANGE (ts)", "FROM (MINVALUE) TO (100)", "FROM (100) TO (200)"),
        ("RANGE (ts)", "FROM (MINVALUE) TO (100) PARTITION BY HASH (id)", "FROM (100) TO (200)"),
        ("LIST (id)", "IN (1)", "IN (2)"),
    ],
)
def test_a_partition_that_comes_while_a_table_is_read_is_not_seen(
    ask: Ask, events: Events, guest: Dsn, how: str, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = "id bigint, ts bigint, PRIMARY KEY (id, ts)"
    events.sql(f"CREATE TABLE public.growing ({columns}) PARTITION BY {how}")
    events.sql(f"CREATE TABLE public.growing_0 PARTITION OF public.growing FOR VALUES {first}")
    if "HASH" in first:
        events.sql(
            "CREATE TABLE public.growing_00 PARTITION OF public.growing_0 FOR VALUES WITH (modulus 1, remainder 0)"
        )
    events.sql(f"CREATE TABLE public.coming ({columns})")
    events.sql("INSERT INTO public.growing VALUES (1, 1); INSERT INTO public.coming VALUES (2, 150)")
    register(events.site, RegisterRequest(TableName("public", "growing"), ("id", "ts"), "ts", mode="mirrored"))
    events.sql(f"GRANT SELECT ON public.growing TO {guest.user}")

    def attaching(*given: Any) -> Any:
        events.sql(f"ALTER TABLE public.growing ATTACH PARTITION public.coming FOR VALUES {second}")
        return heap_frame(*given)

    with monkeypatch.context() as patched:
        patched.setattr("modak.tables.seam.read.heap_frame", attaching)
        assert ask("SELECT id FROM growing").json()["rows"] == [["1"]]
    assert ask("SELECT id FROM growing ORDER BY id").json()["rows"] == [["1"], ["2"]]


SHAPES = {
    "plain": ("id bigint PRIMARY KEY, ts bigint NOT NULL", "", "", "i"),
    "hashed": (
        "id bigint PRIMARY KEY, ts bigint NOT NULL",
        "PARTITION BY HASH (id)",
        "FOR VALUES WITH (modulus 2, remainder 0); FOR VALUES WITH (modulus 2, remainder 1)",
        "i",
    ),
    "nested": (
        "id bigint, ts bigint, PRIMARY KEY (id, ts)",
        "PARTITION BY RANGE (ts)",
        "FOR VALUES FROM (0) TO (100) PARTITION BY HASH (id); FOR VALUES FROM (100) TO (MAXVALUE)",
        "i",
    ),
    "dated": (
        "id bigint, ts date, PRIMARY KEY (id, ts)",
        "PARTITION BY RANGE (ts)",
        "FOR VALUES FROM ('2024-01-01') TO ('2024-02-01'); FOR VALUES FROM ('2024-02-01') TO ('2025-01-01')",
        "date '2024-01-01' + i",
    ),
    "stamped": (
        "id bigint, ts timestamptz, PRIMARY KEY (id, ts)",
        "PARTITION BY RANGE (ts)",
        "FOR VALUES FROM ('2024-01-01+02') TO ('2024-02-01+02'); FOR VALUES FROM ('2024-02-01+02') TO ('2025-01-01Z')",
        "timestamptz '2024-01-01 00:00+02' + i * interval '1 day'",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_table_is_read_as_the_worker_reads_it(
    ask: Ask, api: TestClient, events: Events, guest: Dsn, name: str
) -> None:
    columns, how, partitions, key = SHAPES[name]
    events.sql(f"CREATE TABLE public.{name} ({columns}) {how}")
    for number, bounds in enumerate(filter(None, partitions.split(";"))):
        events.sql(f"CREATE TABLE public.{name}_{number} PARTITION OF public.{name} {bounds}")
    if name == "nested":
        events.sql(
            "CREATE TABLE public.nested_inner PARTITION OF public.nested_0 FOR VALUES WITH (modulus 1, remainder 0)"
        )
    events.sql(f"INSERT INTO public.{name} SELECT i, {key} FROM generate_series(0, 199) AS i")
    register(events.site, RegisterRequest(TableName("public", name), ("id",), "ts", mode="mirrored"))
    events.sql(f"GRANT SELECT ON public.{name} TO {guest.user}")
    question = f"SELECT id, ts FROM {name} ORDER BY id"
    mine = ask(question).json()["rows"]
    assert len(mine) == 200
    assert mine == api.post("/api/v1/query", json={"sql": question}).json()["rows"]


@pytest.mark.parametrize("path", ["query", "explain"])
def test_a_table_without_a_grant_is_refused_with_its_lake(ask: Ask, guest: Dsn, path: str) -> None:
    for sql in (
        "SELECT * FROM secret",
        "SELECT * FROM secret WHERE ts < 100",
        "SELECT count(*) FROM events WHERE id IN (SELECT id FROM public.secret)",
        "SELECT * FROM `Public`.SECRET",
        "WITH secret AS (SELECT * FROM secret) SELECT * FROM secret",
        "SELECT * FROM stack(1, TABLE(secret))",
        "SELECT max(id) OVER w FROM events WINDOW w AS (ORDER BY (SELECT max(body) FROM secret))",
        "FROM events |> SET body = (SELECT max(body) FROM secret)",
    ):
        answer = ask(sql, path)
        assert code_of(answer) == (403, "sql.not_granted")
        assert "public.secret" in answer.json()["error"]["message"]
        assert f'GRANT SELECT ON "public"."secret" TO "{guest.user}"' in answer.json()["error"]["hint"]
        assert guest.password not in answer.text


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM modak.modak.public.secret",
        "SELECT * FROM modak.modak.public.events",
        "SELECT * FROM modak.modak.public.secret.files",
        "SELECT * FROM (WITH x AS (TABLE modak.modak.public.secret) SELECT * FROM x)",
        "SELECT * FROM modak.modak.public.secret VERSION AS OF 1",
        "SELECT * FROM modak.modak.public.secret TIMESTAMP AS OF now()",
        "SELECT * FROM stack(1, TABLE(modak.modak.public.secret))",
        "SELECT * FROM stack(1, TABLE(SELECT * FROM modak.modak.public.secret))",
        "SELECT max(id) OVER w FROM events WINDOW w AS (ORDER BY (SELECT max(body) FROM modak.modak.public.secret))",
        "FROM events |> SET body = (SELECT max(body) FROM modak.modak.public.secret)",
        "SELECT * FROM events, LATERAL (TABLE modak.modak.public.secret)",
        "BEGIN SELECT * FROM modak.modak.public.secret; END",
        "SELECT * FROM IDENTIFIER('modak.modak.public.secret')",
        "SELECT * FROM IDENTIFIER('modak.' || 'modak.public.secret')",
        "EXECUTE IMMEDIATE 'SELECT * FROM modak.modak.public.secret'",
    ],
)
def test_the_lake_is_no_way_around_the_grants(ask: Ask, sql: str) -> None:
    for path in ("query", "explain"):
        answer = ask(sql, path)
        assert answer.status_code == 400, answer.text
        assert "hidden" not in answer.text
        assert "row 1" not in answer.text


def test_grants_on_columns_do_not_open_a_table(ask: Ask, events: Events, guest: Dsn) -> None:
    events.sql(f"GRANT SELECT (id) ON public.secret TO {guest.user}")
    assert code_of(ask("SELECT id FROM secret")) == (403, "sql.not_granted")
    events.sql(f"GRANT SELECT ON public.secret TO {guest.user}")
    assert ask("SELECT body FROM secret WHERE id = 7").json()["rows"] == [["hidden"]]
    events.sql(f"REVOKE SELECT ON public.secret FROM {guest.user}")
    assert code_of(ask("SELECT id FROM secret")) == (403, "sql.not_granted")


def test_a_table_with_policies_for_the_role_is_refused_whole(ask: Ask, events: Events, guest: Dsn) -> None:
    events.sql("ALTER TABLE public.events ENABLE ROW LEVEL SECURITY")
    events.sql("CREATE POLICY few ON public.events USING (id < 100)")
    for sql in ("SELECT * FROM events", "SELECT * FROM events WHERE ts < 50"):
        assert code_of(ask(sql)) == (403, "sql.row_security")
    events.sql(f"ALTER ROLE {guest.user} BYPASSRLS")
    assert ask("SELECT count(*) FROM events").json()["rows"] == [["252"]]


def test_without_the_delta_nothing_is_read(ask: Ask, events: Events, guest: Dsn) -> None:
    events.sql(f"REVOKE SELECT ON modak.delta FROM {guest.user}")
    answer = ask("SELECT * FROM events")
    assert code_of(answer) == (403, "sql.not_granted")
    assert f'GRANT SELECT ON modak.delta TO "{guest.user}"' in answer.json()["error"]["hint"]
    events.sql(f"GRANT SELECT ON modak.delta TO {guest.user}")
    events.sql(f"REVOKE USAGE ON SCHEMA modak FROM PUBLIC, {guest.user}")
    answer = ask("SELECT * FROM events")
    assert code_of(answer) == (403, "sql.not_granted")
    assert f'GRANT USAGE ON SCHEMA modak TO "{guest.user}"' in answer.json()["error"]["hint"]


def test_a_table_that_has_gone_is_no_fault_of_the_server(ask: Ask, events: Events) -> None:
    events.sql("DROP TABLE public.events")
    for sql in ("SELECT * FROM events", "SELECT * FROM events WHERE ts < 100"):
        assert code_of(ask(sql)) == (409, "postgres.no_such_table")


def test_a_role_that_may_not_connect_is_told_by_the_names_of_the_settings(ask: Ask, events: Events, guest: Dsn) -> None:
    events.sql(f"REVOKE CONNECT ON DATABASE {guest.dbname} FROM PUBLIC, {guest.user}")
    answer = ask("SELECT * FROM events")
    assert code_of(answer) == (503, "postgres.auth")
    assert "MODAK_QUERY_PG_USER" in answer.json()["error"]["hint"]


def test_explain_has_the_rights_of_the_role(ask: Ask, events: Events) -> None:
    assert ask("SELECT body FROM events WHERE ts < 50", "explain").json()["postgres"]
    # Postgres works out what is immutable while it plans, with the rights of whoever asks.
    events.sql(
        "CREATE FUNCTION public.peek() RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$"
        " DECLARE found text; BEGIN SELECT body INTO found FROM public.secret LIMIT 1; RETURN found; END $$"
    )
    events.sql("CREATE VIEW public.who AS SELECT 1 WHERE public.peek() <> ''")
    told = ask("SELECT 1 FROM public.who", "explain")
    assert told.status_code == 400 or told.json()["postgres"] is None


def test_a_wrong_password_is_told_by_the_names_of_the_settings(
    opened: Callable[..., Ask], guest: Dsn, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = Dsn(guest.host, guest.port, guest.dbname, guest.user, "not-the-password-of-it")
    answer = opened(wrong)("SELECT * FROM events")
    assert code_of(answer) == (503, "postgres.auth")
    assert "MODAK_QUERY_PG_PASSWORD" in answer.json()["error"]["hint"]
    assert wrong.password not in answer.text
    assert wrong.password not in "".join(capfd.readouterr())


def test_the_password_is_in_no_list_of_processes_and_no_log(
    opened: Callable[..., Ask], guest: Dsn, capfd: pytest.CaptureFixture[str]
) -> None:
    ask = opened(guest, inside=False)
    assert ask("SELECT count(*) FROM events").json()["rows"] == [["252"]]
    assert code_of(ask("SELECT count(*) FROM secret")) == (403, "sql.not_granted")
    assert guest.password not in subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
    assert guest.password not in "".join(capfd.readouterr())


@pytest.mark.parametrize("own", [True, False], ids=["role-of-its-own", "worker"])
def test_sessions_of_queries_write_nothing_and_end_in_time(
    own: bool, opened: Callable[..., Ask], api: TestClient, events: Events, guest: Dsn
) -> None:
    seen: list[tuple[Any, ...]] = []

    def looking(dsn: Dsn, sql: str, **options: Any) -> Any:
        settings = "current_setting('transaction_read_only') AS only, current_setting('statement_timeout') AS within"
        asked = f"SELECT current_user::text AS who, {settings}"
        with stream(dsn, asked, **options) as opened_stream:
            seen.extend(tuple(row.values()) for batch in opened_stream for row in batch.to_pylist())
        return stream(dsn, sql, **options)

    with pytest.MonkeyPatch.context() as patched:
        # The delta is small, so it is read in this process.
        patched.setattr("modak.postgres.arrow.stream", looking)
        body = {"sql": "SELECT count(*) FROM events WHERE ts < 200", "timeout_seconds": 45}
        told = opened(guest)(**body) if own else api.post("/api/v1/query", json=body)
        assert told.json()["rows"] == [["200"]]
    who = guest.user if own else events.site.dsn.user
    assert set(seen) == {(who, "on", "45s")}
