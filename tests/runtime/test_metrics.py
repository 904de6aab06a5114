"""`/metrics`: the promised names, the truth of the numbers, and files in `deploy/` that use only what is exported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, LiteralString

import pytest
import structlog
import yaml
from prometheus_client.parser import text_string_to_metric_families
from psycopg.types.json import Jsonb
from starlette.testclient import TestClient

from modak.catalog.mirrors import MirrorHealth, note_health
from modak.catalog.vitals import Vitals, begin_tail
from modak.core.clock import FrozenClock
from modak.runtime import daemon, metrics
from modak.runtime.leader import Leader
from modak.runtime.pulse import Pulse
from modak.runtime.web.app import create_app
from modak.runtime.web.context import Context
from modak.tables.registration.unregister import unregister
from tests.tables.events import Events

END: LiteralString = "UPDATE modak.op_log SET phase = 'failed', error = 'test' WHERE op_id = %s"
DEPLOY = Path(__file__).parents[2] / "deploy"
PROMISED = (
    "modak_leader",
    "modak_cycle_duration_seconds",
    "modak_last_cycle_timestamp_seconds",
    "modak_cutline_tier_key",
    "modak_cutline_snapshot",
    "modak_delta_backlog_rows",
    "modak_lake_commits_total",
    "modak_mirror_lag_bytes",
    "modak_mirror_flushes_total",
    "modak_load_total",
    "modak_load_rows_total",
    "modak_load_staged_labels",
    "modak_load_adoption_lag_seconds",
    "modak_lake_files",
    "modak_lake_delete_files",
    "modak_lake_bytes",
    "modak_lake_records",
    "modak_lake_snapshots",
    "modak_lake_manifests",
    "modak_lake_delete_ratio",
    "modak_lake_warnings",
    "modak_slot_active",
    "modak_slot_retained_wal_bytes",
    "modak_expired_pins_deleted_total",
    "modak_build_info",
    "modak_errors_total",
)


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def exported(text: str) -> set[str]:
    """Every name that a query may use: families, counters with their ending, parts of histograms."""
    names: set[str] = set()
    for name, family in families(text).items():
        endings = {"counter": ("_total",), "histogram": ("", "_bucket", "_count", "_sum")}.get(family.type, ("",))
        names.update(name + ending for ending in endings)
    return names


def used(text: str) -> set[str]:
    return set(re.findall(r"\bmodak_[a-z0-9_]+", text))


def samples(text: str, name: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels.get("table", "")] = sample.value
    return found


def by_kind(text: str, name: str) -> dict[tuple[str, str], float]:
    found = [each for family in text_string_to_metric_families(text) for each in family.samples if each.name == name]
    return {(each.labels["table"], each.labels["kind"]): each.value for each in found}


def test_every_promised_name_is_there(api: TestClient) -> None:
    context: Any = api.app.state.context  # type: ignore[attr-defined]
    context.pulse.last_cycle = 1.0
    assert set(PROMISED) - exported(api.get("/metrics").text) == set()


def test_a_standby_shows_itself_and_no_table(api: TestClient, events: Events) -> None:
    events.register()
    context: Any = api.app.state.context  # type: ignore[attr-defined]
    assert samples(api.get("/metrics").text, "modak_cutline_tier_key") == {"public.events": 0.0}
    context.pulse.became("standby")
    text = api.get("/metrics").text
    assert samples(text, "modak_leader") == {"": 0.0}
    assert samples(text, "modak_cutline_tier_key") == {}


def test_numbers_follow_what_happens(api: TestClient, events: Events, leader: Leader, monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics, "KEPT_SECONDS", 0.0)
    events.register()
    before = samples(api.get("/metrics").text, "modak_lake_commits_total").get("public.events", 0.0)
    events.tier(leader)
    events.sql("INSERT INTO public.events VALUES (7, 7, 'late')")
    table_id = events.site.reader.state(events.name).table.table_id
    with events.site.connect(autocommit=True) as conn:
        conn.execute(
            "INSERT INTO modak.lake_stats (table_id, counters, warnings) VALUES (%s, %s, %s)",
            (table_id, Jsonb({"files": 2, "delete_ratio": 0.25, "odd name": 1}), Jsonb(["small files"])),
        )
        conn.execute("INSERT INTO modak.pauses (table_id) VALUES (%s)", (table_id,))
        conn.execute("INSERT INTO modak.maintenance_requests (table_id) VALUES (%s)", (table_id,))
        # As if it were a mirror; of other tables nobody notes any lag.
        note_health(conn, MirrorHealth(table_id=table_id, lag_seconds=9.5))
        conn.execute("UPDATE modak.tables SET mode = 'mirrored' WHERE table_id = %s", (table_id,))
        note_health(conn, MirrorHealth(table_id=table_id, lag_seconds=1.5))
        conn.execute("UPDATE modak.tables SET mode = 'tiered' WHERE table_id = %s", (table_id,))
    text = api.get("/metrics").text
    assert samples(text, "modak_cutline_tier_key") == {"public.events": 200.0}
    assert samples(text, "modak_delta_backlog_rows") == {"public.events": 1.0}
    assert samples(text, "modak_lake_commits_total")["public.events"] == before + 1
    assert samples(text, "modak_rows_total")["public.events"] >= 200
    assert samples(text, "modak_lake_files") == {"public.events": 2.0}
    assert samples(text, "modak_lake_delete_ratio") == {"public.events": 0.25}
    assert samples(text, "modak_lake_odd_name") == {"public.events": 1.0}
    assert samples(text, "modak_lake_warnings") == {"public.events": 1.0}
    assert samples(text, "modak_table_paused") == {"public.events": 1.0}
    assert samples(text, "modak_maintenance_requests") == {"public.events": 1.0}
    assert samples(text, "modak_mirror_lag_seconds") == {"public.events": 1.5}
    again = api.get("/metrics").text
    assert samples(again, "modak_lake_commits_total") == samples(text, "modak_lake_commits_total"), "counted once"


def test_an_operation_that_began_long_before_the_first_reading_counts_when_it_ends_and_nothing_counts_twice(
    bare: Callable[..., Context],
) -> None:
    def told(count: int) -> list[str]:
        # A reading, and some more, with nothing new in between.
        return [op["op_id"] for _ in range(count) for op in tail.read(conn)]

    begin = "INSERT INTO modak.op_log (op_id, kind, started_at) VALUES (%s, 'tier', clock_timestamp() - %s::interval)"
    with bare().site.connect(autocommit=True) as conn:
        for op_id, age in (("op-long", "3 hours"), ("op-longer", "4 hours"), ("op-before", "1 hour")):
            conn.execute(begin, (op_id, age))
        conn.execute(END, ("op-before",))
        tail = begin_tail(conn)
        assert told(3) == [], "what had ended before is not counted"
        conn.execute(END, ("op-long",))
        assert told(3) == ["op-long"]
        conn.execute(begin, ("op-new", "0 seconds"))
        conn.execute(END, ("op-new",))
        assert told(3) == ["op-new"]
        conn.execute(END, ("op-longer",))
        assert told(3) == ["op-longer"]


def test_a_round_that_goes_on_over_several_intervals_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks, took = FrozenClock(), list[float](), list[float]()
    begin, works, busy_until = clock.monotonic(), iter([25.0, 0.0, 0.0, 5.0, 12.0, 0.0]), 0.0

    def passed() -> float:
        return clock.monotonic() - begin

    def look(*_: object) -> None:
        nonlocal busy_until
        looks.append(passed())
        busy_until = max(busy_until, passed() + next(works))

    def drained(_seconds: float) -> bool:
        clock.sleep(0.25)
        return passed() >= busy_until

    monkeypatch.setattr(daemon, "look", look)
    monkeypatch.setattr(metrics, "cycled", took.append)
    settings = SimpleNamespace(tiering=SimpleNamespace(cycle_interval_seconds=10.0))
    site: Any = SimpleNamespace(clock=clock, settings=settings)
    leader: Any = SimpleNamespace(lost=False)
    crew: Any = SimpleNamespace(check=lambda: None, drained=drained)
    stop: Any = SimpleNamespace(is_set=lambda: False, wait=clock.sleep)
    pulse, since = Pulse(clock), None
    for _ in range(6):
        since = daemon._round(site, leader, crew, stop, pulse, since)
    assert looks == pytest.approx([0, 10, 20, 30, 40, 50], abs=2), "a look at each interval, done or not"
    assert took == pytest.approx([25, 5, 12], abs=2)
    assert pulse.cycle_seconds == took[-1]
    assert since is None


def test_words_that_callers_make_up_are_one_method(bare: Callable[..., Context]) -> None:
    def methods() -> set[str]:
        page = metrics.generate_latest(metrics.REGISTRY).decode()
        return set(re.findall(r'^modak_http_requests_total\{method="([^"]*)"', page, flags=re.MULTILINE))

    with TestClient(create_app(bare()), base_url="http://127.0.0.1") as client:
        for word in ("AAA1", "AAA2"):
            assert client.request(word, "/livez").status_code == 405
    assert "OTHER" in methods()
    assert methods() & {"AAA1", "AAA2"} == set()


def test_errors_count_by_their_code() -> None:
    structlog.configure(processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()])
    metrics.listen()
    metrics.listen()
    structlog.get_logger().error("cycle.failed", code="test.code")
    structlog.get_logger().info("cycle.done", code="test.code")
    found = metrics.REGISTRY.get_sample_value("modak_errors_total", {"code": "test.code"})
    assert found == 1.0


def test_the_series_of_the_last_hour(api: TestClient, events: Events) -> None:
    events.register()
    context: Any = api.app.state.context  # type: ignore[attr-defined]
    for _ in range(2):
        context.series.sample()
    [entry] = api.get("/api/v1/series", params={"metric": "cutline_t"}).json()
    assert entry["name"] == "public.events"
    assert [value for _, value in entry["points"]] == [0.0, 0.0]
    assert api.get("/api/v1/series", params={"metric": "cutline_t", "name": "public.other"}).json() == []
    assert api.get("/api/v1/series", params={"metric": "lake_bytes"}).json() == []


def test_only_the_largest_of_many_series_are_sent_when_asked(api: TestClient) -> None:
    context: Any = api.app.state.context  # type: ignore[attr-defined]
    for at in (1.0, 2.0):
        rows = [{"schema_name": "public", "table_name": f"t{n}", "delta_backlog": n, "counters": {}} for n in range(9)]
        rows[8]["delta_backlog"] = 100 if at == 1.0 else None
        context.series.add(at, Vitals(rows, []))
    asked = api.get("/api/v1/series", params={"metric": "delta_backlog", "most": 2}).json()
    assert [each["name"] for each in asked] == ["public.t6", "public.t7"], "by the last value that is known"
    assert len(api.get("/api/v1/series", params={"metric": "delta_backlog"}).json()) == 9


def test_dashboard_and_alerts_use_only_what_is_exported(api: TestClient) -> None:
    context: Any = api.app.state.context  # type: ignore[attr-defined]
    context.pulse.last_cycle = 1.0
    known = exported(api.get("/metrics").text)
    dashboard = json.loads((DEPLOY / "grafana" / "modak.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [
        rule
        for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    queries += [rule["expr"] for rule in rules]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert len(rules) >= 10
    assert {name for query in queries for name in used(query)} - known == set()
    # Whatever is promised is worth a look: each name is in the dashboard or in a rule. Only a slot that is not active
    # tells nothing, as pumps come and go at theirs.
    shown = {name.removesuffix("_bucket") for query in queries for name in used(query)}
    assert set(PROMISED) - shown - {"modak_build_info", "modak_cutline_snapshot", "modak_slot_active"} == set()
    of_stores = {name for name in known if name.startswith(("modak_entities_", "modak_measurements_"))}
    assert len(of_stores) > 25
    assert of_stores - shown == set()
    for rule in rules:
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"]


def test_alerts_about_the_group_fire_also_when_nobody_answers() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    # A comparison with no sample has no result, and no result is no alert.
    assert rules["ModakNobodyLeads"] == "(sum(modak_leader) or vector(0)) < 1"
    assert rules["ModakRoundsStopped"].endswith(" or absent(modak_last_cycle_timestamp_seconds)")


def test_only_what_lands_a_snapshot_is_a_lake_commit(
    api: TestClient, events: Events, leader: Leader, monkeypatch: Any
) -> None:
    monkeypatch.setattr(metrics, "KEPT_SECONDS", 0.0)
    api.get("/metrics")
    events.register()
    events.tier(leader)
    api.get("/metrics")
    unregister(events.site, events.name, drop_lake=False)
    text = api.get("/metrics").text
    ended = {kind for _, kind in by_kind(text, "modak_operations_total")}
    assert ended >= {"register", "tier", "unregister"}
    commits = by_kind(text, "modak_lake_commits_total")
    assert commits[("public.events", "tier")] >= 1
    assert {kind for _, kind in commits} & {"register", "unregister", "maintenance", "orphans"} == set()


def test_the_page_about_metrics_lists_what_is_exported(api: TestClient) -> None:
    context: Any = api.app.state.context  # type: ignore[attr-defined]
    context.pulse.last_cycle = 1.0
    page = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `(modak_[a-z_]+)", page, flags=re.MULTILINE))
    names = set()
    for name, family in families(api.get("/metrics").text).items():
        names.add(name + "_total" if family.type == "counter" else name)
    assert listed == names
