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


def test_one_table_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    show_one(ROW)
    lines = capsys.readouterr().out.splitlines()
    assert "cut-line T           1794787200000" in lines
    assert "retention line R     –" in lines
    assert "lake                 61.3 MB in 7 files" in lines
    assert lines[-1] == "look at There is no partition for 1 to 2."


def test_without_tables_it_says_how_to_add_one(capsys: pytest.CaptureFixture[str]) -> None:
    show(())
    assert "modak-worker register" in capsys.readouterr().out


def test_states_come_in_the_order_of_a_partitions_life() -> None:
    assert partitions({"dropped": 1, "hot": 2, "tiering": 3}) == "2 hot, 3 tiering, 1 dropped"
    assert partitions({}) == "none"
