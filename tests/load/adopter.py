"""A leader that only adopts loads, for tests that kill it: `python -m tests.load.adopter`."""

from __future__ import annotations

import os
import time

from modak import config
from modak.core.errors import ModakError, NotLeader
from modak.runtime.leader import Leader
from modak.runtime.loads import adopt_all
from modak.runtime.opening import open_site
from modak.tables.repair import repair


def main() -> None:
    with open_site(config.load(os.environ)) as site:
        _ = site.lake
        while True:
            try:
                with Leader.campaign(site, 600) as leader:
                    repair(site, leader.epoch)
                    while not leader.lost:
                        adopt_all(site, leader)
                        time.sleep(0.05)
            except (NotLeader, ModakError):
                time.sleep(0.2)


if __name__ == "__main__":
    main()
