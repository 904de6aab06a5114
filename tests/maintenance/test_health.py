"""Lake health: counted, warned about once, and collected whether or not maintenance is on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from modak import config
from modak.catalog import pins
from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.runtime.maintaining import serving
from modak.tables.maintenance import health
from modak.tables.maintenance.policy import resolve
from tests.cli.conftest import modak  # noqa: F401
from tests.maintenance.lake import Lake
from tests.maintenance.test_requests import environ

__all__ = ["environ"]


def policy(**values: Any) -> Any:
    return resolve(config.load({}), values)


WELL = {
    "files": 10,
    "delete_ratio": 0.0,
    "files_under_deletes": 0,
    "data_manifests": 3,
    "small_files": 2,
    "snapshots": 9,
}


@pytest.mark.parametrize(
    ("seen", "name"),
    [
        ({"delete_ratio": 0.1}, "delete_debt"),
        ({"files_under_deletes": 100}, "delete_files"),
        ({"equality_deletes": 1}, "equality_deletes"),
        ({"data_manifests": 100}, "manifest_sprawl"),
        ({"small_files": 40, "files": 41}, "small_files"),
        ({"snapshots": 900}, "snapshots"),
        ({"oldest_pin_seconds": 6 * 3600}, "old_pin"),
        ({"frozen": True}, "frozen"),
        ({"missing": True}, "missing"),
    ],
)
def test_every_warning_has_a_threshold_and_says_what_to_do(seen: dict[str, Any], name: str) -> None:
    assert health.warn(WELL, policy()) == ()
    (found,) = health.warn({**WELL, **seen}, policy())
    assert found.name == name
    assert found.value >= found.threshold
    assert found.hint


def test_a_warning_about_a_pass_that_is_off_names_the_switch() -> None:
    (found,) = health.warn({**WELL, "delete_ratio": 0.5}, policy(delete_compaction_enabled=False))
    assert "delete_compaction_enabled is false" in found.hint


def collect(lake: Lake) -> Any:
    health.collect(lake.site, lake.site.writer(lake.leader.epoch), lake.events.name)
    (found,) = health.read(lake.site)
    return found


def test_what_is_counted_is_what_the_lake_holds(lake: Lake) -> None:
    lake.policy(rewrite_enabled=False)
    lake.correct(*range(30))
    pin = pins.begin(lake.site.dsn, lake.events.name)
    found = collect(lake)
    counters = found.counters
    assert (counters["files"], counters["records"], counters["deleted_rows"]) == (3, 230, 30)
    assert (counters["delete_files"], counters["files_under_deletes"]) == (1, 1)
    assert counters["delete_ratio"] == round(30 / 230, 4)
    assert counters["files_by_size"]["under_1mb"] == 3
    assert counters["snapshots"] == 2
    assert counters["manifests"] == counters["data_manifests"] + counters["delete_manifests"]
    assert counters["bytes"] == counters["bytes_live"] == sum(file.file.bytes for file in lake.files())
    assert (counters["pins"], counters["oldest_pinned_snapshot"]) == (1, pin.snapshot_id)
    assert [one["name"] for one in found.warnings] == ["delete_debt"]
    assert found.policy["rewrite_enabled"] is False
    lake.maintain()
    after = collect(lake)
    assert after.warnings == []
    assert after.counters["bytes_reclaimable"] > 0
    assert after.counters["delete_files"] == 0


def test_a_new_warning_is_logged_once(lake: Lake) -> None:
    lake.policy(maintenance_enabled=False)
    lake.correct(*range(30))
    with capture_logs() as logged:
        collect(lake)
        lake.correct(31)
        collect(lake)
    assert [entry["warning"] for entry in logged if entry["event"] == "lake.health"] == ["delete_debt"]


def test_a_table_that_has_not_changed_is_not_listed_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    before = collect(lake).counters
    monkeypatch.setattr(lake.site.lake, "files", lambda *_args, **_more: pytest.fail("listed again"))
    assert collect(lake).counters == before


def test_disabled_passes_stay_disabled_and_health_still_shows_their_debt(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.policy(maintenance_enabled=False)
    lake.correct(*range(30))
    assert not any(one.changed for one in lake.maintain().passes)
    monkeypatch.setattr("modak.runtime.maintaining._health_seconds", lambda _site: 0.1)
    with serving(lake.site, lake.leader):
        until = time.monotonic() + 60
        while not (health.read(lake.site)[0].warnings) and time.monotonic() < until:
            time.sleep(0.1)
    (found,) = health.read(lake.site)
    assert [one["name"] for one in found.warnings] == ["delete_debt"]
    assert "maintenance_enabled is false" in found.warnings[0]["hint"]
    assert sum(file.deletes for file in lake.files()) == 1


@pytest.mark.parametrize("point", ["health.before_write", "health.after_write"])
def test_a_crash_while_collecting_is_made_good_by_the_next_look(lake: Lake, point: str) -> None:
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        collect(lake)
    faults.arm(None)
    assert collect(lake).counters["files"] == 2


def test_the_command_shows_tables_and_warnings(lake: Lake, modak: Any, environ: dict[str, str]) -> None:  # noqa: F811
    assert "not collected yet" in modak("health", **environ).stdout
    lake.correct(*range(30))
    collect(lake)
    shown = modak("health", "--table", "public.events", **environ)
    assert shown.exit_code == 0, shown.output
    assert "look at delete_debt" in shown.stdout
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "snapshots 0 of 900" not in lines
    assert {"delete_debt 0.1304 of 0.1", "snapshots 2 of 900", "snapshot_max_count 1000 (default)"} <= set(lines)
    assert "snapshot_max_count" not in modak("health", **environ).stdout
    (found,) = json.loads(modak("health", "--json", **environ).stdout)
    assert found["table"] == "public.events"
    assert found["counters"]["files"] == 3
    assert found["warnings"][0]["name"] == "delete_debt"
    assert found["policy"]["snapshot_max_count"] == 1000
    missing = modak("health", "--table", "public.nothing", **environ)
    assert (missing.exit_code, "not registered" in missing.stderr) == (1, True)


def test_a_table_that_has_not_changed_is_not_opened_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    collect = health.collect

    def watched(site: Any, writer: Any, name: Any) -> None:
        looked.append(str(name))
        collect(site, writer, name)

    monkeypatch.setattr(health, "collect", watched)
    writer = lake.site.writer(lake.leader.epoch)

    def look() -> int:
        looked.clear()
        assert health.collect_all(lake.site, writer) == 1
        return len(looked)

    assert look() == 1
    before = health.read(lake.site)[0]
    assert look() == 0
    after = health.read(lake.site)[0]
    assert after.counters == before.counters
    assert before.collected_at is not None
    assert after.collected_at is not None
    assert after.collected_at > before.collected_at
    lake.policy(snapshot_max_count=1)
    assert (look(), look()) == (1, 0)
    lake.add(50)
    assert (look(), look()) == (1, 0)
    with lake.site.connect(autocommit=True) as conn:
        conn.execute("SELECT modak_read_begin('public.events')")
        assert (look(), look()) == (1, 1), "a pin grows older"
        conn.execute("DELETE FROM modak.read_pins")
    assert (look(), look()) == (1, 0)


def test_one_table_that_cannot_be_looked_at_holds_up_no_other(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_site: Any, _state: Any, _policy: Any, _before: Any) -> dict[str, Any]:
        raise ValueError("the metadata is no JSON")

    monkeypatch.setattr(health, "count", crash)
    with capture_logs() as said:
        assert health.collect_all(lake.site, lake.site.writer(lake.leader.epoch)) == 0
    assert [each["event"] for each in said] == ["health.crashed"]
