"""The journal over HTTP: how operations ended, what failed, and page after page."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from modak.core.errors import Refused
from modak.runtime.leader import Leader
from tests.maintenance.foreign import equality_delete
from tests.maintenance.lake import Lake
from tests.runtime.journal import ENDS, FAILURE, begun, ended
from tests.tables.events import Events

PATH = "/api/v1/operations"


def asked(api: TestClient, **params: Any) -> list[dict[str, Any]]:
    answer = api.get(PATH, params=params)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()
    return found


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [each["op_id"] for each in found if each["op_id"] in ENDS]


@pytest.fixture
def journal(api: TestClient, events: Events) -> TestClient:
    """The API over a table whose journal has one operation of each end."""
    events.register()
    ended(events.site, events.site.reader.state(events.name).table.table_id)
    return api


def test_operations_are_chosen_by_how_they_ended(journal: TestClient) -> None:
    assert ids(asked(journal)) == list(ENDS)
    for phase in ("done", "failed", "abandoned"):
        [found] = [each for each in asked(journal, phase=phase) if each["op_id"] in ENDS]
        assert (found["op_id"], found["phase"], found["kind"]) == (f"op-{phase}", phase, ENDS[f"op-{phase}"])
        assert (found["table"], found["counters"]) == ("public.events", {"rows": 7})
    assert asked(journal, phase="planned") == []
    assert ids(asked(journal, kind="retention")) == ["op-abandoned"]
    assert asked(journal, kind="retention", phase="done") == []
    refused = journal.get(PATH, params={"phase": "lost"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "api.invalid")


def test_only_what_ended_with_an_error_is_a_failure(journal: TestClient) -> None:
    [found] = asked(journal, failed=True)
    assert (found["op_id"], found["error"]) == ("op-failed", FAILURE)
    assert asked(journal, failed=True, phase="abandoned") == []


def test_the_journal_is_read_page_after_page(api: TestClient, events: Events) -> None:
    events.register()
    begun(events.site, events.site.reader.state(events.name).table.table_id, 7)
    seen: list[str] = []
    page = asked(api, kind="many", limit=3)
    while page:
        seen += [each["op_id"] for each in page]
        page = asked(api, kind="many", limit=3, before=page[-1]["started_at"])
    assert seen == [f"op-{number}" for number in range(7, 0, -1)]
    # A moment without a zone is one of UTC.
    [first] = asked(api, before="2024-01-01T00:02:00")
    assert first["op_id"] == "op-1"


def test_a_real_failure_is_in_the_journal_with_its_reason(api: TestClient, events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    assert asked(api, failed=True) == []
    equality_delete(Lake(events, leader), [[1]], accepted=False)
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    with pytest.raises(Refused, match="not ours"):
        events.tier(leader)
    [found] = asked(api, failed=True)
    assert asked(api, phase="failed") == [found]
    assert asked(api, phase="abandoned") == []
    assert (found["table"], found["kind"]) == ("public.events", "tier")
    assert found["error"].startswith("lake.foreign_rows: ")
    assert found["finished_at"] is not None
    assert [each["op_id"] for each in asked(api, phase="done", kind="tier")] != [found["op_id"]]
