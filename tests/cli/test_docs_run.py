"""Every command that the pages on tables show, run as it stands there and in the order in which a reader meets it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from modak.cli.main import app
from modak.core.names import TableName
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.mirror.pump.health import Teller
from modak.tables.mirror.pump.run import Pump, lag_seconds
from tests.tables.conftest import settings_for

DOCS = Path(__file__).parents[2] / "docs"
STORY = ("registering", "tiering", "folding", "reading", "verifying")
NUMBERS = ("bigint", [f"{at}" for at in (1_699_000_000, 1_700_000_000, 1_701_000_000, 1_702_000_000)], "{low} + i")
MOMENTS = (
    "timestamptz",
    [f"'2024-01-0{day} 00:00+00'" for day in (1, 2, 3, 4)],
    "timestamptz {low} + i * interval '1 minute'",
)

ACCOUNTS = "CREATE TABLE accounts (id bigint PRIMARY KEY, owner text, balance bigint NOT NULL)"
READINGS = (
    "CREATE TABLE readings (tenant_id int, device_id int, at timestamptz NOT NULL, v float8, PRIMARY KEY ({key}))"
)
A_READING = "INSERT INTO readings VALUES (1, 2, '2024-03-31 12:00+00', 0.5)"

Call = Callable[..., Result]


def commands(page: str) -> list[list[str]]:
    """What a page tells its reader to type, without the name of the program."""
    lines = (DOCS / f"{page}.md").read_text().splitlines()
    shown = [line for line in lines if re.match(r"\s*modak-worker \S", line)]
    return [shlex.split(line, comments=True)[1:] for line in shown]


@pytest.fixture
def call(
    fresh_database: Dsn, warehouse: str, spark_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Call:
    """Calls the program in a folder of its own; it must succeed."""
    monkeypatch.chdir(tmp_path)
    environ = {
        "MODAK_PG_URL": fresh_database.uri(),
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(spark_home),
        "MODAK_PREMAKE_PARTITIONS": "0",
    }

    def run(*words: str) -> Result:
        done = CliRunner(env=environ).invoke(app, list(words), input="")
        assert done.exit_code == 0, (words, done.output, done.stderr)
        return done

    return run


def make(dsn: Dsn, kind: tuple[str, list[str], str]) -> None:
    """The table that the pages speak of: three partitions, a hundred rows in each."""
    column, bounds, value = kind
    with connect(dsn, autocommit=True) as conn:
        conn.execute(
            f"CREATE TABLE public.events (id bigint, occurred_at {column}, kind text, amount numeric(12, 2),"
            " PRIMARY KEY (id, occurred_at)) PARTITION BY RANGE (occurred_at)"
        )
        for at, (low, high) in enumerate(pairwise(bounds)):
            conn.execute(
                f"CREATE TABLE public.events_{at} PARTITION OF public.events FOR VALUES FROM ({low}) TO ({high})"
            )
            conn.execute(
                f"INSERT INTO public.events SELECT {100 * at} + i, {value.format(low=low)}, 'purchase', 9.99"
                " FROM generate_series(0, 99) i"
            )


@pytest.mark.spark
@pytest.mark.usefixtures("reset_logs")
def test_the_commands_of_the_pages_do_what_they_say(
    call: Call, fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object, tmp_path: Path
) -> None:
    make(fresh_database, NUMBERS)

    def foreign_row() -> None:
        """What `accept` is for."""
        with open_site(settings_for(fresh_database, warehouse, spark_home)) as site:
            site.spark.sql("INSERT INTO modak.modak.public.events VALUES (9999, 1699000500, 'foreign', 1.00)")

    def correction() -> None:
        """What `compact` is for."""
        with connect(fresh_database, autocommit=True) as conn:
            conn.execute("SELECT modak_delete('public.events', '7', 1699000007)")

    needs = {("tiering", "accept"): foreign_row, ("folding", "compact"): correction}
    said: dict[str, str] = {}
    for page in STORY:
        for words in commands(page):
            needs.pop((page, words[0]), lambda: None)()
            said[" ".join(words)] = call(*words).output
    assert "200 rows" in said["tier --table public.events"]
    assert "1 correction" in said["compact --table public.events"]
    assert (tmp_path / "purchases.csv").read_text().count("9.99") == 299
    assert not needs


@pytest.mark.usefixtures("reset_logs", "gateway")
def test_the_commands_on_keeping_and_expiring_do_what_they_say(call: Call, fresh_database: Dsn) -> None:
    make(fresh_database, MOMENTS)
    kept, *expiring = commands("retention")
    assert "--keep-heap" in kept
    call(*kept)
    call("unregister", "--table", "public.events", "--drop-lake")
    for words in expiring:
        call(*words)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("reset_logs", "gateway")
def test_the_commands_on_mirroring_do_what_they_say(
    call: Call, fresh_database: Dsn, warehouse: str, spark_home: Path
) -> None:
    def sql(*statements: str) -> None:
        with connect(fresh_database, autocommit=True) as conn:
            for statement in statements:
                conn.execute(statement)

    sql(ACCOUNTS, "INSERT INTO accounts SELECT i, 'of ' || i, 0 FROM generate_series(1, 300) AS i")
    sql(READINGS.format(key="tenant_id, device_id"), A_READING)
    make(fresh_database, NUMBERS)

    def follow() -> None:
        """What `run` does for its tables until somebody ends it; that it can be ended is tried in `test_program.py`."""
        sql("UPDATE accounts SET balance = 5 WHERE id <= 7", "DELETE FROM accounts WHERE id = 9")
        with open_site(settings_for(fresh_database, warehouse, spark_home)) as site, Leader.campaign(site, 5) as leader:
            record = site.reader.state(TableName("public", "accounts")).table
            with Pump(site, leader.epoch, record.table_id) as pump:
                assert pump.turn().changes == 8
                frontier = site.reader.state(record.name).cutline.frontier or ""
                Teller(site, record.table_id, pump.slot).tell(frontier, lag_seconds(site, pump), None)

    def partitioned() -> None:
        call("unregister", "--table", "public.readings", "--drop-lake")
        sql("DROP TABLE readings", f"{READINGS.format(key='device_id, at')} PARTITION BY RANGE (at)")
        sql("CREATE TABLE readings_1 PARTITION OF readings FOR VALUES FROM ('2024-01-01') TO ('2024-04-01')", A_READING)

    def lost() -> None:
        """The page has let the table go by then; it is there again, with a row that nobody has heard of."""
        call(*of_accounts["register"])
        (slot,) = slots("%\\_%")[-1:]
        sql(f"SELECT pg_drop_replication_slot('{slot}')", "UPDATE accounts SET balance = 6 WHERE id = 8")

    def slots(like: str) -> list[str]:
        with connect(fresh_database, autocommit=True) as conn:
            found = conn.execute(
                "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() AND slot_name LIKE %s"
                " ORDER BY length(slot_name), slot_name",
                (like,),
            )
            return [name for (name,) in found]

    def kept() -> None:
        """What `convert` is for."""
        keys = ("--table", "public.events", "--pk", "id", "--tier-key", "occurred_at")
        call("register", *keys, "--keep-heap")

    shown = commands("mirroring")
    of_accounts = {words[0]: words for words in shown if "public.accounts" in words and "--dry-run" not in words}
    needs = {
        "register --table public.readings --pk device_id": partitioned,
        "reanchor --table public.accounts": lost,
        "convert --table public.events --mode mirrored": kept,
    }
    said: dict[str, str] = {}
    for words in shown:
        line = " ".join(words)
        before = next((start for start in needs if line.startswith(start)), None)
        if before is not None:
            needs.pop(before)()
        if words == ["run"]:
            follow()
            said["status before"] = call(*of_accounts["status"]).output
            continue
        said[line] = call(*words).output
        if "--dry-run" in words:
            assert slots("%") == []
    assert not needs
    for line, told in {
        "register --table public.accounts --pk id --tier-key id --mode mirrored --dry-run": "Nothing was changed",
        "register --table public.accounts --pk id --tier-key id --mode mirrored": "Copied 300 rows",
        "unregister --table public.accounts": "The lake table stays at",
        "reanchor --table public.accounts": "1 row of the lake had fallen behind the heap",
        "verify --table public.accounts": "equal public.accounts: 299 rows compared",
        "convert --table public.events --mode mirrored": "Wrote 300 rows",
        "convert --table public.events --mode tiered": "The heap has every row",
    }.items():
        assert told in said[line]
    # What the pump has told; of the table that is there anew it has told nothing yet.
    assert re.search(r"lag +[\d,]+ bytes, \d+ s\nfrontier F +\w+/\w+\nWAL kept by its slot +\d", said["status before"])
    assert re.search(r"lag +–\nfrontier F +\w+/\w+\n", said["status --table public.accounts"])
