"""The world fails (addresses, disks, connections, rights): a clear error, nothing lost, and the next run goes on."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from modak import config
from modak.core import faults
from modak.core.errors import ModakError
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.site import Site
from tests.support.proxy import FaultProxy
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.invariants import Invariants

pytestmark = pytest.mark.spark

ROWS = {(i, i, f"row {i}") for i in range(251)}


def refuse(settings: config.Settings) -> ModakError:
    with pytest.raises(ModakError) as refused, open_site(settings):
        pass
    return refused.value


def failing(events: Events, leader: Leader) -> ModakError:
    with pytest.raises(ModakError) as failed:
        events.tier(leader)
    return failed.value


def strays(folder: Path) -> list[str]:
    """Files of operations that did not land."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.parquet"))


@pytest.mark.parametrize(
    ("wrong", "code", "named"),
    [
        ({"dbname": "nowhere"}, "postgres.no_database", "MODAK_PG_URL"),
        ({"password": "wrong"}, "postgres.auth", "MODAK_PG_PASSWORD"),
        ({"user": "nobody_at_all"}, "postgres.auth", "MODAK_PG_USER"),
        ({"port": 0}, "postgres.unreachable", "MODAK_PG_URL"),
    ],
)
def test_a_wrong_address_is_told_plainly(
    fresh_database: Dsn, warehouse: str, tmp_path: Path, wrong: dict[str, str], code: str, named: str
) -> None:
    if "port" in wrong:
        with socket.create_server(("127.0.0.1", 0)) as free:
            wrong = {"port": free.getsockname()[1]}
    error = refuse(settings_for(replace(fresh_database, **wrong), warehouse, tmp_path))  # type: ignore[arg-type]
    assert error.code == code
    assert named in error.hint
    assert fresh_database.password not in str(error)


