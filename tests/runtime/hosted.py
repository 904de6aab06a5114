"""A whole worker in a thread of the test: the host with heartbeat, daemon and HTTP, but without the Spark session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from modak.runtime import daemon
from modak.runtime.hosting import host
from modak.runtime.opening import open_site
from tests.support.ports import free_port

PATIENCE = 120.0


@contextmanager
def hosted(settings: Any) -> Iterator[str]:
    """Run a worker while the block lasts; yields the address of its HTTP server once it leads."""
    port, stop, failures = free_port(), threading.Event(), list[BaseException]()
    address = f"http://127.0.0.1:{port}"

    def work() -> None:
        try:
            host(site, stop=stop, port=port)
        except BaseException as failure:
            failures.append(failure)

    # Java alone is enough for what a test moves.
    with patch.object(daemon, "_warm", lambda _site, _pulse: None), open_site(settings) as site:
        worker = threading.Thread(target=work, name="hosted", daemon=True)
        worker.start()
        try:
            until(lambda: "modak_leader 1.0" in text_of(address), lambda: failures)
            yield address
        finally:
            stop.set()
            worker.join(PATIENCE)
        assert not worker.is_alive()
        assert not failures, failures


def text_of(address: str) -> str:
    """`/metrics` of a worker; nothing while it does not answer."""
    import httpx

    try:
        return httpx.get(f"{address}/metrics", timeout=30).text
    except httpx.TransportError:
        return ""


def until(holds: Callable[[], object], trouble: Callable[[], object] = lambda: None) -> None:
    """Wait for something to be so, as long as there is no trouble."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert not trouble(), trouble()
        assert time.monotonic() < deadline
        time.sleep(0.05)
