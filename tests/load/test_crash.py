"""A crash at every point of a load and of its adoption: the same label again, and every row is there once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.leader import Leader
from modak.tables.load.adopt import adopt, sweep
from modak.tables.load.run import LoadRequest, load
from modak.tables.repair import repair
from modak.tables.site import Site
from tests.tables.events import Events
from tests.tables.invariants import Invariants, Row

LOADING = (
    "load.before_stage",
    "load.stage_opened",
    "load.staged",
    "load.before_commit",
    "load.committed",
)
ADOPTING = (
    "adopt.before_copy",
    "adopt.files_copied",
    "landing.prepared",
    "catalog.before_commit",
    "catalog.after_commit",
    "adopt.landed",
)
SWEEPING = ("load.before_sweep", "load.swept")
VISITED = (*LOADING, "adopt.before_copy", "adopt.files_copied", "adopt.landed", "adopt.failed", *SWEEPING)


def _body(path: Path, base: int, text: str) -> tuple[Path, set[Row]]:
    rows: set[Row] = {(base + at, at, text) for at in range(12)} | {(base + 50, 240, text)}
    path.write_text("".join(json.dumps({"id": key, "ts": ts, "body": body}) + "\n" for key, ts, body in rows))
    return path, rows


def test_a_load_that_crashes_anywhere_happens_once(
    site: Site, events: Events, leader: Leader, warehouse: str, tmp_path: Path
) -> None:
    rows: set[Row] = {(i, i, f"row {i}") for i in range(251)}
    truth = Invariants(site.dsn, warehouse)
    events.sql("UPDATE modak.tables SET maintenance_policy = '{\"orphan_grace_hours\": 0}'")
    for number, point in enumerate((*LOADING, *ADOPTING, *SWEEPING)):
        body, new = _body(tmp_path / "body", 1000 + 100 * number, point)
        request = LoadRequest(events.name, f"label {number}".replace(" ", "-"), "jsonl")
        crashed = False
        for step in (
            lambda request=request, body=body: load(site, request, body),
            lambda: adopt(site, leader.epoch, events.name),
            lambda: sweep(site),
        ):
            if not crashed:
                faults.arm(Fault(point))
            try:
                step()
            except InjectedFault:
                crashed = True
                faults.arm(None)
                repair(site, leader.epoch)
                step()
        faults.arm(None)
        assert crashed, point
        rows |= new
        assert truth.everything() == rows, point
        truth.check_journal()
        sweep(site)
        truth.check_files()


def test_until_a_load_commits_neither_its_rows_nor_its_label_are_seen(
    site: Site, events: Events, tmp_path: Path
) -> None:
    body, new = _body(tmp_path / "body", 1000, "x")
    before = events.everything()
    seen: list[tuple[set[Row], list[Row]]] = []

    def look(point: str) -> None:
        if point == "load.before_commit":
            seen.append((events.everything(), events.sql("SELECT label FROM modak.load_labels")))

    faults.watch(look)
    faults.arm(Fault("load.before_commit"))
    with pytest.raises(InjectedFault):
        load(site, LoadRequest(events.name, "once", "jsonl"), body)
    faults.watch(None)
    faults.arm(None)
    assert [*seen, (events.everything(), events.sql("SELECT label FROM modak.load_labels"))] == [(before, [])] * 2
    assert load(site, LoadRequest(events.name, "once", "jsonl"), body).replay is False
    assert new & events.everything() == {(1050, 240, "x")}, "the cold rows wait for their adoption"


def test_other_rows_under_a_label_whose_answer_was_lost_change_nothing(
    site: Site, events: Events, leader: Leader, tmp_path: Path
) -> None:
    request = LoadRequest(events.name, "once", "jsonl")
    first, new = _body(tmp_path / "first", 1000, "first")
    same_keys, _ = _body(tmp_path / "same", 1000, "second")
    more, _ = _body(tmp_path / "more", 2000, "second")
    whole = events.everything() | new
    faults.arm(Fault("load.committed"))
    with pytest.raises(InjectedFault):
        load(site, request, first)
    faults.arm(None)
    assert load(site, request, same_keys).replay
    adopt(site, leader.epoch, events.name)
    assert load(site, request, more).replay
    adopt(site, leader.epoch, events.name)
    assert events.everything() == whole
    assert events.sql("SELECT label, state FROM modak.load_labels") == [("once", "committed")]


def test_a_crash_after_a_label_has_failed_leaves_it_failed(
    site: Site, events: Events, leader: Leader, tmp_path: Path
) -> None:
    body, _ = _body(tmp_path / "body", 1000, "x")
    load(site, LoadRequest(events.name, "poisoned", "jsonl"), body)
    files = events.sql("SELECT f ->> 'path' FROM modak.load_labels, jsonb_array_elements(files -> 'data') f")
    Path(files[0][0].removeprefix("file://")).unlink()
    faults.arm(Fault("adopt.failed"))
    with pytest.raises(InjectedFault):
        adopt(site, leader.epoch, events.name)
    faults.arm(None)
    assert adopt(site, leader.epoch, events.name).labels == 0
    assert events.sql("SELECT state FROM modak.load_labels") == [("failed",)]
