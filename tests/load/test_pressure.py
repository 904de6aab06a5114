"""Too much at once: every reason to put a batch off, and a client that comes back until it is taken."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import modak
from modak.core import faults
from modak.core.errors import ModakError
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.site import Site
from tests.load.conftest import TOKEN, Api, adopted, serving
from tests.support.store_proxy import StoreProxy
from tests.tables.conftest import settings_for
from tests.tables.events import Events


def _lines(*keys: int) -> bytes:
    return "".join(json.dumps({"id": 1000 + key, "ts": key, "body": "loaded"}) + "\n" for key in keys).encode()


def _sent(api: Api, *keys: int, label: str, **more: Any) -> dict[str, Any]:
    return modak.load("public.events", _lines(*keys), label=label, url=api.url, token=TOKEN, **more)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client would have waited before each further try."""
    slept: list[float] = []
    monkeypatch.setattr("modak.runtime.loading.time", SimpleNamespace(sleep=slept.append))
    return slept


def test_corrections_that_are_not_folded_put_new_batches_off(
    fresh_database: Dsn, warehouse: str, spark_home: Path, site: Site, events: Events
) -> None:
    settings = settings_for(
        fresh_database, warehouse, spark_home, MODAK_LOAD_TOKEN=TOKEN, MODAK_DELTA_BACKLOG_WARN_ROWS="1"
    )
    with open_site(settings) as strained, serving(strained) as url:
        api = Api(url)
        assert api.post(_lines(1, 2, 3), "three").json()["delta_rows"] == 3
        assert api.post(_lines(4), "fourth").status_code == 200
        put_off = api.post(_lines(210), "next")
        assert (put_off.status_code, put_off.headers["Retry-After"]) == (429, "1")
        assert put_off.json()["error"] == "load.pressure"
        assert put_off.json()["message"] == "4 corrections of public.events wait to be worked off."
        events.sql("DELETE FROM modak.delta")
        assert api.post(_lines(210), "next").json()["replay"] is False


def test_staged_labels_that_are_not_adopted_put_new_batches_off(
    api: Api, site: Site, leader: Leader, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.post(_lines(*range(12)), "waits")
    monkeypatch.setattr("modak.tables.load.run.MOST_STAGED", 1)
    put_off = api.post(_lines(210), "next")
    assert (put_off.status_code, put_off.headers["Retry-After"]) == (429, "1")
    assert put_off.json()["message"] == "1 staged loads of public.events wait to be worked off."
    adopted(site, leader, events)
    assert api.post(_lines(210), "next").status_code == 200


def test_where_all_places_are_taken_the_next_batch_is_put_off(
    site: Site, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modak.runtime.web.load.PLACES", 1)
    arrived, go = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "load.before_commit":
            arrived.set()
            go.wait(120)

    with serving(site) as url:
        api = Api(url)
        faults.watch(hold)
        answers: list[int] = []
        first = threading.Thread(target=lambda: answers.append(api.post(_lines(210), "first").status_code))
        first.start()
        assert arrived.wait(60)
        faults.watch(None)
        put_off = api.post(_lines(211), "second")
        assert (put_off.status_code, put_off.headers["Retry-After"]) == (429, "1")
        assert (put_off.json()["error"], put_off.json()["message"]) == ("load.busy", "1 batches are being loaded.")
        go.set()
        first.join(60)
        assert answers == [200]
        assert api.post(_lines(211), "second").status_code == 200


def test_the_python_client_comes_back_until_the_backlog_is_worked_off(
    api: Api, site: Site, leader: Leader, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.post(_lines(*range(12)), "waits")
    monkeypatch.setattr("modak.tables.load.run.MOST_STAGED", 1)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            adopted(site, leader, events)

    monkeypatch.setattr("modak.runtime.loading.time", SimpleNamespace(sleep=sleep))
    answer = _sent(api, 210, label="patient")
    assert (answer["hot_rows"], answer["replay"]) == (1, False)
    assert len(slept) == 3
    assert all(0.2 * 2**at / 2 <= seconds <= 0.2 * 2**at for at, seconds in enumerate(slept, start=1)), "they grow"


def test_the_python_client_gives_up_after_its_tries_and_the_label_is_free(
    api: Api, site: Site, leader: Leader, events: Events, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.post(_lines(*range(12)), "waits")
    monkeypatch.setattr("modak.tables.load.run.MOST_STAGED", 1)
    with pytest.raises(ModakError, match="wait to be worked off") as given_up:
        _sent(api, 210, label="impatient", tries=3)
    assert (given_up.value.code, given_up.value.retryable, len(pauses)) == ("load.pressure", True, 2)
    adopted(site, leader, events)
    assert _sent(api, 210, label="impatient")["replay"] is False
    with pytest.raises(ModakError, match="no partition takes"):
        _sent(api, 9999, label="wrong")
    assert len(pauses) == 2, "what is wrong is not sent again"


def test_a_batch_whose_answer_was_lost_is_sent_again_and_loaded_once(
    api: Api, events: Events, pauses: list[float]
) -> None:
    with StoreProxy(api.url, seed=1, rate=1, faults=("lost_answer",), most=2) as proxy:
        answer = _sent(Api(proxy.endpoint), 210, label="lost")
        assert (answer["replay"], answer["hot_rows"], proxy.broken["lost_answer"]) == (True, 1, 2)
    assert len(pauses) == 2
    assert [row for row in events.heap() if row[0] == 1210] == [(1210, 210, "loaded")]
