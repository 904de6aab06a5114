"""Words for people: sizes, times, tables, and nothing in them that is secret."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from modak.cli.commands import erase, maintenance
from modak.cli.masking import HIDDEN, mask, mask_fields
from modak.cli.output import dump, duration, record, size, table
from modak.core.names import TableName
from modak.core.states import PartitionState
from modak.tables.maintenance.erase import Erased


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (61_300_000, "61.3 MB"), (2.5e12, "2.5 TB"), (7e18, "7000.0 PB")],
)
def test_sizes_are_short(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.96, "10.0 s"), (12.4, "12 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_table_in_a_pipe_is_aligned_lines_without_frames(capsys: pytest.CaptureFixture[str]) -> None:
    table(("Name", "Rows"), [("events", "1,000"), ("a", "7")], right=frozenset({"Rows"}))
    assert capsys.readouterr().out == "name     rows\nevents  1,000\na           7\n"


def test_a_table_without_rows_still_has_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    table(("Name", "Rows"), [])
    assert capsys.readouterr().out == "name  rows\n"


def test_values_become_json_that_scripts_understand(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Row:
        name: TableName
        states: dict[PartitionState, int]
        at: datetime
        problems: tuple[str, ...]
        nothing: None = None

    row = Row(TableName("public", "Odd"), {PartitionState.HOT: 1}, datetime(2026, 1, 2, tzinfo=UTC), ("gap",))
    assert record(row) == {
        "name": 'public."Odd"',
        "states": {"hot": 1},
        "at": "2026-01-02T00:00:00+00:00",
        "problems": ["gap"],
        "nothing": None,
    }
    dump(record(row))
    assert capsys.readouterr().out.startswith("{\n")


@pytest.mark.parametrize(
    "text",
    [
        "cannot connect to postgresql://me:hunter2@host:5432/db",
        "jdbc:postgresql://me:hunter2@host/db failed",
        "postgres://me:hunter2@[::1]/db",
        "postgresql://me:hun@hunter2@host/db",
        "host='x' password='hunter2' dbname='y'",
        r"host='x' password='it\'s hunter2' dbname='y'",
        "password=hunter2",
        "jdbc:postgresql://host/db?user=me&password=hunter2&ssl=true",
        "s3.secret-access-key=hunter2;region=eu",
        "MODAK_LOAD_TOKEN=hunter2",
    ],
)
def test_passwords_inside_texts_are_masked(text: str) -> None:
    assert "hunter2" not in mask(text)
    assert HIDDEN in mask(text)


def test_texts_without_secrets_stay_as_they_are() -> None:
    text = "Check MODAK_PG_USER and MODAK_PG_PASSWORD. See postgresql://me@host:5432/db, at 12:30@noon."
    assert mask(text) == text


def test_fields_with_secret_names_are_masked_at_any_depth() -> None:
    event = {"event": "x", "password": "hunter2", "s3": {"secret_key": "hunter2", "region": "eu"}, "api_token": None}
    assert mask_fields(None, "info", event) == {
        "event": "x",
        "password": HIDDEN,
        "s3": {"secret_key": HIDDEN, "region": "eu"},
        "api_token": None,
    }


def test_one_of_something_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    erase._show(Erased(heap_rows=1, lake_rows=1, files_rewritten=1, snapshots_expired=1, waiting=1))
    erase._show(
        Erased(heap_rows=0, lake_rows=2, files_rewritten=2, snapshots_expired=2, waiting=0, snapshots_scanned=1)
    )
    merged = {"files_before": 1, "bytes_before": 9, "files_after": 1, "bytes_after": 9, "deletes_before": 1}
    maintenance._show_outcome(
        TableName("public", "events"),
        {
            "pack": {**merged, "rows_before": 3, "rows_after": 2},
            "expiry": {"snapshots": 1, "files_deleted": 1},
            "orphans": {"files_deleted": 1, "bytes_deleted": 9},
        },
    )
    told = capsys.readouterr().out
    assert "1 row of the heap, 1 of the lake; 1 file rewritten, 1 snapshot expired." in told
    assert "Readers still hold 1 older snapshot;" in told
    assert "2 files rewritten, 2 snapshots expired." in told
    assert "1 retained snapshot found 0 matching rows." in told
    assert "1 file (9 B) became 1 (9 B), 1 delete file applied, 1 deleted row gone" in told
    assert "1 expired, 1 file deleted" in told
    assert re.search(r"\b1 \w*( \w+)?s\b(?! expired)", told.replace("0.0 s", "")) is None, told
