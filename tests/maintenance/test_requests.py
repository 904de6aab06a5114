"""Forced passes: one waits per table, one leader takes it, and whoever asked is told."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from modak.catalog import operators, pins
from modak.core import faults
from modak.core.errors import Refused
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.runtime.maintaining import answer, serving
from modak.tables.maintenance import requests
from modak.tables.maintenance.engine import Embedded
from modak.tables.repair import repair
from tests.cli.conftest import modak  # noqa: F401
from tests.maintenance.lake import Lake

POINTS = (
    "requests.before_file",
    "requests.after_file",
    "requests.before_claim",
    "requests.after_claim",
    "requests.before_finish",
    "requests.after_finish",
)


@pytest.fixture
def environ(lake: Lake) -> dict[str, str]:
    settings = lake.site.settings
    return {
        "MODAK_PG_URL": lake.site.dsn.safe(),
        "MODAK_PG_PASSWORD": lake.site.dsn.password,
        "MODAK_WAREHOUSE": settings.lake.warehouse,
        "MODAK_HOME": str(settings.home.path),
        "MODAK_MAINTENANCE_ENGINE": "embedded",
    }


@pytest.fixture
def served(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    """A leader that serves maintenance as the daemon does."""
    monkeypatch.setattr("modak.runtime.maintaining.POLL_SECONDS", 0.1)
    monkeypatch.setattr("modak.tables.maintenance.run.engine_of", lambda site, _name=None: Embedded(site))
    with serving(lake.site, lake.leader):
        yield lake


def rows(lake: Lake) -> list[Any]:
    return lake.events.sql(
        "SELECT request_id, claimed_at IS NOT NULL, finished_at IS NOT NULL, error FROM modak.maintenance_requests"
        " ORDER BY request_id"
    )


def from_file_to_answer(lake: Lake) -> None:
    requests.file_request(lake.site, lake.events.name)
    claimed = requests.claim(lake.site.writer(lake.leader.epoch))
    assert claimed is not None
    answer(lake.site, lake.leader, claimed, engine="embedded")


def test_a_request_filed_twice_is_one_run(lake: Lake) -> None:
    lake.delete(1)
    first, waiting = requests.file_request(lake.site, lake.events.name)
    again, refreshed = requests.file_request(lake.site, lake.events.name)
    assert (first, waiting, again, refreshed) == (first, False, first, True)
    claimed = requests.claim(lake.site.writer(lake.leader.epoch))
    assert claimed == requests.Claimed(first, lake.events.name)
    assert requests.claim(lake.site.writer(lake.leader.epoch)) is None
    assert answer(lake.site, lake.leader, claimed, engine="embedded") is not None
    found = requests.look(lake.site, first)
    assert found is not None
    assert found.finished_at is not None
    assert found.outcome is not None
    assert found.outcome["debt"]["deletes_before"] == 1
    assert found.op_id is not None
    op = lake.site.reader.op(found.op_id)  # type: ignore[arg-type]
    assert op is not None
    assert (op.kind, op.counters["debt"]["deletes_before"]) == ("maintenance", 1)
    ops = lake.events.sql("SELECT count(*) FROM modak.op_log WHERE kind = 'maintenance'")
    assert ops == [(1,)]


def test_an_operators_request_refreshes_the_one_that_waits(lake: Lake) -> None:
    first, _ = requests.file_request(lake.site, lake.events.name)
    look = "SELECT requested_by, requested_at FROM modak.maintenance_requests"
    ((_, filed_at),) = lake.events.sql(look)
    with lake.site.connect() as conn:
        assert operators.request_maintenance(conn, 1, "the console") == (first, False)
    ((by, refreshed_at),) = lake.events.sql(look)
    assert by == "the console"
    assert refreshed_at > filed_at
    assert requests.claim(lake.site.writer(lake.leader.epoch)) is not None
    with lake.site.connect() as conn:
        again, is_new = operators.request_maintenance(conn, 1, "the console")
    assert (again > first, is_new) == (True, True)


def test_a_table_that_nobody_registered_is_refused(lake: Lake) -> None:
    with pytest.raises(Refused, match="not registered"):
        requests.file_request(lake.site, TableName("public", "nothing"))


def test_only_one_of_many_claims_gets_the_request(lake: Lake) -> None:
    requests.file_request(lake.site, lake.events.name)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(requests.claim(lake.site.writer(lake.leader.epoch))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([each for each in found if each is not None]) == 1


def test_a_request_whose_leader_died_is_taken_up_by_the_next(lake: Lake) -> None:
    request, _ = requests.file_request(lake.site, lake.events.name)
    assert requests.claim(lake.site.writer(lake.leader.epoch)) is not None
    lake.leader.__exit__(None, None, None)
    with Leader.campaign(lake.site, 5) as successor:
        claimed = requests.claim(lake.site.writer(successor.epoch))
        assert claimed is not None
        assert claimed.request_id == request
        assert answer(lake.site, successor, claimed, engine="embedded") is not None
    assert [row[2] for row in rows(lake)] == [True]


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_leaves_a_request_that_is_answered_later(lake: Lake, point: str) -> None:
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        from_file_to_answer(lake)
    faults.arm(None)
    lake.leader.__exit__(None, None, None)
    with Leader.campaign(lake.site, 5) as successor:
        repair(lake.site, successor.epoch)
        requests.file_request(lake.site, lake.events.name)
        while (claimed := requests.claim(lake.site.writer(successor.epoch))) is not None:
            answer(lake.site, successor, claimed, engine="embedded")
    assert all(done and error is None for _, _, done, error in rows(lake))


def test_the_command_waits_and_prints_what_was_done(
    served: Lake,
    modak: Any,  # noqa: F811
    environ: dict[str, str],
) -> None:
    served.delete(1)
    done = modak("maintain", "--table", "public.events", **environ)
    assert done.exit_code == 0, done.output
    assert "delete debt: 1 file " in done.stdout
    assert "1 delete file applied, 1 deleted row gone" in done.stdout
    assert "orphans: orphan_sweep_enabled is false." in done.stdout
    filed = modak("maintain", "--table", "public.events", "--no-wait", **environ)
    assert "filed" in filed.stdout


def test_the_command_tells_how_far_the_pass_has_come(
    lake: Lake,
    modak: Any,  # noqa: F811
    environ: dict[str, str],
) -> None:
    shown = ({"pass": "debt", "done": 0, "total": 0}, {"pass": "debt", "done": 1, "total": 2})

    def serve() -> None:
        writer = lake.site.writer(lake.leader.epoch)
        while (claimed := requests.claim(writer)) is None:
            time.sleep(0.05)
        for progress in shown:
            requests.tell(writer, claimed.request_id, progress)
            time.sleep(1)
        requests.finish(writer, claimed.request_id, {"debt": {"skipped": "nothing"}}, None, None)

    server = threading.Thread(target=serve)
    server.start()
    done = modak("maintain", "--table", "public.events", **environ)
    server.join()
    assert done.exit_code == 0, done.output
    assert [line for line in done.stderr.splitlines() if line.startswith("delete debt")] == [
        "delete debt …",
        "delete debt 1 of 2 tasks …",
    ]


def test_a_dry_run_says_what_would_be_read_and_what_must_stay(
    lake: Lake,
    modak: Any,  # noqa: F811
    environ: dict[str, str],
) -> None:
    lake.delete(1)
    pins.begin(lake.site.dsn, lake.events.name)
    staged = lake.stage("waits", 40)
    plan = modak("maintain", "--table", "public.events", "--dry-run", **environ)
    assert plan.exit_code == 0, plan.output
    assert re.search(r"^Read [\d.,]+ [KMG]?i?B, written about [\d.,]+ [KMG]?i?B\.$", plan.stdout, re.MULTILINE)
    assert "1 pinned snapshot must stay, and everything since the oldest." in plan.stdout
    assert f"{len(staged)} staged files must stay." in plan.stdout


def test_without_a_leader_the_command_says_so_and_local_runs_the_pass(
    lake: Lake,
    modak: Any,  # noqa: F811
    environ: dict[str, str],
) -> None:
    lake.delete(1)
    lake.leader.__exit__(None, None, None)
    refused = modak("maintain", "--table", "public.events", **environ)
    assert refused.exit_code == 1
    assert "No worker leads" in refused.stderr
    assert "--local" in refused.stderr
    assert rows(lake) == []
    filed = modak("maintain", "--table", "public.events", "--no-wait", **environ)
    assert filed.exit_code == 0
    assert "No worker leads now" in filed.stderr
    assert "refreshed" in modak("maintain", "--table", "public.events", "--no-wait", **environ).stdout
    plan = modak("maintain", "--table", "public.events", "--dry-run", **environ)
    assert plan.exit_code == 0, plan.output
    assert "delete debt: 1 file " in plan.stdout
    assert "Nothing was changed." in plan.stderr
    local = modak("maintain", "--table", "public.events", "--local", **environ)
    assert local.exit_code == 0, local.output
    assert "1 delete file applied" in local.stdout
    assert [row[2] for row in rows(lake)] == [True], "the request that waited is answered by it"
    assert not [file for file in lake.files() if file.deletes]


def test_local_first_repairs_what_a_process_that_was_killed_has_left(
    lake: Lake,
    modak: Any,  # noqa: F811
    environ: dict[str, str],
) -> None:
    lake.delete(1)
    faults.arm(Fault("rewrite.before_tasks"))
    with pytest.raises(InjectedFault):
        lake.maintain()
    faults.arm(None)
    assert {op.kind for op in lake.site.reader.unfinished_ops()} == {"maintenance", "rewrite-debt"}
    lake.leader.__exit__(None, None, None)
    local = modak("maintain", "--table", "public.events", "--local", **environ)
    assert local.exit_code == 0, local.output
    assert lake.site.reader.unfinished_ops() == ()


def test_local_runs_under_the_same_lock(lake: Lake, modak: Any, environ: dict[str, str]) -> None:  # noqa: F811
    refused = modak("maintain", "--table", "public.events", "--local", "--wait", "0", **environ)
    assert refused.exit_code == 1
    assert "Another worker leads" in refused.stderr


def test_a_table_that_is_held_back_is_not_maintained_until_it_is_resumed(lake: Lake) -> None:
    writer = lake.site.writer(lake.leader.epoch)
    requests.file_request(lake.site, lake.events.name)
    with lake.site.connect() as conn:
        operators.pause(conn, 1, "me", "a migration")
    assert requests.claim(writer) is None
    with pytest.raises(Refused, match="held back by me: a migration") as refused:
        requests.file_request(lake.site, lake.events.name)
    assert refused.value.code == "tables.paused"
    with lake.site.connect() as conn:
        operators.resume(conn, 1)
    assert requests.claim(writer) is not None
