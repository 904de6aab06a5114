"""Every page in a real browser, in both themes, without an error in its console; and what an operator does there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from modak.catalog import operators
from modak.core.errors import ModakError
from modak.runtime import working
from modak.runtime.pulse import Pulse
from modak.runtime.web.context import Context
from tests.console.looking import opened, served, visit
from tests.runtime.conftest import ADMIN, led
from tests.tables.events import Events

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = ("fleet", "table/1", "sql", "mirrors", "operations", "measurements", "entities", "errors")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_opens_without_an_error(
    browser: Browser, address: str, keep: Callable[[str], str], theme: str
) -> None:
    with opened(browser, theme) as (page, wrong):
        for name in PAGES:
            visit(page, address, name)
            assert page.evaluate("document.documentElement.dataset.theme") == theme
            assert page.locator("main .bad").count() == 0, page.locator("main").inner_text()
            page.screenshot(path=keep(f"{name.replace('/', '-')}-{theme}"), full_page=True)
        assert wrong == []


def test_an_operator_holds_a_table_back_forces_a_pass_and_edits_the_policy(
    browser: Browser, address: str, events: Events
) -> None:
    with opened(browser) as (page, wrong):
        visit(page, address, "fleet")
        page.get_by_role("link", name="public.events").click()
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("dialog").get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="Resume").wait_for()
        with events.site.connect() as conn:
            assert list(operators.pauses(conn)) == [1]
        page.get_by_role("button", name="Resume").click()
        page.get_by_role("dialog").get_by_role("button", name="Resume").click()
        page.get_by_role("button", name="Pause").wait_for()
        page.get_by_role("button", name="Maintain now").click()
        page.get_by_role("dialog").get_by_role("button", name="Maintain").click()
        page.get_by_text("Asked for").wait_for()
        assert events.sql("SELECT table_id, claimed_at FROM modak.maintenance_requests") == [(1, None)]
        page.get_by_label("Key", exact=True).select_option("snapshot_max_count")
        page.get_by_label("Value", exact=True).fill("77")
        page.get_by_role("button", name="Set", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Set").click()
        page.get_by_text("snapshot_max_count is 77 now.").wait_for()
        assert events.sql("SELECT maintenance_policy ->> 'snapshot_max_count' FROM modak.tables") == [("77",)]
        page.get_by_role("button", name="Back to the default of snapshot_max_count").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        assert events.sql("SELECT maintenance_policy ->> 'snapshot_max_count' FROM modak.tables") == [("77",)]
        page.get_by_role("button", name="Back to the default of snapshot_max_count").click()
        page.get_by_role("dialog").get_by_role("button", name="Back to default").click()
        page.get_by_text("snapshot_max_count follows the default again.").wait_for()
        page.get_by_label("Value", exact=True).fill("many")
        page.get_by_role("button", name="Set", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Set").click()
        page.get_by_role("alert").get_by_role("button", name="Close").wait_for()
        # A refused value is a failed request, which the browser writes down; nothing else may be there.
        assert all("400" in each or "409" in each for each in wrong)


def test_a_page_is_alive_and_what_a_person_types_survives_its_refresh(
    browser: Browser, address: str, events: Events
) -> None:
    with opened(browser) as (page, wrong):
        visit(page, address, "fleet")
        page.get_by_label("Find").fill("half a na")
        events.sql(
            "INSERT INTO modak.delta (table_id, pk, op, tier_key) SELECT 1, i::text, 2, 50 FROM generate_series(1, 7) i"
        )
        page.locator("td.number", has_text="7").wait_for()
        assert page.get_by_label("Find").input_value() == "half a na"
        assert wrong == []


def test_what_fails_is_shown_with_what_to_do_and_a_broken_lake_hides_nothing_else(
    browser: Browser, address: str, events: Events, keep: Callable[[str], str]
) -> None:
    events.sql(
        "INSERT INTO modak.lake_stats (table_id, counters, warnings) VALUES (1, '{\"delete_ratio\": 0.125}',"
        ' \'[{"name": "delete_debt", "message": "A lot is deleted.", "hint": "Run a pass."}]\')'
    )
    error = ModakError("storage.denied", "The bucket refuses the key.", hint="Check the key.")
    working.failed("maintenance", "public.events", error, 60)
    pulse = Pulse(events.site.clock)
    try:
        with opened(browser) as (page, wrong), pulse.beating(events.site.dsn):
            visit(page, address, "fleet")
            page.get_by_role("link", name="1 failing").wait_for()
            page.get_by_role("cell", name="≤ 100", exact=True).wait_for()
            page.get_by_label("only what needs attention").check()
            page.get_by_role("button", name="Find").click()
            page.wait_for_url("**attention=true")
            page.get_by_role("link", name="public.events").wait_for()
            visit(page, address, "errors")
            for words in ("The bucket refuses the key.", "Check the key.", "A lot is deleted.", "Run a pass."):
                page.get_by_text(words).first.wait_for()
            page.screenshot(path=keep("errors-failing"), full_page=True)
            assert wrong == []
            events.sql("UPDATE modak.cutline SET metadata_location = 'file:///nowhere/1.metadata.json'")
            visit(page, address, "table/1")
            page.get_by_text("outside every storage profile").wait_for()
            page.get_by_role("button", name="Pause").wait_for()
            page.get_by_text("12.5 %").first.wait_for()
    finally:
        working.forget()


def test_names_from_the_database_never_become_markup(browser: Browser, events: Events) -> None:
    evil = "<img src=x onerror=alert(1)>"
    events.sql(f'CREATE TABLE public."{evil}" (id bigint, ts bigint, PRIMARY KEY (id, ts)) PARTITION BY RANGE (ts)')
    events.sql(f'CREATE TABLE public.evil_0 PARTITION OF public."{evil}" FOR VALUES FROM (0) TO (100)')
    Events(events.site, type(events.name)("public", evil)).register()
    with served(led(events.site)) as address, opened(browser) as (page, wrong):
        visit(page, address, "fleet")
        page.get_by_role("link", name=evil).wait_for()
        page.get_by_role("link", name=evil).click()
        page.get_by_role("heading", level=1, name=evil).wait_for()
        assert page.locator("main img").count() == 0
        assert wrong == []


def test_a_person_signs_in_and_out_with_the_keyboard_alone(browser: Browser, bare: Callable[..., Context]) -> None:
    with served(bare(MODAK_API_TOKEN=ADMIN)) as address, opened(browser) as (page, wrong):
        page.goto(address)
        page.get_by_label("Token").wait_for()
        page.keyboard.type("not the token")
        page.keyboard.press("Enter")
        page.get_by_text("The token is not right.").wait_for()
        page.get_by_label("Token").focus()
        page.keyboard.type(ADMIN)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Fleet").wait_for()
        page.get_by_role("button", name="Sign out").focus()
        page.keyboard.press("Enter")
        page.get_by_label("Token").wait_for()
        assert all("401" in each for each in wrong)


def test_every_control_has_a_name_and_every_chart_a_sentence(browser: Browser, address: str) -> None:
    with opened(browser) as (page, _):
        for name in PAGES:
            visit(page, address, name)
            nameless = page.evaluate(
                """() => [...document.querySelectorAll("button, a, input, select, textarea")].filter((node) =>
                    !(node.textContent.trim() || node.labels?.length || node.getAttribute("aria-label"))).length"""
            )
            silent = page.evaluate(
                "[...document.querySelectorAll('main svg')].filter((node) => !node.getAttribute('aria-label')).length"
            )
            assert (nameless, silent) == (0, 0), name
            assert page.locator("h1").count() == 1
            assert page.locator("main").get_attribute("aria-busy") == "false"


@pytest.mark.spark
def test_a_question_is_answered_across_the_seam_and_explained(browser: Browser, address: str) -> None:
    with opened(browser) as (page, wrong):
        visit(page, address, "sql")
        page.get_by_role("textbox", name="Query").fill("SELECT count(*) AS n, max(body) AS last FROM public.events")
        page.get_by_role("button", name="Explain").click()
        page.get_by_role("heading", name="What would be read").wait_for()
        page.get_by_role("textbox", name="Query").focus()
        page.keyboard.press("Control+Enter")
        page.get_by_role("cell", name="251").wait_for()
        page.get_by_role("textbox", name="Query").fill("DROP TABLE public.events")
        page.get_by_role("button", name="Run").click()
        page.locator("main p.bad").wait_for()
        assert all("400" in each for each in wrong)
