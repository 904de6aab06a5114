"""The commands on a real table, each in a process of its own, as a user types them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from tests.cli.conftest import Worker

Call = Callable[..., "CompletedProcess[str]"]
KEYS = ("--pk", "id", "--tier-key", "at")

TABLE = """
CREATE TABLE public.readings (id bigint, at bigint, value float8, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
CREATE TABLE public.readings_1 PARTITION OF public.readings FOR VALUES FROM (0) TO (100);
CREATE TABLE public.readings_2 PARTITION OF public.readings FOR VALUES FROM (100) TO (200);
CREATE TABLE public.readings_3 PARTITION OF public.readings FOR VALUES FROM (200) TO (300);
INSERT INTO public.readings SELECT i, i, i FROM generate_series(0, 250) i;
ANALYZE public.readings;
CREATE TABLE public.flat (id bigint, seen_at real);
"""


@pytest.fixture
def call(worker: Worker, fresh_database: Dsn, tmp_path: Path) -> Call:
    """`modak-worker` against a database with one table that can be registered and one that cannot."""
    with connect(fresh_database) as conn:
        conn.execute(TABLE)
    environ = {"MODAK_PG_URL": fresh_database.uri(), "MODAK_WAREHOUSE": str(tmp_path / "lake")}
    return lambda *args: worker(*args, **environ)


def test_an_empty_catalog_is_shown_as_such(call: Call) -> None:
    assert "No table is registered." in call("status").stdout
    assert json.loads(call("status", "--json").stdout)["tables"] == []


def test_a_dry_run_of_register_tells_what_would_move_and_changes_nothing(call: Call) -> None:
    done = call("register", "--table", "readings", *KEYS, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "3 partitions, about 251 rows" in done.stdout
    assert "can be registered. Nothing was changed." in done.stdout
    assert json.loads(call("status", "--json").stdout)["tables"] == []


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_register_lists_everything_that_is_wrong_at_once(call: Call, extra: tuple[str, ...]) -> None:
    done = call("register", "--table", "flat", "--pk", "id,nope", "--tier-key", "seen_at", *extra)
    assert done.returncode == 1
    for part in ("not partitioned", "no column nope", "no primary key", "seen_at"):
        assert part in done.stderr
    assert "Nothing was changed." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [("tier",), ("tier", "--dry-run"), ("compact", "--dry-run"), ("accept",), ("unregister",), ("status",)],
)
def test_a_table_that_is_not_registered_is_named(call: Call, command: tuple[str, ...]) -> None:
    done = call(*command, "--table", "public.readings")
    assert done.returncode == 1
    assert "error: public.readings is not registered." in done.stderr
    assert "hint: " in done.stderr


@pytest.mark.spark
def test_a_table_goes_in_is_shown_and_comes_out_again(call: Call) -> None:
    done = call("register", "--table", "readings", *KEYS)
    assert done.returncode == 0, done.stderr
    assert "registered public.readings" in done.stdout
    assert re.search(
        r"^3 partitions, about 251 rows, \d+\.\d KB; moving them takes about \d+\.\d s\.$", done.stdout, re.MULTILINE
    )

    again = call("register", "--table", "public.readings", *KEYS)
    assert (again.returncode, "Nothing was changed." in again.stdout) == (0, True)
    other = call("register", "--table", "readings", *KEYS, "--numeric-as", "string")
    assert (other.returncode, "--numeric-as" in other.stderr) == (1, True)

    (row,) = json.loads(call("status", "--json").stdout)["tables"]
    assert (row["name"], row["mode"], row["cut_line"], row["partitions"]) == (
        "public.readings",
        "tiered",
        "0",
        {"hot": 3},
    )
    assert {
        "snapshot_id",
        "retention_line",
        "heap_bytes",
        "lake_bytes",
        "lag",
        "last_operation",
        "problems",
    } <= row.keys()
    assert row["metadata_location"].endswith(".metadata.json")

    plan = call("tier", "--table", "readings", "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert "2 partitions of public.readings would move" in plan.stdout
    assert "the cut-line would go from 0 to 200" in plan.stdout
    assert "readings_1" in plan.stdout

    fold = call("compact", "--table", "readings", "--dry-run")
    assert fold.returncode == 0, fold.stderr
    assert "Nothing to fold in public.readings: no correction waits below the cut-line." in fold.stdout

    out = call("unregister", "--table", "readings")
    assert out.returncode == 0, out.stderr
    assert "The lake table stays at" in out.stdout
    assert json.loads(call("status", "--json").stdout)["tables"] == []
