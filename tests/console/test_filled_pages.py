"""Pages that have something to show: filled stores, a mirrored table, a leader that is late, a thousand tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from modak.entities.flushing import flush
from modak.entities.store import EntityStore
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.stores import serving
from modak.runtime.web.context import Context
from modak.storage.objects import Objects
from modak.tables.site import Site
from tests.console.looking import opened, served, visit
from tests.entities.world import INVOICE, World
from tests.measurements.support import Inside, fill
from tests.mirror.things import Things
from tests.runtime.conftest import led
from tests.runtime.test_idle_fleet import register_without_a_lake
from tests.runtime.test_stores import until
from tests.tables.conftest import settings_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HOUR = (datetime.now(UTC) - timedelta(days=3)).replace(minute=0, second=0, microsecond=0)


@pytest.fixture
def stores(
    fresh_database: Dsn, warehouse: str, spark_home: Path, tmp_path: Path, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Context]:
    """A leader that serves both kinds of stores and has a mirrored table."""
    described = tmp_path / "registry.json"
    described.write_text(json.dumps(INVOICE))
    objects = Objects.of(str(tmp_path / "store"))
    for database, files in (("metrics", 6), ("plant", 4)):
        fill(objects, files=files, hour=HOUR, database=database)
    settings = settings_for(
        fresh_database,
        warehouse,
        spark_home,
        MODAK_MEASUREMENTS_ENABLED="true",
        MODAK_MEASUREMENTS_ROOT=str(tmp_path / "store"),
        MODAK_MEASUREMENTS_TEMP_DIRECTORY=str(tmp_path / "temp"),
        MODAK_MEASUREMENTS_ISOLATION="process",
        MODAK_MEASUREMENTS_HOURLY_MIN_FILES="3",
        MODAK_ENTITIES_ENABLED="true",
        MODAK_ENTITIES_REGISTRY=str(described),
        MODAK_ENTITIES_FLUSH_INTERVAL_SECONDS="3600",
        MODAK_LAKE_STATS_INTERVAL_SECONDS="0.2",
    )
    monkeypatch.setattr("modak.measurements.opening.runner_of", lambda _settings: Inside())
    with open_site(settings) as site, Leader.campaign(site, 5) as leader:
        things = Things.plain(site)
        things.register()
        things.sql("INSERT INTO public.things SELECT 1000 + i, i, repeat('x', 200) FROM generate_series(1, 500) i")
        world = World(fresh_database, EntityStore.open(settings, fresh_database).objects)
        world.many(0, 20)
        flush(world.store)
        with serving(site, leader):
            context = led(site)
            for number in range(20, 26):
                world.put(number, title=f"changed {number}")
                context.series.sample()
            until(
                lambda: bool(context.fleet.text()) and b'modak_entities_dirty_rows{schema="7"}' in context.fleet.text()
            )
            for _ in range(3):
                context.series.sample()
            yield context


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_stores_and_mirrors_are_shown_with_what_they_hold(
    browser: Browser, stores: Context, keep: Callable[[str], str], theme: str
) -> None:
    with served(stores) as address, opened(browser, theme) as (page, wrong):
        visit(page, address, "measurements")
        for words in ("metrics", "plant", "hourly 1"):
            page.get_by_role("cell", name=words, exact=True).first.wait_for()
        page.get_by_role("img", name="Windows due: metrics now 1, plant now 1").wait_for()
        page.screenshot(path=keep(f"measurements-filled-{theme}"), full_page=True)
        page.get_by_role("button", name="Compact now").click()
        page.get_by_role("dialog").get_by_role("button", name="Compact").click()
        page.get_by_text("The cycle has begun.").wait_for()
        until(lambda: stores.site.services["measurements"].manager.total_jobs_completed >= 2)
        visit(page, address, "fleet")
        visit(page, address, "measurements")
        page.get_by_role("cell", name="10", exact=True).first.wait_for()
        page.screenshot(path=keep(f"measurements-compacted-{theme}"), full_page=True)
        visit(page, address, "entities")
        page.get_by_role("cell", name="20 rows, 1 file", exact=True).first.wait_for()
        page.get_by_role("img", name="Changes waiting: ").wait_for()
        page.screenshot(path=keep(f"entities-filled-{theme}"), full_page=True)
        visit(page, address, "mirrors")
        page.get_by_role("link", name="public.things").wait_for()
        page.get_by_role("img", name="WAL retained: ").wait_for()
        assert "KiB" in page.get_by_role("row", name="public.things").inner_text(), "its lag"
        page.screenshot(path=keep(f"mirrors-filled-{theme}"), full_page=True)
        assert wrong == []


def test_a_leader_that_is_late_is_shown_before_its_lease_ends(
    browser: Browser, site: Site, leader: Leader, keep: Callable[[str], str]
) -> None:
    with site.connect(autocommit=True) as conn:
        conn.execute(
            "INSERT INTO modak.workers (holder, host, pid, version, role, started_at, seen_at)"
            " SELECT holder, 'h', 1, '0', 'leading', clock_timestamp(), clock_timestamp() - interval '9 s'"
            " FROM modak.leader"
        )
    with served(led(site)) as address, opened(browser) as (page, wrong):
        visit(page, address, "fleet")
        page.get_by_text("The leader has not been heard of for").wait_for()
        page.get_by_text("leading, late").wait_for()
        page.screenshot(path=keep("fleet-late"), full_page=True)
        assert wrong == []


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_thousand_tables_are_found_paged_and_alive(
    browser: Browser, site: Site, leader: Leader, keep: Callable[[str], str]
) -> None:
    register_without_a_lake(site, leader, 1000)
    with served(led(site)) as address, opened(browser) as (page, wrong):
        visit(page, address, "fleet")
        page.get_by_text("1 to 100 of 1,000").wait_for()
        assert page.locator("main table tbody tr").count() == 100
        page.screenshot(path=keep("fleet-thousand"))
        page.get_by_role("link", name="Later").click()
        page.get_by_text("101 to 200 of 1,000").wait_for()
        page.get_by_label("Find").fill("t999")
        page.get_by_role("button", name="Find").click()
        page.get_by_role("link", name="public.t999").wait_for()
        assert page.locator("section[aria-label=Tables] tbody tr").count() == 1
        with site.connect(autocommit=True) as conn:
            conn.execute(
                "INSERT INTO modak.pauses (table_id) SELECT table_id FROM modak.tables WHERE table_name = 't999'"
            )
        page.get_by_text("paused").first.wait_for()
        for name in ("sql", "operations", "mirrors", "errors"):
            visit(page, address, name)
        assert wrong == []
