"""Bulk history: files adopted or written anew, one commit or nothing, and what wins over what."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.core.errors import Refused, UsageError
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.ingest.run import Request, ingest
from modak.tables.site import Site
from tests.ingest.history import BASE, Rows, lake, parquet, take
from tests.tables.events import Events
from tests.tables.readers import by_duckdb, by_pyiceberg, by_spark, duckdb_rows


def test_two_files_of_new_keys_come_in_as_they_are_in_one_commit(site: Site, cold: Events, tmp_path: Path) -> None:
    before = cold.snapshots()
    one = parquet(tmp_path / "a.parquet", [(1000, 10, "a"), (1001, 11, "b")])
    two = parquet(tmp_path / "b.parquet", [(1002, 150, "c")])
    report = take(site, cold, one, two)
    assert (report.rows, report.adopted_files, report.written_files, report.replaced) == (3, 2, 0, 0)
    assert cold.snapshots() == before + 1
    assert lake(cold) == BASE | {(1000, 10, "a"), (1001, 11, "b"), (1002, 150, "c")}
    assert Path(one).exists(), "the user's file stays his"


def test_adopted_files_read_the_same_everywhere_and_are_the_tables_own(
    site: Site, cold: Events, tmp_path: Path
) -> None:
    path = parquet(tmp_path / "a.parquet", [(1000, 10, "a")])
    take(site, cold, path)
    Path(path).unlink()
    line = site.reader.state(cold.name).cutline
    rows = {tuple(row.values()) for row in duckdb_rows(line.metadata_location)}
    assert (1000, 10, "a") in rows
    from pyiceberg.table import StaticTable

    scanned = StaticTable.from_metadata(line.metadata_location).scan().to_arrow().to_pylist()
    assert {tuple(row.values()) for row in scanned} == rows


def _swapped(path: Path) -> str:
    """Columns in another order, and two of one type among them, so that a mistake shows."""
    ts, ids = pa.array([10, 11, 5], pa.int64()), pa.array([1000, 1001, 5], pa.int64())
    pq.write_table(pa.table({"body": ["a", None, "five"], "ts": ts, "id": ids}), path)
    return str(path)


SWAPPED = {(1000, 10, "a"), (1001, 11, None), (5, 5, "five")}


def test_a_file_with_its_columns_in_another_order_is_adopted_and_read_right(
    site: Site, cold: Events, tmp_path: Path
) -> None:
    report = take(site, cold, _swapped(tmp_path / "a.parquet"))
    assert (report.adopted_files, report.written_files, report.replaced) == (1, 0, 1)
    for read in (by_duckdb, by_pyiceberg):
        rows = [(row["id"], row["ts"], row["body"]) for row in read(site, cold.name)]
        assert (len(rows), set(rows)) == (202, BASE - {(5, 5, "row 5")} | SWAPPED), read.__name__
    found = [(row["id"], row["ts"], row["body"]) for row in by_duckdb(site, cold.name, "ts = 11 AND id > 200")]
    assert found == [(1001, 11, None)], "bounds belong to their columns too"
    assert take(site, cold, parquet(tmp_path / "b.parquet", [(1000, 10, "again")])).replaced == 1
    assert lake(cold) == BASE - {(5, 5, "row 5")} | SWAPPED - {(1000, 10, "a")} | {(1000, 10, "again")}


@pytest.mark.spark
def test_spark_reads_a_file_with_its_columns_in_another_order_right(site: Site, cold: Events, tmp_path: Path) -> None:
    take(site, cold, _swapped(tmp_path / "a.parquet"))
    rows = [(row["id"], row["ts"], row["body"]) for row in by_spark(site, cold.name)]
    assert (len(rows), set(rows)) == (202, BASE - {(5, 5, "row 5")} | SWAPPED)
    found = [(row["id"], row["ts"], row["body"]) for row in by_spark(site, cold.name, "ts = 11 AND id > 200")]
    assert found == [(1001, 11, None)]


def test_a_file_without_statistics_needs_rewrite(site: Site, cold: Events, tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    table = pa.table({"id": pa.array([1000], pa.int64()), "ts": pa.array([10], pa.int64()), "body": ["a"]})
    pq.write_table(table, path, write_statistics=False)
    with pytest.raises(Refused) as refused:
        take(site, cold, path)
    assert "cannot be adopted as it is" in str(refused.value)
    assert "its footer has no statistics of the tier key" in str(refused.value)
    assert "its footer does not prove that column id is never NULL" in str(refused.value)
    assert lake(cold) == BASE
    assert take(site, cold, path, rewrite=True).written_files == 1
    assert lake(cold) == BASE | {(1000, 10, "a")}


def test_keys_of_the_lake_are_replaced(site: Site, cold: Events, tmp_path: Path) -> None:
    report = take(site, cold, parquet(tmp_path / "a.parquet", [(5, 5, "five"), (6, 6, "six"), (1000, 7, "new")]))
    assert (report.rows, report.replaced) == (3, 2)
    assert lake(cold) == (BASE - {(5, 5, "row 5"), (6, 6, "row 6")}) | {
        (5, 5, "five"),
        (6, 6, "six"),
        (1000, 7, "new"),
    }
    again = take(site, cold, parquet(tmp_path / "b.parquet", [(5, 5, "FIVE")]))
    assert again.replaced == 1
    assert (5, 5, "FIVE") in lake(cold)


def test_the_same_input_again_changes_nothing(site: Site, cold: Events, tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", [(5, 5, "five"), (1000, 10, "a")])
    take(site, cold, path)
    cold.sql('SELECT modak_upsert(\'public.events\', \'{"id": 5, "ts": 5, "body": "later"}\')')
    before, rows = cold.snapshots(), cold.cold()
    report = take(site, cold, path)
    assert (len(report.plan.known), report.rows) == (1, 0)
    assert (cold.snapshots(), cold.cold()) == (before, rows)


def test_an_earlier_standard_input_again_changes_nothing(site: Site, cold: Events) -> None:
    first, second = b'{"id": 5, "ts": 5, "body": "first"}\n', b'{"id": 5, "ts": 5, "body": "second"}\n'
    for body in (first, second):
        assert take(site, cold, "-", kind="jsonl", stdin=io.BytesIO(body)).rows == 1
    before = cold.snapshots()
    for body in (first, second):
        report = take(site, cold, "-", kind="jsonl", stdin=io.BytesIO(body))
        assert (len(report.plan.known), report.rows) == (1, 0)
    assert cold.snapshots() == before
    assert (5, 5, "second") in lake(cold)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(1, 200, "hot")], "not below the cut-line 200"),
        ([(1, 150, "cold"), (2, 250, "straddles")], "not below the cut-line 200"),
    ],
)
def test_one_row_outside_refuses_the_whole_input(
    site: Site, cold: Events, tmp_path: Path, rows: Rows, says: str
) -> None:
    before = cold.snapshots()
    good = parquet(tmp_path / "good.parquet", [(1000, 10, "a")])
    bad = parquet(tmp_path / "bad.parquet", rows)
    with pytest.raises(Refused, match=says) as refused:
        take(site, cold, good, bad)
    assert "bad.parquet" in str(refused.value)
    assert (cold.snapshots(), lake(cold)) == (before, BASE)


def test_a_long_list_of_reasons_ends_with_how_many_more_there_are(site: Site, cold: Events, tmp_path: Path) -> None:
    files = [parquet(tmp_path / f"{at:02d}.parquet", [(at, 900, "hot")]) for at in range(23)]
    with pytest.raises(Refused) as refused:
        take(site, cold, *files)
    lines = refused.value.message.splitlines()
    assert [f"{at:02d}.parquet: tier key 900" in line for at, line in enumerate(lines[1:-1])] == [True] * 20
    assert lines[-1].strip() == "… and 3 more"


def test_constraints_other_than_the_primary_key_are_not_looked_at(site: Site, cold: Events, tmp_path: Path) -> None:
    cold.sql("ALTER TABLE public.events ADD CHECK (length(body) < 20), ALTER body SET NOT NULL")
    rows: list[Any] = [(1000, 10, "x" * 30), (1001, 11, None)]
    take(site, cold, parquet(tmp_path / "a.parquet", rows))
    assert set(rows) <= lake(cold)


def test_rows_below_the_retention_line_are_refused(site: Site, cold: Events, tmp_path: Path) -> None:
    cold.sql("UPDATE modak.cutline SET retention_line = 100")
    with pytest.raises(Refused, match="below the retention line 100"):
        take(site, cold, parquet(tmp_path / "a.parquet", [(1, 50, "old")]))


def test_rows_of_a_leaf_that_the_heap_still_has_are_refused(
    site: Site, events: Events, leader: Leader, tmp_path: Path
) -> None:
    from modak.catalog import pins

    events.register()
    pins.begin(site.dsn, events.name)
    events.tier(leader)
    with pytest.raises(Refused, match="partition that the heap still has"):
        take(site, events, parquet(tmp_path / "a.parquet", [(1000, 50, "x")]))


def test_extra_mistyped_and_missing_columns_are_named(site: Site, cold: Events, tmp_path: Path) -> None:
    extra = parquet(tmp_path / "extra.parquet", [(1, 1, "x")], colour=pa.array(["red"]), size=pa.array([1]))
    mistyped = str(tmp_path / "mistyped.parquet")
    pq.write_table(pa.table({"id": ["one"], "ts": pa.array([1], pa.int64()), "body": ["x"]}), mistyped)
    lacking = str(tmp_path / "lacking.parquet")
    pq.write_table(pa.table({"ts": pa.array([1], pa.int64())}), lacking)
    with pytest.raises(Refused) as refused:
        take(site, cold, extra, mistyped, lacking)
    text = str(refused.value)
    assert "extra.parquet: has columns that the table lacks: colour, size" in text
    assert "column id is string, the table's is long" in text
    assert "lacks column id" in text


def test_missing_optional_columns_are_allowed(site: Site, cold: Events, tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": pa.array([1000], pa.int64()), "ts": pa.array([10], pa.int64())}), path)
    assert take(site, cold, path).adopted_files == 1
    assert (1000, 10, None) in lake(cold)


def test_a_file_that_spans_bands_needs_rewrite_and_is_split(site: Site, cold: Events, tmp_path: Path) -> None:
    path = parquet(tmp_path / "wide.parquet", [(1000, 10, "a"), (1001, 150, "b")])
    with pytest.raises(Refused, match="spans partition bands"):
        take(site, cold, path)
    report = take(site, cold, path, rewrite=True)
    assert (report.adopted_files, report.written_files) == (0, 2)
    assert {(1000, 10, "a"), (1001, 150, "b")} <= lake(cold)


def test_another_type_that_can_be_cast_needs_rewrite(site: Site, cold: Events, tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"id": pa.array([1000], pa.int32()), "ts": pa.array([10], pa.int32()), "body": ["a"]}), path
    )
    with pytest.raises(Refused, match="column id is int32, the table's is long"):
        take(site, cold, path)
    take(site, cold, path, rewrite=True)
    assert (1000, 10, "a") in lake(cold)


@pytest.mark.spark
def test_many_rows_are_scanned_and_rewritten_by_spark_and_progress_is_told(
    site: Site, cold: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modak.spark import distribute as distributing

    monkeypatch.setattr("modak.tables.ingest.run.DRIVER_ROWS", 0)
    sent: list[int] = []
    real = distributing.distribute

    def counted(spark: Any, work: Any, jobs: Any, **more: Any) -> Any:
        sent.append(len(jobs))
        return real(spark, work, jobs, **more)

    monkeypatch.setattr("modak.spark.distribute.distribute", counted)
    rows = [[(1000 + 2 * at, 10 + at, "a"), (1001 + 2 * at, 150 + at, "b")] for at in range(3)]
    files = [parquet(tmp_path / f"{at}.parquet", some) for at, some in enumerate(rows)]
    told: list[tuple[str, int, int]] = []
    report = ingest(
        site,
        Request(cold.name, tuple(files), "parquet", rewrite=True),
        on_progress=lambda *step: told.append(step),
    )
    assert (report.rows, report.adopted_files, report.written_files) == (6, 0, 6)
    assert sent == [3, 3]
    assert {step for step, done, all_ in told if done == all_ == 3} == {"keys", "rows"}
    assert lake(cold) == BASE | {row for some in rows for row in some}


def test_of_two_rows_with_one_key_the_later_wins(site: Site, cold: Events, tmp_path: Path) -> None:
    one = parquet(tmp_path / "a.parquet", [(1000, 10, "first"), (1001, 11, "x"), (1000, 10, "second")])
    two = parquet(tmp_path / "b.parquet", [(1001, 11, "third")])
    with pytest.raises(Refused, match=r"a.parquet, row 1: 2 rows have a key that comes again later"):
        take(site, cold, one, two)
    report = take(site, cold, one, two, rewrite=True)
    assert report.left_out == 2
    assert {(1000, 10, "second"), (1001, 11, "third")} == lake(cold) - BASE


def test_older_corrections_give_way_and_newer_ones_win(
    site: Site, cold: Events, leader: Leader, tmp_path: Path
) -> None:
    cold.sql('SELECT modak_upsert(\'public.events\', \'{"id": 5, "ts": 5, "body": "older"}\')')
    cold.sql("SELECT modak_delete('public.events', '7', 7::bigint)")
    report = take(site, cold, parquet(tmp_path / "a.parquet", [(5, 5, "ingested"), (6, 6, "six"), (7, 7, "back")]))
    assert report.corrections == 2
    assert {(5, 5, "ingested"), (7, 7, "back")} <= cold.cold()
    cold.sql('SELECT modak_upsert(\'public.events\', \'{"id": 6, "ts": 6, "body": "newer"}\')')
    assert (6, 6, "newer") in cold.cold()
    fold(site, leader.epoch, cold.name)
    assert {(5, 5, "ingested"), (6, 6, "newer"), (7, 7, "back")} <= lake(cold)


def test_json_lines_come_in_with_postgres_own_types(site: Site, cold: Events, tmp_path: Path) -> None:
    lines = [{"id": 1000, "ts": 10, "body": 'ü "q"'}, {"id": 1001, "ts": 150}, {"id": 5, "ts": 5, "body": "five"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = take(site, cold, str(path), kind="jsonl")
    assert (report.rows, report.replaced) == (3, 1)
    assert {(1000, 10, 'ü "q"'), (1001, 150, None), (5, 5, "five")} <= lake(cold)


def test_bad_lines_are_listed_with_their_numbers(site: Site, cold: Events, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "ts": 10}\nnonsense\n{"id": "x", "ts": 10}\n{"id": 3, "ts": 900}\n{"id": 4}\n')
    with pytest.raises(Refused) as refused:
        take(site, cold, str(path), kind="jsonl")
    text = str(refused.value)
    assert "row 2: is not a JSON object" in text
    assert "row 3: column id: 'x' is no long" in text
    assert lake(cold) == BASE


def test_standard_input_folders_and_patterns_name_sources(site: Site, cold: Events, tmp_path: Path) -> None:
    body = b'{"id": 1000, "ts": 10, "body": "piped"}\n'
    assert take(site, cold, "-", kind="jsonl", stdin=io.BytesIO(body)).rows == 1
    assert len(take(site, cold, "-", kind="jsonl", stdin=io.BytesIO(body)).plan.known) == 1
    folder = tmp_path / "history"
    folder.mkdir()
    for number in range(3):
        parquet(folder / f"part-{number}.parquet", [(2000 + number, 20 + number, "x")])
    assert take(site, cold, str(folder / "part-[01].parquet")).rows == 2
    assert take(site, cold, str(folder)).rows == 1
    with pytest.raises(UsageError, match="belongs to the lake"):
        take(site, cold, str(tmp_path))
    with pytest.raises(UsageError, match="There is no parquet file"):
        take(site, cold, str(tmp_path / "none-*.parquet"))


def test_a_dry_run_tells_the_plan_and_changes_nothing(site: Site, cold: Events, tmp_path: Path) -> None:
    before = cold.snapshots()
    path = parquet(tmp_path / "a.parquet", [(1000, 10, "a")])
    report = take(site, cold, path, dry_run=True)
    assert [facts.source.shown for facts in report.plan.adopt] == [path]
    assert (cold.snapshots(), cold.sql("SELECT count(*) FROM modak.op_log WHERE kind = 'ingest'")) == (before, [(0,)])


def test_a_dry_run_looks_through_json_lines(site: Site, cold: Events, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"id": 1000, "ts": 10, "body": "a"}\n')
    bad.write_text('{"id": 1, "ts": 10}\nnonsense\n{"id": "x", "ts": 10}\n{"id": 3, "ts": 900}\n')
    before = cold.snapshots()
    with pytest.raises(Refused) as refused:
        take(site, cold, str(good), str(bad), kind="jsonl", dry_run=True)
    text = str(refused.value)
    assert "row 2: is not a JSON object" in text
    assert "row 3: column id: 'x' is no long" in text
    assert "row 4: tier key 900 is not below the cut-line 200" in text
    assert "good.jsonl" not in text
    report = take(site, cold, str(good), kind="jsonl", dry_run=True)
    assert [facts.source.shown for facts in report.plan.rewrite] == [str(good)]
    assert (cold.snapshots(), cold.sql("SELECT count(*) FROM modak.op_log WHERE kind = 'ingest'")) == (before, [(0,)])
    assert lake(cold) == BASE


def test_columns_dropped_and_added_again_show_nothing_of_an_adopted_file(
    site: Site, cold: Events, leader: Leader, tmp_path: Path
) -> None:
    take(site, cold, parquet(tmp_path / "a.parquet", [(1000, 10, "old value")]))
    cold.sql("ALTER TABLE public.events DROP COLUMN body")
    cold.sql("ALTER TABLE public.events ADD COLUMN body text")
    path = parquet(tmp_path / "b.parquet", [(1001, 11, "new value")])
    with pytest.raises(Refused, match="column body has meant another column before"):
        take(site, cold, path)
    take(site, cold, path, rewrite=True)
    line = site.reader.state(cold.name).cutline
    rows = {row["id"]: row["body"] for row in duckdb_rows(line.metadata_location) if row["id"] >= 1000}
    assert rows == {1000: None, 1001: "new value"}
    renamed = cold.sql("ALTER TABLE public.events RENAME COLUMN body TO words")
    assert renamed == []


def test_ingest_is_for_cold_tables_only(site: Site, events: Events, leader: Leader, tmp_path: Path) -> None:
    events.register()
    events.sql("UPDATE modak.tables SET keep_heap = true")
    with pytest.raises(Refused, match="keeps its rows in the heap"):
        take(site, events, parquet(tmp_path / "a.parquet", [(1, 1, "x")]))


def test_where_bounds_exclude_every_key_no_file_of_the_lake_is_read(
    site: Site, cold: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a file was read")

    monkeypatch.setattr("modak.tables.ingest.commit.Landing._look_up", never)
    assert take(site, cold, parquet(tmp_path / "a.parquet", [(1, -50, "far"), (2, -49, "far")])).rows == 2
    with pytest.raises(AssertionError, match="a file was read"):
        take(site, cold, parquet(tmp_path / "b.parquet", [(1, 50, "near")]))


def test_mirrored_tables_take_history_only_with_heap_retention(site: Site, events: Events) -> None:
    from dataclasses import replace

    from modak.tables.ingest.run import refuse_unless_cold

    events.register()
    state = site.reader.state(events.name)
    mirrored = replace(state, table=replace(state.table, mode="mirrored"))
    with pytest.raises(Refused, match="mirrored whole"):
        refuse_unless_cold(mirrored)
    refuse_unless_cold(replace(mirrored, table=replace(mirrored.table, heap_retention=100)))


def test_the_command_tells_what_it_did(site: Site, cold: Events, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from modak.cli.main import app

    environ = {
        "MODAK_PG_URL": site.dsn.safe(),
        "MODAK_PG_PASSWORD": site.dsn.password,
        "MODAK_WAREHOUSE": site.settings.lake.warehouse,
        "MODAK_HOME": str(site.settings.home.path),
    }

    def call(*args: str, piped: bytes | None = None) -> Any:
        return CliRunner(env=environ).invoke(app, ["ingest", "--table", "public.events", *args], input=piped)

    path = parquet(tmp_path / "a.parquet", [(5, 5, "five"), (1000, 10, "a")])
    planned = call("--file", path, "--dry-run")
    assert (planned.exit_code, "would be adopted: 2 rows" in planned.stdout) == (0, True), planned.output
    done = call("--file", path)
    assert "ingested public.events: 2 rows" in done.stdout
    assert "1 file adopted, 0 written; 1 row of the lake replaced" in done.stdout
    assert "1 of the files are in the lake already" in call("--file", path).stdout
    refused = call("--file", parquet(tmp_path / "b.parquet", [(1, 900, "hot")]))
    assert refused.exit_code == 1
    assert "b.parquet: tier key 900 is not below the cut-line 200" in refused.stderr
    parts = [parquet(tmp_path / f"part-{at}.parquet", [(2000 + at, 20 + at, "part")]) for at in range(2)]
    told = call("--file", *parts)
    assert "reading keys: 2 of 2" in told.stderr
    assert "adopting files: 2 of 2" in told.stderr
    assert "2 files adopted, 0 written" in told.stdout
    lines = b'{"id": 3000, "ts": 30, "body": "piped"}\n{"id": 3001, "ts": 31, "body": "piped"}\n'
    assert "ingested public.events: 2 rows" in call("--jsonl", "-", piped=lines).stdout
    assert "Nothing to take in" in call("--jsonl", "-", piped=lines).stdout
    whole = Path(parquet(tmp_path / "c.parquet", [(3002, 32, "piped")])).read_bytes()
    piped = call("--file", "-", piped=whole)
    assert "1 file adopted, 0 written" in piped.stdout, piped.stderr
    wrong = call("--jsonl", "-", piped=b"nonsense\n")
    assert (wrong.exit_code, "row 1: is not a JSON object" in wrong.stderr) == (1, True)
    assert {row for row in lake(cold) if row[0] >= 3000} == {(3000 + at, 30 + at, "piped") for at in range(3)}
