"""The journal on its page: filters, what a crash cut off, and page after page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from modak.core.errors import Refused
from modak.runtime.leader import Leader
from tests.console.looking import opened, visit
from tests.maintenance.foreign import equality_delete
from tests.maintenance.lake import Lake
from tests.runtime.journal import FAILURE, begun, ended
from tests.tables.events import Events

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def page(browser: Browser, address: str, events: Events) -> Iterator[Page]:
    """The page over a journal with one operation of each end, beside the registration and the tiering of the table."""
    ended(events.site, 1)
    with opened(browser) as (opened_page, wrong):
        visit(opened_page, address, "operations")
        yield opened_page
        assert wrong == []


def shown(page: Page) -> list[tuple[str, str]]:
    """Kind and phase of every operation on the page."""
    rows = [each.locator("td").all_inner_texts() for each in page.locator("main tbody tr").all()]
    return [(row[1], row[2].split()[0]) for row in rows]


def until(page: Page, wanted: list[tuple[str, str]]) -> None:
    """Wait for the page to show these operations and no others."""
    page.wait_for_function("many => document.querySelectorAll('main tbody tr').length === many", arg=len(wanted))
    assert shown(page) == wanted


def narrowed(page: Page, **choice: str) -> None:
    """Fill in the form, press its button, and wait for the page of that address."""
    if "kind" in choice:
        page.get_by_label("Kind").fill(choice["kind"])
    if "phase" in choice:
        page.get_by_label("Phase").select_option(choice["phase"])
    if "failed" in choice:
        page.get_by_label("only errors").check()
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**/#/operations?" + "&".join(f"{name}={value}" for name, value in choice.items()))


def everything(page: Page) -> None:
    page.get_by_role("link", name="All", exact=True).click()
    page.get_by_role("link", name="All", exact=True).wait_for(state="detached")


ALL = [("tier", "done"), ("fold", "failed"), ("retention", "abandoned"), ("tier", "done"), ("register", "done")]


def test_operations_are_filtered_by_phase_by_kind_and_by_error(page: Page) -> None:
    until(page, ALL)
    for kind, phase in ALL[1:3]:
        narrowed(page, phase=phase)
        until(page, [(kind, phase)])
        everything(page)
        until(page, ALL)
    narrowed(page, kind="tier", phase="done")
    until(page, [("tier", "done")] * 2)
    everything(page)
    narrowed(page, failed="true")
    until(page, [("fold", "failed")])
    assert page.get_by_role("cell", name=FAILURE, exact=True).is_visible()
    everything(page)
    narrowed(page, phase="writing")
    page.get_by_text("Nothing in the journal fits.").wait_for()


def test_what_a_crash_cut_off_is_shown_apart(page: Page) -> None:
    page.get_by_role("link", name="Cut off by a crash").click()
    until(page, [("retention", "abandoned")])
    assert page.get_by_title("cut off or no longer needed, its files were removed").count() == 1


def test_what_failed_for_a_reason_is_no_crash_and_is_among_the_errors(
    browser: Browser, address: str, events: Events, leader: Leader
) -> None:
    equality_delete(Lake(events, leader), [[1]], accepted=False)
    events.add_partition(300)
    events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
    with pytest.raises(Refused):
        events.tier(leader)
    with opened(browser) as (page, wrong):
        visit(page, address, "operations")
        page.get_by_role("link", name="Cut off by a crash").click()
        page.get_by_text("Nothing in the journal fits.").wait_for()
        everything(page)
        narrowed(page, failed="true")
        until(page, [("tier", "failed")])
        assert page.get_by_title("failed, its files were removed").count() == 1
        assert "lake.foreign_rows: " in page.locator("main tbody tr td").last.inner_text()
        assert wrong == []


def test_older_operations_are_a_page_further(browser: Browser, address: str, events: Events) -> None:
    begun(events.site, 1, 103)
    with opened(browser) as (page, wrong):
        visit(page, address, "operations?kind=many")
        assert page.locator("main tbody tr").count() == 100
        page.get_by_role("link", name="Earlier").click()
        until(page, [("many", "planned")] * 3)
        assert page.get_by_role("link", name="Earlier").count() == 0
        assert wrong == []
