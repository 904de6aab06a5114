"""What the charts and the table's page say about a table that has been tiered, corrected, pinned and maintained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from modak.catalog import pins
from modak.runtime import maintaining
from modak.runtime.leader import Leader
from modak.tables.maintenance.engine import Embedded
from tests.console.looking import opened, visit
from tests.maintenance.lake import Lake
from tests.tables.events import Events

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

MOMENT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes run in this process, without Spark."""
    monkeypatch.setattr("modak.tables.maintenance.run.engine_of", lambda site, _name=None: Embedded(site))


@pytest.fixture
def lived(address: str, events: Events, leader: Leader, embedded: None) -> str:
    """The console over a table with a pinned reader, and with a pass that had deletes to apply behind it."""
    Lake(events, leader).delete(1, 2)
    pins.begin(events.site.dsn, events.name)
    maintaining.run(events.site, leader, events.name)
    maintaining.Watcher(events.site, leader).turn()
    events.sql("ANALYZE public.events")
    return address


@pytest.fixture
def looked(browser: Browser, lived: str) -> Iterator[tuple[Page, dict[str, Any]]]:
    """The table's page, and what the API says of the table; at the end nothing may have gone wrong in the browser."""
    with opened(browser) as (page, wrong):
        visit(page, lived, "table/1")
        yield page, httpx.get(f"{lived}/api/v1/tables/1", timeout=60).json()
        assert wrong == []


def chart(place: Page | Locator, words: str) -> Locator:
    """The one chart whose sentence is that."""
    found = place.get_by_role("img", name=re.compile(f"^{words}$"))
    found.wait_for()
    assert found.count() == 1
    return found


def sheet(page: Page, title: str) -> Locator:
    return page.get_by_role("region", name=title, exact=True)


def row(place: Locator, first: str) -> list[str]:
    """The cells of the row that begins so."""
    found = place.locator("tbody tr").filter(has=place.page.locator("td:first-child", has_text=first))
    assert found.count() == 1, found.all_inner_texts()
    return found.locator("td").all_inner_texts()


def test_the_fleet_shows_lake_and_heap_as_one_bar_with_the_cut_line_between_them(
    browser: Browser, lived: str, events: Events
) -> None:
    [(stored,)] = events.sql("SELECT (counters ->> 'bytes')::bigint FROM modak.lake_stats")
    with opened(browser) as (page, wrong):
        visit(page, lived, "fleet")
        bar = chart(page, r"[\d.]+ KiB in the lake, 8\.0 KiB in the heap, cut-line at 200")
        words = bar.get_attribute("aria-label") or ""
        assert float(words.split()[0]) == pytest.approx(stored / 1024, abs=0.05)
        # The line stands where the lake ends and the heap begins.
        here = float(bar.locator("line.cut").get_attribute("x1") or "")
        assert here == pytest.approx(300 * stored / (stored + 8192), abs=0.1)
        assert float(bar.locator("rect.lake").get_attribute("width") or "") == here
        assert float(bar.locator("rect.heap").get_attribute("x") or "") == here
        assert page.get_by_role("cell", name="≤ 100", exact=True).count() == 1, "its lag"
        assert wrong == []


def test_partitions_stand_along_the_tier_key_with_the_line_and_where_their_rows_are(looked: Any) -> None:
    page, _ = looked
    along = sheet(page, "Partitions along the tier key")
    drawn = chart(along, "3 partitions from 0 to 300; 2 dropped, 1 hot")
    titles = drawn.locator("rect title").all_text_contents()
    assert titles == [
        "events_0: dropped, 0 to 100",
        "events_100: dropped, 100 to 200",
        "events_200: hot, 200 to 300",
    ]
    looks = [each.get_attribute("class") for each in drawn.locator("rect").all()]
    assert looks == ["lake", "lake", "heap"]
    cut = drawn.locator("line.cut")
    assert float(cut.get_attribute("x1") or "") == pytest.approx(1000 * 200 / 300)
    assert along.get_by_text("cut-line 200", exact=True).is_visible()
    along.get_by_text("1 partition in Postgres").click()
    assert row(along, "events_200")[:4] == ["events_200", "200", "300", "hot"]


def test_files_are_counted_by_size_and_what_is_deleted_in_them_is_told(looked: Any) -> None:
    page, found = looked
    files = sheet(page, "Files by size")
    chart(files, "Data files by size: < 1.0 MiB 2, < 8.0 MiB 0, < 32.0 MiB 0, < 128 MiB 0, < 512 MiB 0, ≥ 512 MiB 0")
    assert found["health"]["counters"]["files"] == 2
    files.get_by_text("0 files carry deletes").wait_for()


