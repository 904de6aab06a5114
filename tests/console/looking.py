"""A console that is served and a browser that looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from modak.console.app import Console
from modak.runtime.web.context import Context
from modak.runtime.web.server import listening

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PATIENCE = 60_000


@contextmanager
def served(context: Context) -> Iterator[str]:
    """The console over a site; yields its address."""
    console = Console(context.guard, context.site.settings)
    with listening(context, 0, console.routers(), gate=console.gate) as address:
        yield address


@contextmanager
def opened(browser: Browser, theme: str = "light") -> Iterator[tuple[Page, list[str]]]:
    """A page of a new person, and everything that its console complained about."""
    wrong: list[str] = []
    with browser.new_context(color_scheme=theme, viewport={"width": 1280, "height": 900}) as person:  # type: ignore[arg-type]
        page = person.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield page, wrong


def visit(page: Page, address: str, name: str) -> None:
    """Go to a page of the console and wait until it shows what it has."""
    page.goto(f"{address}/#/{name}")
    page.wait_for_selector("main[aria-busy=false] h1")
