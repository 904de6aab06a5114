"""A process that ingests, loads or adopts and dies by SIGKILL: `python -m tests.ingest.victim POINT ACT …`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from modak import config
from modak.core import faults
from modak.core.faults import Fault
from modak.core.names import TableName
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.ingest.run import Request, ingest
from modak.tables.load.adopt import adopt, sweep
from modak.tables.load.run import LoadRequest, load

TABLE = TableName("public", "events")


def main(point: str, act: str, *words: str) -> None:
    with open_site(config.load(os.environ)) as site:
        match act:
            case "ingest":
                faults.arm(Fault(point, "kill"))
                ingest(site, Request(TABLE, words, "parquet", rewrite=True))
            case "load":
                faults.arm(Fault(point, "kill"))
                load(site, LoadRequest(TABLE, words[0], "jsonl"), Path(words[1]))
            case "adopt":
                with Leader.campaign(site, 120) as leader:
                    faults.arm(Fault(point, "kill"))
                    adopt(site, leader.epoch, TABLE)
            case "sweep":
                faults.arm(Fault(point, "kill"))
                sweep(site)


if __name__ == "__main__":
    main(*sys.argv[1:])
