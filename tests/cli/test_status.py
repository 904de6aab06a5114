"""What `status` shows of a table: everything at a glance, one table in full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from modak.cli.commands.status import partitions, show, show_one
from modak.core.names import TableName

ROW: Any = SimpleNamespace(
    name=TableName("public", "events"),
    mode="tiered",
    keep_heap=False,
    cut_line="1794787200000",
    snapshot_id=7712,
    retention_line=None,
    partitions={"tiered": 2, "hot": 3, "dropped": 5, "sealing": 0},
    heap_bytes=1_648_000,
    lake_bytes=61_300_000,
    lake_files=7,
    lag="7,669,537",
    delta_backlog=1200,
    pins=1,
    last_operation="tier, done 02:07",
    problems=("There is no partition for 1 to 2.",),
    metadata_location="file:///lake/metadata/00001.json",
)


def test_the_overview_has_a_line_per_table_and_names_its_problems(capsys: pytest.CaptureFixture[str]) -> None:
    show((ROW,))
    heading, line, problem = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "table"
    for part in ("public.events", "1794787200000", "7712", "3 hot, 2 tiered, 5 dropped", "1.6 MB", "61.3 MB", "1,200"):
        assert part in line
    assert problem == "look at public.events: There is no partition for 1 to 2."


def test_the_retention_line_has_a_column_where_a_table_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    show((ROW,))
    assert "retention r" not in capsys.readouterr().out
    show((ROW, SimpleNamespace(**{**vars(ROW), "retention_line": "1794700800000"})))
    heading, without, line, *_ = capsys.readouterr().out.splitlines()
    at = heading.index("retention r")
    assert line[at:].startswith("1794700800000")
    assert without[at:].startswith("–")


def test_several_tables_stay_a_grid_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.cli.commands.status.fits", lambda columns, _rows: len(columns) <= 8)
    show((ROW, ROW))
    heading, *_ = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["table", "cut-line", "t"]
    assert "snapshot" not in heading
    assert "last operation" in heading
    show((ROW,))
    assert "snapshot S           7712" in capsys.readouterr().out, "one table has room for all of it"


def test_one_table_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    show_one(ROW)
    lines = capsys.readouterr().out.splitlines()
    assert "cut-line T           1794787200000" in lines
    assert "retention line R     –" in lines
    assert "lake                 61.3 MB in 7 files" in lines
    assert lines[-1] == "look at: There is no partition for 1 to 2."


def test_a_table_that_keeps_its_heap_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    kept = SimpleNamespace(**{**vars(ROW), "keep_heap": True})
    show((kept,))
    assert "  tiered, keep-heap  " in capsys.readouterr().out
    show_one(kept)
    assert "mode                 tiered, keep-heap\n" in capsys.readouterr().out


def test_without_tables_it_says_how_to_add_one(capsys: pytest.CaptureFixture[str]) -> None:
    show(())
    assert "modak-worker register" in capsys.readouterr().out


def test_states_come_in_the_order_of_a_partitions_life() -> None:
    assert partitions({"dropped": 1, "hot": 2, "tiering": 3}) == "2 hot, 3 tiering, 1 dropped"
    assert partitions({}) == "none"
