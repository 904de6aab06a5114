"""A load is staged while a fold is under way: what came later wins, whoever lands first."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from modak.core import faults
from modak.runtime.leader import Leader
from modak.tables.fold.run import fold
from modak.tables.site import Site
from tests.load.conftest import Api, adopted
from tests.tables.corrections import Corrections
from tests.tables.events import Events
from tests.tables.test_foreign_commits import once_at


@pytest.mark.parametrize(("point", "again"), [("journal.after_begin", True), ("fold.after_write", False)])
def test_a_load_that_is_staged_in_mid_fold_replaces_older_corrections_and_gives_way_to_newer_ones(
    api: Api, site: Site, leader: Leader, events: Events, point: str, again: bool
) -> None:
    corrections = Corrections(events)
    for key in (0, 5):
        corrections.upsert(1000 + key, key, "older")
    batch = "".join(json.dumps({"id": 1000 + key, "ts": key, "body": "loaded"}) + "\n" for key in range(12)).encode()

    def stage() -> None:
        assert api.post(batch, "staged").json()["state"] == "staged"
        corrections.upsert(1002, 2, "newer")

    once_at(point, stage)
    with capture_logs() as logged:
        fold(site, leader.epoch, events.name)
    faults.watch(None)
    because = [entry["detail"] for entry in logged if entry["event"] == "fold.again"]
    assert because == (["A load was staged before this fold looked."] if again else [])
    adopted(site, leader, events)
    expected = {(1000 + key, key, "loaded") for key in range(12)} - {(1002, 2, "loaded")} | {(1002, 2, "newer")}
    assert {row for row in events.cold() if row[0] >= 1000} == expected
    fold(site, leader.epoch, events.name)
    assert events.delta() == {}
    assert {row for row in events.lake() if row[0] >= 1000} == expected


@pytest.mark.parametrize("gone", [False, True])
def test_a_load_that_lands_in_mid_fold_is_not_replaced_by_older_corrections(
    api: Api, site: Site, leader: Leader, events: Events, gone: bool
) -> None:
    corrections = Corrections(events)
    corrections.upsert(1000, 0, "older")
    if gone:
        corrections.delete(1005, 5)
    else:
        corrections.upsert(1005, 5, "older")
    keys = range(1001, 1013)
    batch = "".join(json.dumps({"id": key, "ts": key - 1000, "body": "loaded"}) + "\n" for key in keys).encode()

    def land() -> None:
        assert api.post(batch, "landed").json()["state"] == "staged"
        adopted(site, leader, events)

    once_at("fold.after_write", land)
    with capture_logs() as logged:
        fold(site, leader.epoch, events.name)
    faults.watch(None)
    because = [entry["detail"] for entry in logged if entry["event"] == "fold.again"]
    assert because == ["An ingest or load has landed since this fold looked."]
    expected = {(1000, 0, "older")} | {(key, key - 1000, "loaded") for key in keys}
    assert {row for row in events.lake() if row[0] >= 1000} == expected
    assert events.delta() == {}
