"""Every fault point in the source is crashed at by some test, and a real process is killed there by some test.

A new point fails here until both visit it.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import modak

SOURCE = Path(modak.__file__).parent
DEFINITION = SOURCE / "core" / "faults.py"
NAME = re.compile(r"[a-z]+\.[a-z_]+")
CALL = re.compile(r"\breach\(([^)]*)\)")

CRASH_TESTS = (
    "tests.catalog.test_faults",
    "tests.catalog.test_migrate",
    "tests.cli.test_demo",
    "tests.entities.test_crash",
    "tests.ingest.test_crash",
    "tests.lake.test_locate",
    "tests.load.test_crash",
    "tests.postgres.changes.test_slot",
    "tests.postgres.changes.test_stream",
    "tests.postgres.changes.test_transactions",
    "tests.maintenance.test_crash",
    "tests.maintenance.test_erase",
    "tests.maintenance.test_health",
    "tests.maintenance.test_policy",
    "tests.maintenance.test_requests",
    "tests.mirror.test_altered",
    "tests.mirror.test_copy_crash",
    "tests.mirror.test_heap_retention_crash",
    "tests.mirror.test_reanchor_crash",
    "tests.measurements.test_cluster",
    "tests.measurements.test_crash",
    "tests.measurements.test_export",
    "tests.measurements.test_sort",
    "tests.runtime.test_operators",
    "tests.runtime.test_publishing",
    "tests.runtime.test_withdrawing",
    "tests.profiles.test_crash",
    "tests.mirror.test_pump_crash",
    "tests.storage.test_objects",
    "tests.tables.test_amend",
    "tests.tables.test_backfill",
    "tests.tables.test_crash_aside",
    "tests.tables.test_crash_points",
    "tests.tables.test_fold_crash",
    "tests.tables.test_foreign_commits",
    "tests.tables.test_keep_heap",
    "tests.tables.test_retention",
    "tests.tables.test_verify_repair",
)
"""Modules whose tests are parametrized by `point`, or that list in VISITED what they crash at."""

KILL_TESTS = (
    "tests.catalog.test_kill_aside",
    "tests.entities.test_kill",
    "tests.ingest.test_kill",
    "tests.maintenance.test_kill",
    "tests.maintenance.test_kill_aside",
    "tests.measurements.test_cluster",
    "tests.measurements.test_crash",
    "tests.measurements.test_export",
    "tests.mirror.test_anchor_kill",
    "tests.mirror.test_copy_kill",
    "tests.mirror.test_pump_kill",
    "tests.profiles.test_kill",
    "tests.runtime.test_publishing_kill",
    "tests.tables.test_fold_kill",
    "tests.tables.test_kill",
    "tests.tables.test_kill_aside",
    "tests.tables.test_retention_kill",
)
"""Modules that list in KILLED where a real process dies in them by SIGKILL."""

NOT_KILLED = {
    "read.manifest_read": "a read changes nothing",
    "read.rows_read": "a read changes nothing",
    "sort.before_upload": "inside a Spark task, whose files carry the job's name and go with it",
    "sort.uploaded": "inside a Spark task, whose files carry the job's name and go with it",
    "verify.before_repair": "one Postgres transaction, made again by running it again",
    "verify.after_repair": "one Postgres transaction, made again by running it again",
}
"""Points that are left out there, and why an exception shows as much."""


def calls() -> list[str]:
    """What `reach` is given, as it stands in the source."""
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path != DEFINITION]
    return [argument.strip() for path in files for argument in CALL.findall(path.read_text(encoding="utf-8"))]


def visited(module_name: str) -> set[str]:
    module = importlib.import_module(module_name)
    return {*getattr(module, "VISITED", ()), *_parameters(module)}


def _parameters(module: object) -> Iterator[str]:
    marks = [mark for test in vars(module).values() for mark in getattr(test, "pytestmark", ()) if callable(test)]
    for mark in marks:
        if mark.name != "parametrize":
            continue
        names, values = mark.args[0], mark.args[1]
        if names == "point":
            yield from values
        elif "point" in names and not isinstance(names, str):
            yield from (value[names.index("point")] for value in values)


def test_every_point_is_a_literal_of_the_form_flow_dot_step() -> None:
    assert calls()
    assert [call for call in calls() if not (call[0] == call[-1] == '"' and NAME.fullmatch(call[1:-1]))] == []


def test_every_point_stands_at_one_place() -> None:
    assert {point: times for point, times in Counter(calls()).items() if times > 1} == {}


def test_every_point_is_visited_by_a_crash_test() -> None:
    everywhere = {call.strip('"') for call in calls()}
    assert everywhere - set().union(*map(visited, CRASH_TESTS)) == set()


@pytest.mark.parametrize("module", CRASH_TESTS)
def test_no_crash_test_visits_a_point_that_is_gone(module: str) -> None:
    assert visited(module) - {call.strip('"') for call in calls()} == set()


def killed(module_name: str) -> set[str]:
    return set(importlib.import_module(module_name).KILLED)


def test_a_process_is_killed_at_every_point() -> None:
    everywhere = {call.strip('"') for call in calls()}
    assert everywhere - set().union(*map(killed, KILL_TESTS)) == set(NOT_KILLED)


@pytest.mark.parametrize("module", KILL_TESTS)
def test_no_process_is_killed_at_a_point_that_is_gone(module: str) -> None:
    assert killed(module) - {call.strip('"') for call in calls()} == set()
