"""What operators change over HTTP: policies, storage profiles, and going on after a foreign commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from modak.core.errors import Refused
from modak.runtime.leader import Leader
from tests.maintenance.foreign import equality_delete
from tests.maintenance.lake import Lake
from tests.tables.events import Events

POLICY = "/api/v1/tables/public.events/policy"
PROFILES = "/api/v1/storage-profiles"

Policy = dict[str, tuple[Any, str]]


def shown(answer: Any) -> Policy:
    """Every key with its value and where it comes from."""
    assert answer.status_code == 200, answer.text
    return {each["key"]: (each["value"], each["source"]) for each in answer.json()}


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_policy_is_set_unset_and_reset_and_every_answer_is_what_is_in_force(api: TestClient, events: Events) -> None:
    events.register()
    defaults = shown(api.get(POLICY))
    assert {source for _, source in defaults.values()} == {"default"}
    assert defaults["orphan_sweep_enabled"] == (False, "default")
    wanted = {"snapshot_max_count": 77, "snapshot_retention_hours": "6", "orphan_sweep_enabled": True}
    changed = shown(api.patch(POLICY, json={"set": wanted}))
    own = {"snapshot_max_count": 77, "snapshot_retention_hours": 6, "orphan_sweep_enabled": True}
    assert changed == shown(api.get(POLICY)) == defaults | {key: (value, "table") for key, value in own.items()}
    assert events.sql("SELECT maintenance_policy FROM modak.tables") == [(own,)]

    both = shown(api.patch(POLICY, json={"set": {"orphan_sweep_enabled": False}, "unset": ["snapshot_max_count"]}))
    assert both["orphan_sweep_enabled"] == (False, "table")
    assert both["snapshot_max_count"] == defaults["snapshot_max_count"]
    assert both["snapshot_retention_hours"] == (6, "table")

    anew = shown(api.patch(POLICY, json={"set": {"snapshot_max_count": 50}, "reset": True}))
    assert anew == defaults | {"snapshot_max_count": (50, "table")}
    assert shown(api.patch(POLICY, json={"reset": True})) == defaults
    assert events.sql("SELECT maintenance_policy FROM modak.tables") == [({},)]


def test_a_change_of_a_policy_that_is_wrong_in_part_changes_nothing(api: TestClient, events: Events) -> None:
    events.register()
    before = shown(api.get(POLICY))
    for change, said in (
        ({}, "nothing to change"),
        ({"set": {}, "unset": [], "reset": False}, "nothing to change"),
        ({"set": {"snapshot_max_count": 77, "snapshot_max_cuont": 1}}, "Did you mean snapshot_max_count?"),
        ({"unset": ["nothing_like_it"]}, "no policy key"),
        ({"set": {"snapshot_max_count": 77}, "unset": ["snapshot_max_count"]}, "both set and unset"),
        ({"set": {"snapshot_max_count": 77, "orphan_sweep_enabled": 1}}, "true or false"),
        ({"set": {"snapshot_max_count": True}}, "whole number"),
        ({"set": {"snapshot_max_count": 7.5}}, "whole number"),
        ({"set": {"snapshot_max_count": None}}, "set"),
    ):
        answer = api.patch(POLICY, json=change)
        assert answer.status_code == 400, change
        assert said in answer.text, answer.text
    assert shown(api.get(POLICY)) == before
    assert code(api.patch("/api/v1/tables/public.other/policy", json={"reset": True})) == (
        404,
        "catalog.not_registered",
    )


def test_a_storage_profile_is_created_once_and_never_changed(api: TestClient, events: Events, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {
        "name": "archive",
        "warehouse": str(tmp_path / "archive"),
        "config": {},
        "credentials": None,
    }
    made = api.post(PROFILES, json=wanted)
    assert (made.status_code, made.json()["name"], made.json()["is_default"]) == (201, "archive", False)
    again = api.post(PROFILES, json=wanted)
    assert (again.status_code, again.json()) == (201, made.json())
    refused = api.post(PROFILES, json={**wanted, "warehouse": str(tmp_path / "elsewhere")})
    assert code(refused) == (409, "profile.differs")
    assert "warehouse" in refused.json()["error"]["message"]
    assert [each for each in api.get(PROFILES).json() if each["name"] == "archive"] == [made.json()]
    assert code(api.post(PROFILES, json={**wanted, "name": "no name"})) == (400, "api.invalid")

    with_access = {
        "name": "far",
        "warehouse": "s3://far/lake",
        "config": {"region": "eu-north-1"},
        "credentials": "far",
    }
    far = api.post(PROFILES, json=with_access).json()
    assert (far["warehouse"], far["config"], far["credentials_ref"]) == (
        "s3://far/lake",
        {"client.region": "eu-north-1"},
        "far",
    )
    api.post(PROFILES, json={**wanted, "default": True})
    assert [each["name"] for each in api.get(PROFILES).json() if each["is_default"]] == ["archive"]


def test_publication_goes_on_from_a_foreign_commit_that_is_accepted(
    api: TestClient, events: Events, leader: Leader
) -> None:
    events.register()
    events.tier(leader)
    accepted = api.post("/api/v1/tables/public.events/accept")
    assert accepted.status_code == 200
    assert "nothing to accept" in accepted.json()["message"]

    ours = events.site.reader.state(events.name).cutline.snapshot_id
    equality_delete(Lake(events, leader), [[1]], accepted=False)
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    with pytest.raises(Refused, match="not ours"):
        events.tier(leader)
    frozen = api.get("/api/v1/tables/public.events").json()
    theirs = frozen["registration"]["frozen"]["snapshot"]
    assert (theirs != ours, frozen["cutline"]["snapshot_id"]) == (True, ours)
    [entry] = api.get("/api/v1/tables", params={"attention": True}).json()
    assert entry["frozen"] is not None

    accepted = api.post("/api/v1/tables/public.events/accept")
    assert accepted.json() == {"message": f"public.events: snapshot {theirs} accepted; publication goes on."}
    after = api.get("/api/v1/tables/public.events").json()
    assert (after["registration"]["frozen"], after["cutline"]["snapshot_id"]) == (None, theirs)
    events.tier(leader)
    assert api.get("/api/v1/tables/public.events").json()["status"]["cut_line"] == "300"
    assert code(api.post("/api/v1/tables/public.other/accept")) == (404, "catalog.not_registered")
