"""A process that does one small thing without Spark: `python -m tests.support.aside note OP --kill journal.after_note`.

It takes its settings from the environment as a worker does and dies by SIGKILL at the named fault point. What it does
can be done in the process of the test too (`ACTS`), which is how it is tried a second time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import psycopg
import pyarrow as pa

from modak import config
from modak.catalog import operators, pins, profiles, spill
from modak.catalog.journal import Journal
from modak.catalog.migrate import migrate
from modak.catalog.records import Pin
from modak.catalog.write import CatalogWriter
from modak.config import Settings
from modak.core import faults
from modak.core.clock import SystemClock
from modak.core.faults import Fault
from modak.core.ids import OpId
from modak.core.names import TableName
from modak.lake.iceberg.files import FileWriter
from modak.lake.model import DataFile, LakeColumn, Layout
from modak.measurements.leases import Lease
from modak.postgres.connect import connect
from modak.postgres.place import dsn_of
from modak.runtime import demo
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.runtime.publishing import publish
from modak.runtime.withdrawing import withdraw_all
from modak.storage.objects import Objects
from modak.tables.fold.run import fold
from modak.tables.maintenance import erasures, policy, requests
from modak.tables.maintenance.run import maintain
from modak.tables.repair import repair
from modak.tables.tiering.run import TieringReport, tier

Act = Callable[[Settings, str], Any]


def main() -> None:
    """Do one thing, and meet the fault on the way."""
    arguments = _arguments()
    faults.arm(Fault(arguments.kill, "kill", arguments.after))
    ACTS[arguments.act](config.load(os.environ), arguments.on)


def _open(settings: Settings) -> psycopg.Connection[Any]:
    return connect(dsn_of(settings), autocommit=True)


def _begin(settings: Settings, table: str) -> Pin:
    return pins.begin(dsn_of(settings), TableName.parse(table))


def _renew(settings: Settings, pin: str) -> bool:
    with _open(settings) as conn:
        return pins.renew(conn, int(pin))


def _demo(settings: Settings, _: str) -> bool:
    with connect(dsn_of(settings)) as conn:
        if not demo.exists(conn):
            demo.create(conn, rows=1000)
        return demo.exists(conn)


def _profile(settings: Settings, name: str) -> None:
    with connect(dsn_of(settings)) as conn:
        profiles.create(conn, name, "file:///srv/lake", default=True)


def _pause(settings: Settings, table_id: str) -> bool:
    with connect(dsn_of(settings)) as conn:
        return operators.pause(conn, int(table_id), "operator")


def _resume(settings: Settings, table_id: str) -> bool:
    with connect(dsn_of(settings)) as conn:
        return operators.resume(conn, int(table_id))


def _request(settings: Settings, table_id: str) -> tuple[int, bool]:
    with connect(dsn_of(settings)) as conn:
        return operators.request_maintenance(conn, int(table_id), "operator")


def _file(settings: Settings, table: str) -> tuple[int, bool]:
    with open_site(settings) as site:
        return requests.file_request(site, TableName.parse(table))


def _policy(settings: Settings, table: str) -> None:
    with open_site(settings) as site:
        policy.edit(site, TableName.parse(table), {"orphan_grace_hours": 1}, (), reset=False)


def _ask(settings: Settings, table: str) -> int:
    with open_site(settings) as site:
        return erasures.ask(site, TableName.parse(table), "id = 5")


def _publish(settings: Settings, table: str) -> str:
    with open_site(settings) as site:
        return publish(site, TableName.parse(table))


def _withdraw_all(settings: Settings, _: str) -> int:
    with open_site(settings) as site:
        return withdraw_all(site)


def _withdraw(settings: Settings, erasure_id: str) -> bool:
    with open_site(settings) as site:
        return erasures.withdraw(site, int(erasure_id))


def _end(settings: Settings, pin: str) -> bool:
    with _open(settings) as conn:
        return pins.end(conn, int(pin))


def _sweep(settings: Settings, _: str) -> int:
    with _open(settings) as conn:
        return pins.sweep(conn)


def _migrate(settings: Settings, _: str) -> list[str]:
    with _open(settings) as conn:
        return migrate(conn)


def _note(settings: Settings, op: str) -> None:
    Journal(CatalogWriter(dsn_of(settings))).note(OpId(op), folders=["file:///f"])


def _landed(settings: Settings, op: str) -> bool:
    return Journal(CatalogWriter(dsn_of(settings))).landed(OpId(op))


def _forget(settings: Settings, table_id: str) -> None:
    with _open(settings) as conn:
        spill.forget(conn, int(table_id))


def _repair(settings: Settings, _: str) -> int:
    with open_site(settings) as site, Leader.campaign(site, 60) as leader:
        return repair(site, leader.epoch)


def _tier(settings: Settings, table: str) -> TieringReport:
    with open_site(settings) as site, Leader.campaign(site, 60) as leader:
        return tier(site, leader.epoch, TableName.parse(table))


def _maintain(settings: Settings, table: str) -> None:
    with open_site(settings) as site, Leader.campaign(site, 60) as leader:
        maintain(site, leader.epoch, TableName.parse(table), engine="embedded")


def _maintain_late(settings: Settings, key: str) -> None:
    """A pass during whose rewrite the row of this key is deleted."""
    name = TableName("public", "events")
    with open_site(settings) as site, Leader.campaign(site, 60) as leader:

        def late(reached: str) -> None:
            if reached == "rewrite.after_tasks":
                faults.watch(None)
                with site.connect(autocommit=True) as conn:
                    table_id = site.reader.state(name).table.table_id
                    conn.execute("SELECT modak.record_change(%s, %s, %s, NULL, NULL)", (table_id, key, int(key)))
                fold(site, leader.epoch, name)

        faults.watch(late)
        maintain(site, leader.epoch, name, engine="embedded")


def _write(_: Settings, folder: str) -> list[DataFile]:
    return _written(folder).close()


def _abort(_: Settings, folder: str) -> None:
    writer = _written(folder)
    writer.close()
    writer.abort()


def _written(folder: str) -> FileWriter:
    writer = FileWriter(folder, [LakeColumn("k", "long", field_id=1)], Layout(), task="0", tier_key="k")
    writer.write(pa.RecordBatch.from_arrays([pa.array([1, 2, 3], pa.int64())], schema=writer.schema))
    return writer


def _read(_: Settings, store: str) -> Lease:
    return Lease(Objects.of(store), SystemClock())


ACTS: dict[str, Act] = {
    "abort": _abort,
    "ask": _ask,
    "begin": _begin,
    "demo": _demo,
    "end": _end,
    "file": _file,
    "forget": _forget,
    "landed": _landed,
    "maintain": _maintain,
    "maintain-late": _maintain_late,
    "migrate": _migrate,
    "note": _note,
    "pause": _pause,
    "policy": _policy,
    "profile": _profile,
    "publish": _publish,
    "read": _read,
    "renew": _renew,
    "repair": _repair,
    "request": _request,
    "resume": _resume,
    "sweep": _sweep,
    "tier": _tier,
    "withdraw": _withdraw,
    "withdraw-all": _withdraw_all,
    "write": _write,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.support.aside")
    parser.add_argument("act", choices=sorted(ACTS))
    parser.add_argument("on", nargs="?", default="", help="the table, pin, operation or folder that it is about")
    parser.add_argument("--kill", metavar="POINT", required=True, help="die there by SIGKILL")
    parser.add_argument("--after", metavar="TIMES", type=int, default=0, help="having passed it so often")
    return parser.parse_args()


if __name__ == "__main__":
    main()
