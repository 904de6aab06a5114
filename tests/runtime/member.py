"""A worker of a group for tests that treat it badly: `python -m tests.runtime.member PORT`.

The real host with the real daemon, without the Spark session: what it moves is small enough for the driver, and Java is
started by whoever leads. Its log goes to standard output as JSON lines; SIGTERM ends it cleanly.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import structlog

from modak import config
from modak.runtime import daemon
from modak.runtime.hosting import host
from modak.runtime.opening import open_site
from modak.runtime.pulse import Pulse
from modak.tables.site import Site


def _warm(site: Site, pulse: Pulse) -> None:
    """Java alone is enough, and only for whoever leads."""


def main() -> None:
    """Host until told to stop."""
    daemon._warm = _warm
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    with open_site(config.load(os.environ)) as site:
        host(site, stop=stop, port=int(sys.argv[1]))


if __name__ == "__main__":
    main()
