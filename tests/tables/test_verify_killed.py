"""A verification that is killed leaves nothing but a pin, and the pin lapses."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from modak.tables.site import Site
from tests.tables.events import Events

HOLD = """
import sys, time
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.tables.verify.point import Point
with Point(Dsn.parse(sys.argv[1]), TableName("public", "events"), lifetime_seconds=3):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.spark
def test_a_killed_verification_holds_nothing_for_long(site: Site, events: Events) -> None:
    events.register()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, site.dsn.uri()], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        locks = "SELECT count(*) FROM pg_locks WHERE relation = 'public.events_0'::regclass"
        assert events.sql(locks) == [(1,)]
        time.sleep(3.5)
        assert len(site.reader.state(events.name).pins) == 1, "a living verification renews its pin"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        until = time.monotonic() + 10
        while site.reader.state(events.name).pins or events.sql(locks) != [(0,)]:
            assert time.monotonic() < until
            time.sleep(0.2)
    finally:
        holder.kill()
        holder.wait()