def test_snapshots_and_pins_are_on_one_time_line_and_readers_in_a_list(looked: Any, events: Events) -> None:
    page, found = looked
    there = sheet(page, "Snapshots and pins")
    kept, published = events.snapshots(), found["cutline"]["snapshot_id"]
    assert kept >= 3, "tiered, corrected, rewritten"
    drawn = chart(there, f"{kept} snapshots since {MOMENT}, 1 pin")
    assert drawn.locator("circle.snapshot").count() == kept
    [large] = [each for each in drawn.locator("circle.snapshot").all() if each.get_attribute("r") == "7"]
    assert (large.text_content() or "").startswith(f"{published} "), "all digits of the published one"
    [pin] = found["pins"]
    assert (drawn.locator("rect.pin").text_content() or "").startswith(f"{pin['holder']} since ")
    assert pin["snapshot_id"] != published, "the pass has gone on without the reader"
    reader, since, lapses, snapshot = row(there, pin["holder"])
    assert (reader, snapshot) == (pin["holder"], str(pin["snapshot_id"]))
    assert since.endswith(" ago")
    assert lapses.startswith("in ")


def test_the_last_pass_is_shown_step_by_step_with_what_each_did(looked: Any) -> None:
    page, found = looked
    last = sheet(page, "Last maintenance pass")
    assert "ago, done, took " in last.locator("caption").inner_text()
    step, did, took, error = row(last, "Deletes applied")
    assert "deletes before 1" in did, step
    assert (took != "–", error) == (True, "")
    known = {"debt", "pack", "manifests", "expiry", "orphans"}
    assert set(found["last_pass"]["counters"]) <= known
    assert last.locator("tbody tr").count() == len(found["last_pass"]["counters"])
    page.locator("dt", has_text="Last pass").locator("xpath=../dd").get_by_text("ago").wait_for()


def test_a_value_of_the_policy_stands_with_where_it_comes_from(looked: Any, events: Events) -> None:
    page, _ = looked
    policy = sheet(page, "Policy in force")
    assert row(policy, "snapshot_min_retained")[2] == "default"
    assert row(policy, "orphan_sweep_enabled")[1:] == ["false", "default", ""]
    events.sql("""UPDATE modak.tables SET maintenance_policy = '{"orphan_sweep_enabled": true}'""")
    policy.get_by_role("button", name="Back to the default of orphan_sweep_enabled").wait_for()
    assert row(policy, "orphan_sweep_enabled")[1:] == ["true", "table", "Back to default"]


def test_one_thing_is_not_many_in_the_sentences_of_the_charts(browser: Browser, address: str, events: Events) -> None:
    with opened(browser) as (page, _):
        visit(page, address, "table/1")
        chart(page, f"1 snapshot since {MOMENT}, 0 pins")
        page.get_by_text("No pass has run yet.").wait_for()
        page.get_by_text("Nobody reads at a pinned point now.").wait_for()


def test_a_pass_that_is_forced_on_the_page_is_carried_out_and_its_result_appears_there(
    browser: Browser, address: str, events: Events, leader: Leader, embedded: None
) -> None:
    Lake(events, leader).delete(1)
    maintainer = maintaining.Maintainer(events.site, leader, lambda: False)
    maintainer.turn()
    with opened(browser) as (page, wrong):
        visit(page, address, "table/1")
        last = sheet(page, "Last maintenance pass")
        last.get_by_text("No pass has run yet.").wait_for()
        page.get_by_role("button", name="Maintain now").click()
        page.get_by_role("dialog").get_by_role("button", name="Maintain").click()
        waiting = last.get_by_text(re.compile(r"A pass was asked for .* and waits for the leader\."))
        waiting.wait_for()
        maintainer.turn()
        last.get_by_text("Deletes applied").wait_for()
        assert "deletes before 1" in row(last, "Deletes applied")[1]
        assert waiting.count() == 0
        [(by, ended, error)] = events.sql(
            "SELECT requested_by, finished_at IS NOT NULL, error FROM modak.maintenance_requests"
        )
        assert (ended, error) == (True, None)
        assert by == "api admin from 127.0.0.1"
        assert wrong == []


def test_a_pass_that_is_forced_and_fails_says_why_on_the_page(
    browser: Browser, address: str, events: Events, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no such engine")

    monkeypatch.setattr("modak.tables.maintenance.run.engine_of", broken)
    with opened(browser) as (page, _):
        visit(page, address, "table/1")
        page.get_by_role("button", name="Maintain now").click()
        page.get_by_role("dialog").get_by_role("button", name="Maintain").click()
        page.get_by_text("waits for the leader").wait_for()
        with pytest.raises(OSError, match="no such engine"):
            maintaining.Maintainer(events.site, leader, lambda: False).turn()
        page.get_by_text(re.compile("asked for failed: maintenance.crashed: OSError")).wait_for()
