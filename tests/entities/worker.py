"""A process that works on an entity store and dies: `python -m tests.entities.worker flush --kill flush.published`."""

from __future__ import annotations

import argparse
import os

from modak import config
from modak.core import faults
from modak.core.faults import Fault
from modak.entities.compaction import compact
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.reconciling import reconcile
from modak.entities.store import EntityStore
from modak.entities.tables import install
from modak.postgres.dsn import Dsn
from tests.entities.world import SCHEMA


def again(store: EntityStore) -> None:
    """Install over what is there."""
    with store.connect() as conn:
        install(conn, store.tables)


ACTS = {
    "flush": flush,
    "init": lambda store: init(store, SCHEMA, replace_delta=True),
    "compact": compact,
    "repair": lambda store: reconcile(store, SCHEMA, repair=True),
    "install": again,
    "gc": lambda store: reconcile(store, SCHEMA, gc=True, grace_ms=0),
}


def main() -> None:
    """Do one thing, and be killed on the way."""
    parser = argparse.ArgumentParser(prog="tests.entities.worker")
    parser.add_argument("act", choices=sorted(ACTS))
    parser.add_argument("--kill", metavar="POINT")
    arguments = parser.parse_args()
    settings = config.load(os.environ)
    given = settings.postgres
    assert given.url is not None
    dsn = Dsn.parse(given.url, given.user, given.password.get_secret_value())
    faults.arm(Fault(arguments.kill, "kill") if arguments.kill else None)
    ACTS[arguments.act](EntityStore.open(settings, dsn))


if __name__ == "__main__":
    main()