@dataclass
class Disk:
    """A small file system of its own as the warehouse."""

    path: Path

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True, capture_output=True)

    def fill(self) -> None:
        """Leave a few kilobytes: enough for metadata, too little for rows."""
        with (self.path / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(b"x" * 4096)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("this account cannot mount a file system")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


@pytest.fixture
def on_disk(disk: Disk, fresh_database: Dsn, spark_home: Path, spark: object) -> Iterator[Events]:
    with open_site(settings_for(fresh_database, str(disk.path), spark_home)) as site:
        _ = site.spark
        events = Events.create(site)
        events.register()
        yield events


def test_no_space_left_in_the_warehouse(on_disk: Events, disk: Disk) -> None:
    with Leader.campaign(on_disk.site, 5) as leader:
        disk.fill()
        error = failing(on_disk, leader)
        assert "space" in f"{error.message} {error.hint}".lower()
        assert error.retryable
        assert on_disk.everything() == ROWS
        assert on_disk.sql("SELECT count(*) FROM public.events") == [(251,)]
        (disk.path / "ballast").unlink()
        assert strays(disk.path) == []
        report = on_disk.tier(leader)
    assert (report.rows, report.dropped) == (200, ("events_0", "events_100"))
    assert on_disk.everything() == ROWS
    assert on_disk.snapshots() == 1


def test_no_space_left_while_the_commit_is_prepared(on_disk: Events, disk: Disk) -> None:
    with Leader.campaign(on_disk.site, 5) as leader:
        faults.watch(lambda point: disk.fill() if point == "export.after_tasks" else None)
        error = failing(on_disk, leader)
        faults.watch(None)
        assert "space" in f"{error.message} {error.hint}".lower()
        (disk.path / "ballast").unlink()
        assert on_disk.everything() == ROWS
        assert on_disk.tier(leader).rows == 200
    assert on_disk.everything() == ROWS
    assert len(strays(disk.path)) == 2


def test_a_read_only_warehouse(on_disk: Events, disk: Disk) -> None:
    with Leader.campaign(on_disk.site, 5) as leader:
        disk.remount("ro")
        error = failing(on_disk, leader)
        assert "Cannot write" in error.message
        assert "writable" in error.hint
        assert on_disk.sql("SELECT count(*) FROM public.events") == [(251,)]
        disk.remount("rw")
        assert on_disk.tier(leader).rows == 200
    assert on_disk.everything() == ROWS
    assert len(strays(disk.path)) == 2


def test_a_warehouse_that_turns_read_only_before_the_commit(on_disk: Events, disk: Disk) -> None:
    with Leader.campaign(on_disk.site, 5) as leader:
        faults.watch(lambda point: disk.remount("ro") if point == "landing.before_prepare" else None)
        error = failing(on_disk, leader)
        faults.watch(None)
        assert "right to write there" in error.hint
        disk.remount("rw")
        assert on_disk.tier(leader).rows == 200
    assert on_disk.everything() == ROWS
    assert len(strays(disk.path)) == 2
    assert on_disk.snapshots() == 1


def test_a_warehouse_that_cannot_be_a_folder(
    fresh_database: Dsn, tmp_path: Path, spark_home: Path, spark: object
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with open_site(settings_for(fresh_database, str(tmp_path / "file" / "warehouse"), spark_home)) as site:
        _ = site.spark
        events = Events.create(site)
        with pytest.raises(ModakError) as refused:
            events.register()
        assert str(tmp_path / "file") in f"{refused.value.message} {refused.value.hint}"
        assert events.sql("SELECT count(*) FROM modak.tables") == [(0,)]


@pytest.fixture
def proxied(
    fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object
) -> Iterator[tuple[Events, FaultProxy]]:
    """A site that reaches its database through a proxy; the table is made beside it."""
    with FaultProxy(fresh_database.host, fresh_database.port) as proxy:
        through = replace(fresh_database, port=proxy.port)
        short = {"MODAK_LEASE_SECONDS": "2", "MODAK_CAMPAIGN_INTERVAL_SECONDS": "0.2"}
        with open_site(settings_for(through, warehouse, spark_home, **short)) as site:
            _ = site.spark
            yield Events.create(site), proxy


@pytest.mark.parametrize(
    "point", ["seal.after_trigger", "export.after_tasks", "landing.prepared", "reclaim.before_drop"]
)
def test_connections_that_break_in_mid_run(proxied: tuple[Events, FaultProxy], point: str) -> None:
    events, proxy = proxied
    events.register()
    with Leader.campaign(events.site, 5) as leader:
        cuts: list[str] = []

        def cut(reached: str) -> None:
            if reached == point and not cuts:
                cuts.append(reached)
                proxy.cut()

        faults.watch(cut)
        with contextlib.suppress(ModakError):
            events.tier(leader)
        faults.watch(None)
        assert cuts
    with Leader.campaign(events.site, 15) as leader:
        while events.tier(leader).changed:
            pass
    assert events.everything() == ROWS
    assert events.sql("SELECT count(*) FROM public.events WHERE ts < 200") == [(0,)]
    assert events.snapshots() == 1
    assert events.site.reader.unfinished_ops() == ()


def test_a_pass_whose_commit_is_not_acknowledged_finds_that_it_landed(
    proxied: tuple[Events, FaultProxy], fresh_database: Dsn, warehouse: str
) -> None:
    events, proxy = proxied
    events.register()
    with Leader.campaign(events.site, 5) as leader:

        def swallow(reached: str) -> None:
            if reached == "catalog.before_commit" and not proxy.swallowed.is_set():
                proxy.swallow_answers_after(b"COMMIT")

        faults.watch(swallow)
        with capture_logs() as logged:
            report = events.tier(leader)
        faults.watch(None)
        assert proxy.swallowed.is_set()
        assert (report.rows, report.dropped) == (200, ("events_0", "events_100"))
        assert not events.tier(leader).changed
    told = [entry["event"] for entry in logged]
    assert told.count("commit.acknowledgement_lost") == told.count("commit.landed_unacknowledged") == 1
    assert not {"lake.commit_again", "tiering.again"} & set(told)
    assert events.snapshots() == 1
    Invariants(fresh_database, warehouse).check(ROWS)


@dataclass
class Ordinary:
    """A worker that is an ordinary role: it may create in the database and is a member of the tables' owner."""

    site: Site
    events: Events
    worker: str
    owner: str
    admin: Dsn

    def as_admin(self, statement: str) -> None:
        with connect(self.admin, autocommit=True) as conn:
            conn.execute(statement)  # type: ignore[arg-type]


@pytest.fixture
def ordinary(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Ordinary]:
    mark, password = secrets.token_hex(4), secrets.token_hex(8)
    worker, owner = f"worker_{mark}", f"owner_{mark}"
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute(f"CREATE ROLE {owner}; CREATE ROLE {worker} LOGIN PASSWORD '{password}' IN ROLE {owner}")
        conn.execute(f"GRANT CREATE ON DATABASE {fresh_database.dbname} TO {worker}")
        conn.execute(f"GRANT CREATE ON SCHEMA public TO {worker}, {owner}")
    dsn = replace(fresh_database, user=worker, password=password)
    with open_site(settings_for(dsn, warehouse, spark_home)) as site:
        _ = site.spark
        admin = Site(settings_for(fresh_database, warehouse, spark_home), fresh_database)
        events = Events.create(admin)
        for table in ("events", "events_0", "events_100", "events_200"):
            events.sql(f"ALTER TABLE public.{table} OWNER TO {owner}")
        yield Ordinary(site, Events(site, events.name), worker, owner, fresh_database)
    with connect(fresh_database, autocommit=True) as conn:
        conn.execute(f"DROP OWNED BY {worker}, {owner} CASCADE; DROP ROLE {worker}, {owner}")


@pytest.mark.bare
def test_an_ordinary_role_can_do_all_of_it(ordinary: Ordinary) -> None:
    ordinary.events.register()
    with Leader.campaign(ordinary.site, 5) as leader:
        assert ordinary.events.tier(leader).dropped == ("events_0", "events_100")
    ordinary.as_admin(f"SET ROLE {ordinary.owner}; INSERT INTO public.events VALUES (1000, 50, 'history')")
    assert ordinary.events.everything() == ROWS | {(1000, 50, "history")}


@pytest.mark.bare
@pytest.mark.parametrize(
    "point", ["seal.before_trigger", "export.snapshot_taken", "landing.before_prepare", "reclaim.before_detach"]
)
def test_a_right_that_is_revoked_in_mid_run(ordinary: Ordinary, point: str) -> None:
    events = ordinary.events
    events.register()
    with Leader.campaign(ordinary.site, 5) as leader:
        revoked: list[str] = []

        def revoke(reached: str) -> None:
            if reached == point and not revoked:
                revoked.append(reached)
                ordinary.as_admin(f"REVOKE {ordinary.owner} FROM {ordinary.worker}")

        faults.watch(revoke)
        error = failing(events, leader)
        faults.watch(None)
        assert revoked
        assert error.code == "postgres.privilege"
        assert "Grant" in error.hint
        ordinary.as_admin("UPDATE public.events SET body = 'meanwhile' WHERE id = 5")
        ordinary.as_admin(f"GRANT {ordinary.owner} TO {ordinary.worker}")
        while events.tier(leader).changed:
            pass
    assert events.everything() == (ROWS - {(5, 5, "row 5")}) | {(5, 5, "meanwhile")}
    assert events.sql("SELECT count(*) FROM public.events WHERE ts < 200") == [(0,)]
    assert ordinary.site.reader.unfinished_ops() == ()
