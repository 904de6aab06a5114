"""A table that is no longer registered leaves the foreign catalog, sooner or later, and its files stay."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modak.catalog import publications
from modak.catalog.vitals import read_vitals
from modak.cli.main import app
from modak.core import faults
from modak.core.errors import ModakError
from modak.core.faults import Fault, InjectedFault
from modak.runtime import publishing
from modak.runtime.leader import Leader
from modak.runtime.publishing import publish
from modak.runtime.withdrawing import serving, withdraw_all
from modak.tables.registration.unregister import unregister
from tests.runtime.foreign import TOKEN, Foreign, serving_foreign
from tests.runtime.test_publishing import published
from tests.tables.events import Events

__all__ = ["published"]

TABLE = ("modak", "public", "events")


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Foreign]:
    with serving_foreign(tmp_path, overwrites=True) as opened:
        yield opened


def waits(events: Events) -> list[tuple[Any, ...]]:
    return events.sql("SELECT lake_name FROM modak.withdrawals")


def metadata_of(location: str) -> set[Path]:
    return set(Path(location.removeprefix("file://")).parents[1].rglob("*"))


def test_it_leaves_the_catalog_and_its_files_stay(published: tuple[Events, Leader], foreign: Foreign) -> None:
    events, leader = published
    events.tier(leader)
    location = publish(events.site, events.name)
    assert unregister(events.site, events.name).catalogs == (foreign.address,)
    files = metadata_of(location)
    assert (withdraw_all(events.site), waits(events)) == (1, [])
    assert not foreign.catalog.table_exists(TABLE)
    assert metadata_of(location) == files
    assert withdraw_all(events.site) == 0


def test_what_waits_is_measured(published: tuple[Events, Leader]) -> None:
    events, leader = published
    events.tier(leader)
    publish(events.site, events.name)
    unregister(events.site, events.name)
    with events.site.connect() as conn:
        (row,) = read_vitals(conn).withdrawals
    assert row["waiting"] == 1
    assert row["oldest"] > 0
    withdraw_all(events.site)
    with events.site.connect() as conn:
        assert read_vitals(conn).withdrawals == [{"waiting": 0, "oldest": 0.0}]


def test_it_leaves_though_its_lake_went_first(published: tuple[Events, Leader], foreign: Foreign) -> None:
    events, _ = published
    publish(events.site, events.name)
    unregister(events.site, events.name, drop_lake=True)
    assert withdraw_all(events.site) == 1
    assert ("modak", "public", "events") not in foreign.catalog.list_tables(("modak", "public"))


def test_a_table_that_was_never_published_has_nothing_to_leave(published: tuple[Events, Leader]) -> None:
    events, _ = published
    assert unregister(events.site, events.name).catalogs == ()
    assert waits(events) == []


@pytest.mark.parametrize("point", ["publish.before_withdrawal", "publish.after_withdrawal"])
def test_a_crash_on_the_way_is_made_good(published: tuple[Events, Leader], foreign: Foreign, point: str) -> None:
    events, _ = published
    publish(events.site, events.name)
    unregister(events.site, events.name)
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        withdraw_all(events.site)
    faults.arm(None)
    assert waits(events) == [("events",)]
    assert withdraw_all(events.site) == 1
    assert not foreign.catalog.table_exists(TABLE)


@pytest.mark.parametrize("crash", ["publish.before_register", "publish.after_register"])
def test_a_publication_that_crashed_before_it_was_noted_is_withdrawn_too(
    published: tuple[Events, Leader], foreign: Foreign, crash: str
) -> None:
    events, _ = published
    faults.arm(Fault(crash))
    with pytest.raises(InjectedFault):
        publish(events.site, events.name)
    faults.arm(None)
    unregister(events.site, events.name)
    assert withdraw_all(events.site) == 1
    assert not foreign.catalog.table_exists(TABLE)


def test_the_leader_tries_until_the_catalog_is_back(published: tuple[Events, Leader], foreign: Foreign) -> None:
    events, leader = published
    publish(events.site, events.name)
    unregister(events.site, events.name)
    foreign.failing = 1
    with pytest.raises(ModakError) as raised:
        withdraw_all(events.site)
    assert (raised.value.code, raised.value.retryable) == ("publish.refused", True)
    assert waits(events) == [("events",)]
    foreign.failing = 1
    with serving(events.site, leader):
        deadline = time.monotonic() + 60
        while waits(events):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not foreign.catalog.table_exists(TABLE)


def test_a_late_publication_does_not_put_it_back(
    published: tuple[Events, Leader], foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, _ = published
    publish(events.site, events.name)
    inside, go_on = threading.Event(), threading.Event()
    show = publishing._show

    def slowly(*given: Any) -> None:
        inside.set()
        assert go_on.wait(60)
        show(*given)

    monkeypatch.setattr(publishing, "_show", slowly)
    late = threading.Thread(target=publish, args=(events.site, events.name))
    late.start()
    assert inside.wait(60)
    unregister(events.site, events.name)
    with pytest.raises(ModakError) as raised:
        withdraw_all(events.site)
    assert raised.value.code == "publish.busy"
    go_on.set()
    late.join(60)
    assert foreign.catalog.table_exists(TABLE)
    assert withdraw_all(events.site) == 1
    assert not foreign.catalog.table_exists(TABLE)
    with pytest.raises(ModakError):
        publish(events.site, events.name)


def test_a_table_that_is_registered_again_stays(published: tuple[Events, Leader], foreign: Foreign) -> None:
    events, _ = published
    publish(events.site, events.name)
    unregister(events.site, events.name, drop_lake=True)
    events.register()
    assert (withdraw_all(events.site), waits(events)) == (1, [])
    assert foreign.catalog.list_tables(("modak", "public")) == [TABLE]
    publish(events.site, events.name)
    assert foreign.shows() == events.site.reader.state(events.name).cutline.metadata_location


def test_somebody_elses_table_under_the_name_is_left_alone(
    published: tuple[Events, Leader], foreign: Foreign, tmp_path: Path
) -> None:
    events, _ = published
    location = publish(events.site, events.name)
    unregister(events.site, events.name)
    other = tmp_path / "elsewhere" / "v1.metadata.json"
    other.parent.mkdir()
    other.write_bytes(Path(location.removeprefix("file://")).read_bytes())
    foreign.catalog.drop_table(TABLE)
    foreign.catalog.register_table(TABLE, f"file://{other}")
    assert (withdraw_all(events.site), waits(events)) == (1, [])
    assert foreign.shows() == f"file://{other}"


def test_the_command_says_what_became_of_it(published: tuple[Events, Leader], foreign: Foreign) -> None:
    events, _ = published
    site = events.site
    runner = CliRunner(
        env={
            "MODAK_PG_URL": site.dsn.safe(),
            "MODAK_PG_PASSWORD": site.dsn.password,
            "MODAK_HOME": str(site.settings.home.path),
            "MODAK_WAREHOUSE": str(site.settings.lake.warehouse),
            "MODAK_CATALOG_URI": foreign.address,
            "MODAK_CATALOG_TOKEN": TOKEN,
            "MODAK_CATALOG_WAREHOUSE": "main",
        }
    )
    for failing, said in ((1, "the daemon takes it out later"), (0, "It is out of the catalog of MODAK_CATALOG_URI")):
        publish(site, events.name)
        with site.connect(autocommit=True) as conn:
            table_id = site.reader.state(events.name).table.table_id
            publications.intend(conn, table_id, "http://an.older.catalog")
        foreign.failing = failing
        result = runner.invoke(app, ["unregister", "--table", "public.events", "--drop-lake"])
        assert result.exit_code == 0, result.output
        assert said in result.output
        assert "http://an.older.catalog still shows it" in result.output
        assert TOKEN not in result.output
        if failing:
            events.register()
    assert waits(events) == [("events",)], "the older catalog"
    assert not foreign.catalog.table_exists(TABLE)
