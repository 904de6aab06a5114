"""Groups of real workers: one leads, whoever is killed or put to sleep is replaced, and nothing is done twice."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modak.postgres.connect import connect
from tests.runtime.group import Group, Watch, Writer, no_operation_was_done_twice, settled
from tests.tables.events import Events
from tests.tables.readers import duckdb_rows

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path, lease=4.0)
    try:
        yield made
    finally:
        made.close()


def prepared(group: Group, stack: contextlib.ExitStack) -> Events:
    """`public.events` registered, seen through a site of the test's own."""
    site = stack.enter_context(group.site())
    events = Events.create(site)
    events.register()
    return events


def everything(events: Events) -> list[tuple[int, int, str]]:
    """Heap from the cut-line on, and the lake below it."""
    state = events.site.reader.state(events.name)
    lake = [tuple(row.values()) for row in duckdb_rows(state.cutline.metadata_location)]
    return [*events.sql(f"SELECT * FROM public.events WHERE ts >= {state.cutline.t}"), *lake]  # type: ignore[list-item]


def test_one_leads_a_clean_end_hands_over_at_once_and_probes_tell_the_truth(group: Group) -> None:
    with contextlib.ExitStack() as stack:
        events = prepared(group, stack)
        one = group.start()
        group.until(lambda: group.leads() is one, "nobody leads")
        two = group.start()
        group.until(lambda: two.get("/readyz")[0] == 200, "the standby is not ready")
        group.until(lambda: (events.site.reader.state(events.name).cutline.t or 0) == 200, "nothing is tiered")
        status = two.get("/api/v1/cluster/status")[1]
        assert {each["role"] for each in status["workers"]} == {"leading", "standby"}
        assert [each["holder"] for each in status["workers"] if each["role"] == "leading"] == [
            status["leader"]["holder"]
        ]
        assert two.get("/api/v1/measurements/stats")[1]["role"] == "standby"
        assert one.terminate() == 0
        with connect(group.dsn, autocommit=True) as conn:
            # The lease was given away: its holder did not let it run out.
            row = conn.execute(
                "SELECT expires_at = '-infinity' OR holder NOT LIKE %s FROM modak.leader", (f"%:{one.process.pid}:%",)
            )
            assert row.fetchone() == (True,)
        group.until(lambda: group.leads() is two, "the standby does not take over")
        assert [entry for entry in two.said() if entry["event"] == "leader.acquired"]
        assert two.get("/readyz")[0] == 200
        # Postgres goes away: not ready, but alive; it comes back, and so does the worker.
        group.server.stop()
        group.until(lambda: two.get("/readyz")[0] == 503, "it is ready without Postgres")
        assert two.get("/livez")[0] == 200
        assert two.get("/api/v1/overview")[0] == 503
        group.server.start()
        group.until(lambda: two.get("/readyz")[0] == 200 and group.leads() is two, "it does not come back")
        events.sql("INSERT INTO public.events VALUES (350, 350, 'new')")
        group.until(lambda: (events.site.reader.state(events.name).cutline.t or 0) == 300, "work does not go on")
        assert two.terminate() == 0


def chaos(group: Group, events: Events, seconds: float, members: int, seed: int, *, on_time: bool) -> None:
    chance = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(members):
        group.start()
    group.until(group.leads, "nobody leads")
    writer, watch = Writer(group, seed), Watch(group)
    writer.start()
    watch.start()
    until = time.monotonic() + seconds
    restarts = 0
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.5, 2.0))
        leader = group.leads()
        act = chance.choice(["kill", "sleep", "restart", "standby"])
        if act in ("kill", "sleep"):
            # Whoever is to take over must be there: that a process needs time to start is no fault of the group.
            group.until(group.others_ready, "no standby is ready")
            leader = group.leads()
        if act == "restart":
            group.server.stop()
            group.server.start()
            restarts += 1
        elif act == "standby" and members > 1:
            others = [each for each in group.members if each is not leader and each.process.poll() is None]
            if others:
                chance.choice(others).kill()
                group.start()
        elif leader is not None and act == "kill":
            leader.kill()
            group.start()
        elif leader is not None:
            leader.signal(signal.SIGSTOP)
            time.sleep(group.lease * 1.5)
            leader.signal(signal.SIGCONT)
        group.until(group.leads, f"nobody leads after {act}")
    writer.ended.set()
    writer.join()
    group.until(lambda: settled(group, events), "the group does not come to rest")
    watch.ended.set()
    watch.join()
    rows = everything(events)
    found = {(row[0], row[1]): row[2] for row in rows}
    assert len(rows) == len(found), "a row is there twice"
    expected = {(i, i): f"row {i}" for i in range(251)} | writer.rows
    assert {key: value for key, value in found.items() if key not in writer.unsure - set(writer.rows)} == expected
    no_operation_was_done_twice(events)
    print(
        f"{len(watch.epochs)} epochs, {restarts} restarts of Postgres, longest gap {max(watch.gaps, default=0):.1f} s"
    )
    if on_time:
        assert max(watch.gaps, default=0.0) <= 2 * group.lease


def test_two_workers_survive_kills_sleeps_and_restarts(group: Group, request: pytest.FixtureRequest) -> None:
    seed = int(request.config.getoption("randomly_seed", 1))
    with contextlib.ExitStack() as stack:
        chaos(group, prepared(group, stack), 12.0, 2, seed, on_time=False)


@pytest.mark.full
@pytest.mark.parametrize("members", [2, 3])
def test_minutes_of_chaos(group: Group, request: pytest.FixtureRequest, members: int) -> None:
    seed = int(request.config.getoption("randomly_seed", 1)) + members
    with contextlib.ExitStack() as stack:
        chaos(group, prepared(group, stack), 180.0, members, seed, on_time=True)
