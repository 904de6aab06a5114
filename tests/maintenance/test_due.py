"""When a table gets its scheduled passes: counted from its registration, then from its last pass, whoever leads."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from modak.core.clock import FrozenClock
from modak.core.names import TableName
from modak.runtime import maintaining
from modak.runtime.maintaining import Maintainer
from modak.tables.maintenance import erasures, requests
from modak.tables.site import Site
from tests.maintenance.test_policy import NAME, site

__all__ = ["site"]


def test_a_table_is_due_an_interval_after_its_registration_and_after_each_pass(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, done = FrozenClock(datetime.now(UTC)), list[TableName]()
    interval = site.settings.maintenance.interval_seconds
    monkeypatch.setattr(site, "clock", clock)

    def run(_site: Site, _leader: object, name: TableName, _stopping: object) -> None:
        done.append(name)
        with site.connect(autocommit=True) as conn:
            conn.execute(
                "INSERT INTO modak.lake_stats (table_id, maintained_at) SELECT table_id, %(now)s FROM modak.tables"
                " ON CONFLICT (table_id) DO UPDATE SET maintained_at = %(now)s",
                {"now": clock.now()},
            )

    monkeypatch.setattr(maintaining, "run", run)

    def lead() -> Maintainer:
        nobody: Any = SimpleNamespace(epoch=None)
        return Maintainer(site, nobody, lambda: False)

    first = lead()
    first.turn()
    clock.sleep(interval - 60)
    first.turn()
    assert done == [], "not due yet"
    clock.sleep(120)
    lead().turn()
    assert done == [NAME], "leads that are shorter than the interval do not put it off"
    successor = lead()
    successor.turn()
    clock.sleep(interval - 1)
    successor.turn()
    assert done == [NAME]
    clock.sleep(1)
    successor.turn()
    assert done == [NAME] * 2


def test_what_is_asked_for_during_a_turn_is_done_before_the_next_table_that_is_due(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, asked = list[str](), list[Any]()
    due = [SimpleNamespace(name=TableName("public", name)) for name in ("one", "two", "three", "four")]

    def run(_site: Site, _leader: object, name: TableName, *_: object) -> None:
        done.append(f"pass {name.name}")
        if name.name == "one":
            asked.append(erasures.Asked(1, TableName("public", "three"), "id = 5"))
            asked.append(requests.Claimed(1, TableName("public", "four")))

    def next_of(kind: type) -> Any:
        return next((each for each in asked if isinstance(each, kind)), None)

    def claim(kind: type) -> Any:
        found = next_of(kind)
        if found is not None:
            asked.remove(found)
        return found

    monkeypatch.setattr(maintaining, "run", run)
    monkeypatch.setattr(maintaining, "erase", lambda _s, _l, each, _stop: done.append(f"erase {each.table.name}"))
    monkeypatch.setattr(maintaining, "answer", lambda _s, _l, each, _stop: done.append(f"asked {each.table.name}"))
    monkeypatch.setattr(erasures, "asked_for", lambda _site: next_of(erasures.Asked) is not None)
    monkeypatch.setattr(erasures, "claim", lambda _writer: claim(erasures.Asked))
    monkeypatch.setattr(requests, "waiting", lambda _site: next_of(requests.Claimed) is not None)
    monkeypatch.setattr(requests, "claim", lambda _writer: claim(requests.Claimed))
    nobody: Any = SimpleNamespace(epoch=None)
    maintainer = Maintainer(site, nobody, lambda: False)
    monkeypatch.setattr(maintainer, "_due", lambda: due)
    maintainer.turn()
    assert done == ["pass one", "erase three", "asked four", "pass two", "pass three"], "four has just had its pass"
