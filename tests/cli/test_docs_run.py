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
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.tables.conftest import settings_for

DOCS = Path(__file__).parents[2] / "docs"
STORY = ("registering", "tiering", "folding", "reading", "verifying")
NUMBERS = ("bigint", [f"{at}" for at in (1_699_000_000, 1_700_000_000, 1_701_000_000, 1_702_000_000)], "{low} + i")
MOMENTS = (
    "timestamptz",
    [f"'2024-01-0{day} 00:00+00'" for day in (1, 2, 3, 4)],
    "timestamptz {low} + i * interval '1 minute'",
)

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
        from modak.runtime.opening import open_site

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
