"""`modak-worker sql` and `shell`: one table across heap and lake, in every format, with honest exit codes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from modak.cli.main import app
from modak.cli.statements import blank, split
from modak.runtime.leader import Leader
from tests.tables.conftest import events, leader, site  # noqa: F401 - fixtures
from tests.tables.events import Events
from tests.tables.test_seam import correct

Call = Callable[..., Result]


@pytest.fixture
def call(events: Events, leader: Leader, spark_home: Path, warehouse: str) -> Call:  # noqa: F811
    """Calls the program on a database whose events have T at 200 and a correction of row 5."""
    events.register()
    assert events.tier(leader).rows == 200
    correct(events, 5, 'it "was"\nfive')
    environ = {
        "MODAK_PG_URL": events.site.dsn.safe(),
        "MODAK_PG_PASSWORD": events.site.dsn.password,
        "MODAK_WAREHOUSE": warehouse,
        "MODAK_HOME": str(spark_home),
    }

    def run(*args: str, stdin: str | None = None) -> Result:
        return CliRunner(env=environ).invoke(app, list(args), input=stdin)

    return run


@pytest.mark.spark
def test_every_format_gives_the_same_rows(call: Call, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    query = "select id, body, null as nothing, array(id, 1) as list from events where id in (5, 250) order by id"
    plain = call("sql", query)
    assert plain.exit_code == 0, plain.stderr
    assert [line.split() for line in plain.stdout.splitlines()] == [
        ["id", "body", "nothing", "list"],
        ["5", "it", '"was"\\nfive', "NULL", "[5,1]"],
        ["250", "row", "250", "NULL", "[250,1]"],
    ]
    rows = list(csv.reader(io.StringIO(call("sql", query, "--format", "csv").stdout)))
    assert rows == [
        ["id", "body", "nothing", "list"],
        ["5", 'it "was"\nfive', "", "[5,1]"],
        ["250", "row 250", "", "[250,1]"],
    ]
    lines = [json.loads(line) for line in call("sql", query, "--format", "json").stdout.splitlines()]
    assert lines == [
        {"id": 5, "body": 'it "was"\nfive', "nothing": None, "list": [5, 1]},
        {"id": 250, "body": "row 250", "nothing": None, "list": [250, 1]},
    ]
    target = tmp_path / "all.parquet"
    done = call("sql", "-", "--format", "parquet", "--output", str(target), stdin="select * from public.events;")
    assert (done.exit_code, done.stdout) == (0, "")
    assert target.is_file()
    assert sorted(pq.read_table(target).column("id").to_pylist()) == list(range(251))
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.spark
def test_values_keep_their_digits_in_every_text_format(call: Call) -> None:
    moment = "timestamp'2024-01-15 08:00:00.123456+00:00'"
    query = (
        f"select {moment} as at, array({moment}, null) as many, timestamp_ntz'2024-01-15 08:00:00.000001' as plain,"
        " array(timestamp_ntz'2024-01-15 08:00:00.000001') as plains, 12.50bd as price, x'00ff' as bytes,"
        " double('nan') as nan, '' as empty, cast(null as string) as nothing, 'a,b' as comma from events where id = 250"
    )
    many, plains = '["2024-01-15T08:00:00.123456Z",null]', '["2024-01-15T08:00:00.000001"]'
    shown = [
        *("2024-01-15 08:00:00.123456", many, "2024-01-15 08:00:00.000001", plains),
        *("12.50", "\\x00ff", "NaN"),
    ]
    header, line = call("sql", query, "--format", "csv").stdout.splitlines()
    assert header == "at,many,plain,plains,price,bytes,nan,empty,nothing,comma"
    assert line.endswith(',12.50,\\x00ff,NaN,"",,"a,b"')
    (row,) = csv.reader([line])
    assert row == [*shown, "", "", "a,b"]
    answer = call("sql", query, "--format", "json").stdout
    assert '"price":12.50,' in answer
    assert json.loads(answer) == {
        "at": "2024-01-15T08:00:00.123456Z", "many": json.loads(many), "plain": "2024-01-15T08:00:00.000001",
        "plains": json.loads(plains), "price": 12.5, "bytes": "AP8=", "nan": "NaN",
        "empty": "", "nothing": None, "comma": "a,b",
    }  # fmt: skip
    grid = call("sql", query).stdout
    assert all(value in grid for value in shown)


@pytest.mark.spark
def test_what_cannot_be_followed_or_told_apart_is_refused(call: Call) -> None:
    hidden = call("sql", "select id from public./*x*/events")
    assert (hidden.exit_code, "written in a way that cannot be followed" in hidden.stderr) == (2, True)
    twice = call("sql", "select id, id from events", "--format", "json")
    assert (twice.exit_code, "Two columns are called id" in twice.stderr) == (2, True)
    assert call("sql", "select id, id from events where id = 5", "--format", "csv").stdout == "id,id\n5,5\n"


@pytest.mark.spark
def test_a_script_runs_statement_by_statement_and_stops_at_the_first_error(call: Call) -> None:
    script = "\\dt\n\\d events\n\\timing\nselect count(*) as n -- ;\nfrom events;\nselect ';' as x; select 1 as y"
    done = call("shell", stdin=script)
    assert done.exit_code == 0, done.stderr
    words = done.stdout.split()
    assert words[words.index("public.events") :][:4] == ["public.events", "tiered", "200", "1"]
    assert "ts      long    tier key" in done.stdout
    assert "Timing is on." in done.stdout
    assert [words[words.index("n") + at] for at in (0, 1)] == ["n", "251"]
    assert "Time: " in done.stdout
    assert done.stdout.splitlines()[-2] == "1"
    broken = call("shell", stdin="select 1 as one;\ninsert into events values (1);\nselect 2 as two;\n")
    assert broken.exit_code == 2
    assert "INSERT is not a query" in broken.stderr
    assert "two" not in broken.stdout
    assert call("shell", stdin="\\nonsense\n").exit_code == 2
    assert call("shell", stdin="\\q\nselect nothing;").exit_code == 0
    failed = call("sql", "select assert_true(id < 0) from events")
    assert (failed.exit_code, "Traceback" in failed.stderr) == (1, False)
    assert call("sql", "select nothing from events").exit_code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sql", "select 1", "--format", "xml"), "There is no format 'xml'"),
        (("sql", "select 1", "--format", "parquet"), "Parquet goes into a file"),
        (("sql", "select 1", "--output", "no/such/folder/x"), "There is no folder"),
        (("sql", "  "), "There is no query"),
    ],
)
def test_a_wrong_call_is_told_before_anything_starts(modak: Any, args: tuple[str, ...], message: str) -> None:
    result = modak(*args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_semicolon_ends_a_statement_unless_it_is_quoted() -> None:
    assert split("select ';', \"a;b\", `c;d` -- ;\n; /* ; */ select 2;\n  rest") == (
        ["select ';', \"a;b\", `c;d` -- ;", "/* ; */ select 2"],
        "\n  rest",
    )
    assert split("select 'it''s; \\';' ; ;;") == (["select 'it''s; \\';'"], "")
    assert split("select 'open ; ") == ([], "select 'open ; ")
    assert blank(" -- only\n /* this */ ")
