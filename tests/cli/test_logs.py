"""The log: JSON for machines, sentences for people at a terminal, event and fields in a pipe, never a secret."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from modak.cli.life import describe


def test_json_has_one_object_per_event_with_all_its_fields(reset_logs: Any, log_lines: Callable[[], list[str]]) -> None:
    reset_logs.configure("json")
    structlog.get_logger().info("tiering.exported", table="public.events", rows=12, password="hunter2")
    (line,) = log_lines()
    entry = json.loads(line)
    assert (entry["event"], entry["rows"], entry["level"], entry["password"]) == ("tiering.exported", 12, "info", "***")
    assert entry["timestamp"].endswith("Z")


def test_a_pipe_gets_event_and_fields_on_one_line(reset_logs: Any, log_lines: Callable[[], list[str]]) -> None:
    reset_logs.configure("console")
    structlog.get_logger().info("tiering.advanced", table="public.events", cut_line="2026-01-01 00:00:00+00")
    (line,) = log_lines()
    assert line.endswith("info    tiering.advanced table=public.events cut_line='2026-01-01 00:00:00+00'")
    assert "\x1b" not in line


def test_a_terminal_gets_sentences(
    reset_logs: Any, log_lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.cli.logs.on_terminal", lambda _stream: True)
    reset_logs.configure("console")
    structlog.get_logger().info(
        "tiering.exported",
        table="public.events",
        rows=1000000,
        bytes=61_300_000,
        seconds=2.5,
        rows_per_second=400_000,
        files=7,
    )
    (line,) = log_lines()
    assert line.endswith("exported   public.events: 1,000,000 rows, 61.3 MB, 2.5 s, 400,000 rows/s, 7 files")


def test_progress_in_a_terminal_is_overwritten_by_what_comes_next(
    reset_logs: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.cli.logs.on_terminal", lambda _stream: True)
    reset_logs.configure("console")
    for done in (1, 2):
        structlog.get_logger().info("tiering.progress", table="t", tasks=done, of=2)
    structlog.get_logger().info("tiering.advanced", table="t", cut_line="7")
    first, second, rest = capsys.readouterr().err.split("\r")
    assert first.startswith("\x1b[2K")
    assert first.endswith("1 of 2 tasks are done")
    assert second.endswith("2 of 2 tasks are done")
    assert rest.startswith("\x1b[2K")
    assert rest.endswith("the cut-line is now 7\n")


def test_secrets_in_messages_of_libraries_are_masked(reset_logs: Any, log_lines: Callable[[], list[str]]) -> None:
    reset_logs.configure("console")
    logging.getLogger("some.library").warning("retrying postgresql://me:hunter2@host/db")
    text = "\n".join(log_lines())
    assert "retrying postgresql://me:***@host/db" in text
    assert "hunter2" not in text


def test_libraries_that_talk_much_are_quiet(reset_logs: Any, log_lines: Callable[[], list[str]]) -> None:
    reset_logs.configure("console")
    logging.getLogger("py4j.clientserver").warning("Closing down clientserver connection")
    logging.getLogger("some.library").info("hello")
    assert log_lines() == []


def test_an_exception_is_logged_masked(reset_logs: Any, log_lines: Callable[[], list[str]]) -> None:
    reset_logs.configure("json")
    try:
        raise RuntimeError("password=hunter2")
    except RuntimeError:
        structlog.get_logger().exception("cycle.failed", code="x")
    text = "\n".join(log_lines())
    assert "RuntimeError" in text
    assert "hunter2" not in text


def test_the_level_keeps_detail_away(reset_logs: Any, log_lines: Callable[[], list[str]]) -> None:
    reset_logs.configure("console", level="warning")
    structlog.get_logger().info("tiering.sealed", table="t", partitions=1)
    structlog.get_logger().warning("grid.gap", table="t", message="there is a gap")
    assert len(log_lines()) == 1


@pytest.mark.parametrize(
    ("event", "fields", "text"),
    [
        ("tiering.sealed", {"table": "t", "partitions": 1}, "t: 1 partition; late writes"),
        ("tiering.sealed", {"table": "t", "partitions": ["a", "b", "c", "d"]}, "4 partitions (a, b, c and 1 more)"),
        ("tiering.committed", {"table": "t", "rows": 5, "snapshot": 7}, "t: 5 rows in lake snapshot 7"),
        ("tiering.committed", {"table": "t", "rows": 1, "snapshot": 7}, "t: 1 row in lake snapshot 7"),
        ("tiering.advanced", {"table": "t", "cut_line": "100"}, "t: the cut-line is now 100"),
        ("reclaim.dropped", {"table": "t", "partition": "t_p1"}, "t: heap partition t_p1"),
        ("premake.made", {"table": "t", "partition": "t_p9"}, "t_p9"),
        ("grid.gap", {"table": "t", "message": "no partition for 1 to 2"}, "no partition for 1 to 2"),
        ("leader.acquired", {"epoch": 3}, "epoch 3"),
        ("spark.starting", {"master": "local[*]"}, "Spark on local[*], which takes some seconds"),
        ("cycle.failed", {"table": "t", "code": "postgres.busy", "hint": "wait"}, "t: postgres.busy (wait)"),
    ],
)
def test_each_step_of_a_life_has_a_sentence(event: str, fields: dict[str, Any], text: str) -> None:
    step = describe(event, fields)
    assert step is not None
    assert text in step.text


def test_an_event_without_its_fields_falls_back_to_plain_text() -> None:
    assert describe("tiering.exported", {"table": "t"}) is None
    assert describe("something.else", {}) is None
