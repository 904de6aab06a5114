"""The processes in which queries run: none outlives its time, takes more than its memory or is left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modak.core.errors import ModakError
from modak.postgres.dsn import Dsn
from modak.runtime.opening import open_site
from modak.runtime.web.queries import Queries
from modak.tables.site import Site
from tests.spark_fixtures import QUICK_JAVA
from tests.tables.conftest import settings_for

pytestmark = [pytest.mark.spark]

ENDLESS = (
    "SELECT aggregate(sequence(1, 1000000), 0L, (s, x) -> s + aggregate(sequence(1, 1000000), 0L, (t, y) -> t + y))"
    " FROM VALUES (1)"
)
"""Spark works this out in its optimizer, where no cancellation is heard."""


@pytest.fixture(scope="module")
def site(database: Dsn, spark_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    more = {
        "MODAK_QUERY_MEMORY": "512MiB",
        "MODAK_SPARK_CONF_spark_driver_extraJavaOptions": QUICK_JAVA["spark.driver.extraJavaOptions"],
    }
    with open_site(settings_for(database, str(tmp_path_factory.mktemp("warehouse")), spark_home, **more)) as opened:
        yield opened


@pytest.fixture(scope="module")
def queries(site: Site) -> Iterator[Queries]:
    """Children that the tests here share, as far as they live."""
    queries = Queries(site, 60, 1000)
    yield queries
    left = [pid for child in queries.children for pid in child.pids]
    queries.close()
    until(lambda: not any(map(alive, left)))


def rows(answer: bytes) -> Any:
    return json.loads(answer)["rows"]


def alive(pid: int) -> bool:
    try:
        # One that has ended and waits for its parent has no command line any more.
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


def in_session(leader: int) -> list[int]:
    """The processes that a child has started, itself included."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                if os.getsid(int(each.name)) == leader and alive(int(each.name)):
                    found.append(int(each.name))
            except ProcessLookupError:
                continue
    return found


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_query_that_hears_no_cancellation_is_ended_with_its_process(queries: Queries) -> None:
    assert rows(queries.ask("SELECT 1")) == [["1"]]
    [child] = queries.children
    began = time.monotonic()
    with pytest.raises(ModakError) as caught:
        queries.ask(ENDLESS, seconds=1)
    assert caught.value.code == "sql.timeout"
    assert time.monotonic() - began < 20
    until(lambda: not in_session(child.pids[0]))
    assert rows(queries.ask("SELECT 2")) == [["2"]]


def test_a_value_larger_than_the_memory_ends_its_query_alone(queries: Queries, spark: Any) -> None:
    with pytest.raises(ModakError) as caught:
        queries.ask("SELECT repeat('x', 2000000000)")
    assert caught.value.code == "sql.too_large"
    assert "MODAK_QUERY_MEMORY" in caught.value.hint
    assert spark.sql("SELECT 1 AS one").collect()[0].one == 1
    assert rows(queries.ask("SELECT 3")) == [["3"]]


def test_an_answer_is_held_up_to_a_limit(queries: Queries) -> None:
    with pytest.raises(ModakError) as caught:
        queries.ask("SELECT repeat('x', 1000000) FROM range(80)")
    assert (caught.value.code, caught.value.message) == ("sql.too_large", "The answer is larger than 64 MiB of text.")
    assert len(rows(queries.ask("SELECT repeat('x', 1000000) FROM range(20)"))) == 20


def test_a_child_shows_no_secret_and_goes_when_it_is_idle(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = Queries(site, 60, 1000)
    assert rows(queries.ask("SELECT 1")) == [["1"]]
    [child] = queries.children
    together = in_session(child.pids[0])
    assert set(child.pids) <= set(together)
    for pid in together:
        assert site.dsn.password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    monkeypatch.setattr("modak.runtime.web.queries.IDLE_SECONDS", 0.1)
    assert rows(queries.ask("SELECT 2")) == [["2"]]
    until(lambda: not queries.children and not any(map(alive, together)))
    queries.close()


def test_closing_ends_a_child_that_is_still_starting(site: Site) -> None:
    queries, told = Queries(site, 60, 1000), list[str]()

    def ask() -> None:
        with pytest.raises(ModakError) as caught:
            queries.ask("SELECT 1")
        told.append(caught.value.code)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: queries.children)
    [child] = queries.children
    # The first of its Java processes runs.
    until(lambda: len(in_session(child.pids[0])) > 1)
    queries.close()
    asking.join(60)
    assert told == ["api.busy"]
    until(lambda: not in_session(child.pids[0]))


def test_a_child_goes_with_its_parent_whatever_it_is_doing(site: Site) -> None:
    settings = {
        "MODAK_PG_URL": site.dsn.safe(),
        "MODAK_PG_PASSWORD": site.dsn.password,
        "MODAK_HOME": str(site.settings.home.path),
        "MODAK_QUERY_MEMORY": "512MiB",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.asker", ENDLESS],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child, java = map(int, parent.stdout.readline().split())
        assert alive(child)
        assert alive(java)
        time.sleep(1)
        parent.send_signal(signal.SIGKILL)
    until(lambda: not in_session(child))
