"""`modak-worker entities …` as a user types it: what it prints, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner, Result

from modak.cli.main import app
from modak.entities.lock import schema_lock
from modak.postgres.dsn import Dsn
from modak.storage.objects import Objects
from tests.entities.world import INVOICE, SCHEMA, World

Call = Callable[..., Result]


@pytest.fixture
def environ(fresh_database: Dsn, tmp_path: Path) -> dict[str, str]:
    described = tmp_path / "registry.json"
    described.write_text(json.dumps(INVOICE))
    return {
        "MODAK_PG_URL": fresh_database.uri(),
        "MODAK_HOME": str(tmp_path / "home"),
        "MODAK_WAREHOUSE": str(tmp_path / "store"),
        "MODAK_ENTITIES_REGISTRY": str(described),
        "MODAK_ENTITIES_MIN_RECORDS": "3",
    }


@pytest.fixture
def modak(environ: dict[str, str]) -> Iterator[Call]:
    import logging

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield lambda *args, **more: CliRunner(env={**environ, **more}).invoke(app, ["entities", *args])
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def installed(modak: Call, environ: dict[str, str], fresh_database: Dsn) -> World:
    done = modak("install")
    assert done.exit_code == 0, done.output
    assert "every write is watched" in done.stdout
    return World(fresh_database, Objects.of(environ["MODAK_WAREHOUSE"]))


def test_a_store_lives_from_install_to_gc(modak: Call, installed: World) -> None:
    installed.many(0, 2)
    below = modak("flush")
    assert (below.exit_code, "2 of 3 rows are dirty" in below.stdout) == (0, True), below.output
    installed.many(2, 3)
    dry = modak("flush", "--dry-run", "--schema", "invoice")
    assert (dry.exit_code, "would flush schema 7: 5 rows are dirty" in dry.stdout) == (0, True), dry.output
    done = modak("flush")
    assert (done.exit_code, "5 rows in 1 file " in done.stdout) == (0, True), done.output
    refused = modak("init", "--schema", "7")
    assert (refused.exit_code, "--replace-delta" in refused.stderr) == (1, True)
    every = modak("init")
    assert (every.exit_code, "--replace-delta" in every.stderr) == (1, True), every.output
    new = modak("init", "--replace-delta")
    assert (new.exit_code, "5 rows in 1 base file " in new.stdout) == (0, True), new.output
    installed.put(0, title="newer", qty=70_000)
    for number in (1, 2, 3):
        installed.put(number, title="newer")
    aside = modak("flush")
    assert "put aside schema 7" in aside.stdout
    assert "is not a smallint" in aside.stdout
    plan = modak("compact", "--dry-run")
    assert (plan.exit_code, "schema 7: rewrite" in plan.stdout) == (0, True), plan.output
    merged = modak("compact")
    assert (merged.exit_code, "2 files became 1 with 5 rows" in merged.stdout) == (0, True), merged.output
    assert "there is no delta" in modak("compact").stdout
    shown = json.loads(modak("status", "--json").stdout)["schemas"][0]
    assert (shown["base_rows"], shown["delta_files"], shown["quarantined"], shown["waiting_for_gc"]) == (5, 0, 1, 3)
    assert [each["reason"] for each in shown["put_aside"]] == ["a value of 'qty' is not a smallint"]
    said = modak("status").stdout
    assert "invoice" in said
    assert "put aside schema 7: row" in said
    verified = modak("verify")
    assert (verified.exit_code, "equal schema 7: 4 rows compared" in verified.stdout) == (0, True), verified.output
    gc = modak("reconcile", "--gc")
    assert (gc.exit_code, "Left 3 files of schema 7 for gc" in gc.stdout) == (0, True), gc.output


def test_differences_end_with_exit_code_1(modak: Call, installed: World) -> None:
    installed.many(0, 4)
    modak("flush")
    stray = f"entities/delta/{SCHEMA}/stray.parquet"
    installed.objects.put(stray, installed.objects.get(installed.paths()[0]).data)
    found = modak("reconcile", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["schemas"][0]["found"]["delta_orphans"] == [stray]
    repaired = modak("reconcile", "--repair")
    assert (repaired.exit_code, "Marked 4 rows of schema 7 dirty" in repaired.stdout) == (0, True), repaired.output
    modak("flush")
    installed.sql("ALTER TABLE entity_main DISABLE TRIGGER modak_entities_update")
    installed.sql("UPDATE entity_main SET text_01 = 'unseen' WHERE text_01 = 'row 1'")
    installed.sql("ALTER TABLE entity_main ENABLE ALWAYS TRIGGER modak_entities_update")
    different = modak("verify", "--schema", "7")
    assert different.exit_code == 1
    assert "unseen" in different.stdout


def test_install_tells_of_rows_that_nobody_has_exported(modak: Call, installed: World) -> None:
    installed.many(0, 2)
    assert "modak-worker entities init" not in modak("install").output
    # As if they had been there before the triggers.
    installed.sql("DELETE FROM change_log")
    assert "rows from before that nobody has exported: modak-worker entities init --schema 7" in modak("install").output
    assert "2 rows in 1 base file " in modak("init").stdout
    assert "modak-worker entities init" not in modak("install").output
    assert len(installed.read()) == 2


def test_install_tells_that_nobody_watched_for_a_while(modak: Call, installed: World) -> None:
    installed.many(0, 2)
    modak("init")
    installed.sql("ALTER TABLE eav_data DISABLE TRIGGER modak_entities_update")
    said = " ".join(modak("install").output.split())
    assert "2 rows will be exported again" in said
    assert "modak-worker entities verify" in said
    assert "exported again" not in modak("install").output


def test_a_store_that_somebody_works_on_is_in_work_and_not_wrong(modak: Call, installed: World) -> None:
    installed.objects.put(f"entities/delta/{SCHEMA}/_tmp/half.parquet", b"half")
    with schema_lock(installed.store.address, SCHEMA, "change_log"):
        busy = modak("reconcile")
        shown = json.loads(modak("reconcile", "--json").stdout)
    assert (busy.exit_code, "in work schema 7" in busy.stdout, "in order" in busy.stdout) == (0, True, False), (
        busy.output
    )
    assert (shown["sound"], shown["schemas"][0]["busy"]) == (True, True)
    assert modak("reconcile").exit_code == 1


def test_what_cannot_be_done_is_told_with_the_next_step(modak: Call) -> None:
    for words in (("flush",), ("compact",), ("compact", "--dry-run")):
        missing = modak(*words)
        assert (missing.exit_code, "modak-worker entities install" in missing.stderr) == (1, True), missing.output
    modak("install")
    renamed = modak("compact", MODAK_ENTITIES_CHANGE_LOG_TABLE="changelog")
    assert (renamed.exit_code, "no table public.changelog" in renamed.stderr) == (1, True), renamed.output
    unknown = modak("init", "--schema", "order")
    assert (unknown.exit_code, "Known: invoice" in unknown.stderr) == (2, True)
    blank = modak("status", MODAK_ENTITIES_REGISTRY="/nowhere/registry.json")
    assert (blank.exit_code, "MODAK_ENTITIES_REGISTRY" in blank.stderr) == (1, True)


def test_no_password_is_shown(modak: Call, installed: World, fresh_database: Dsn) -> None:
    installed.many(0, 4)
    said = "".join(modak(*words).output for words in (("flush",), ("status", "--json"), ("verify",)))
    assert fresh_database.password
    assert fresh_database.password not in said


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_query_reads_unflushed_changes_too(modak: Call, installed: World, spark_home: Path) -> None:
    installed.many(0, 4)
    modak("flush")
    installed.put(0, title="unflushed")
    home = {"MODAK_HOME": str(spark_home)}
    done = modak("query", "select title, qty from invoice order by title", "--format", "csv", **home)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == ["title,qty", "row 1,1", "row 2,2", "row 3,3", "unflushed,"]
    counted = modak("query", "select count(*) as n from invoice where title = 'row 0'", "--format", "csv", **home)
    assert counted.stdout.splitlines() == ["n", "0"], counted.output
    assert modak("query", "drop table invoice", **home).exit_code == 2
    assert modak("query", "select nothing from invoice", **home).exit_code == 2


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_an_answer_goes_into_the_file_that_is_named(
    modak: Call, installed: World, spark_home: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    installed.put(0, title="flushed", tags=["a", "b"], amount="1.5")
    installed.put(1, title="older")
    installed.put(2, title="gone")
    assert "3 rows in 1 file " in modak("flush").stdout
    installed.put(1, title="unflushed", qty=4)
    installed.delete(2)
    home = {"MODAK_HOME": str(spark_home)}
    text = "select title, qty, amount, tags from invoice order by title"
    parquet, lines = tmp_path / "answer.parquet", tmp_path / "answer.jsonl"
    for form, target in (("parquet", parquet), ("json", lines)):
        done = modak("query", text, "--format", form, "--output", str(target), **home)
        assert (done.exit_code, done.stdout) == (0, ""), done.output
    flushed = {"title": "flushed", "qty": None, "amount": Decimal("1.50"), "tags": ["a", "b"]}
    unflushed = {"title": "unflushed", "qty": 4, "amount": None, "tags": None}
    assert pq.read_table(parquet).to_pylist() == [flushed, unflushed]
    assert [json.loads(line, parse_float=Decimal) for line in lines.read_text().splitlines()] == [flushed, unflushed]
    nowhere = modak("query", text, "--format", "parquet", **home)
    assert (nowhere.exit_code, "--output" in nowhere.stderr) == (2, True), nowhere.output
