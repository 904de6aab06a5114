"""uvicorn in a thread of the daemon: it starts before the campaign, so that a standby answers its probes too."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
from fastapi import APIRouter

from modak.core.errors import ModakError
from modak.runtime.web.app import create_app
from modak.runtime.web.context import Context

log = structlog.get_logger()

_END_SECONDS = 5


@contextmanager
def listening(
    context: Context, port: int, further: Sequence[APIRouter] = (), *, gate: Callable[[Any], Any] | None = None
) -> Iterator[str]:
    """Serve HTTP while the block runs; yields the address. Port 0 takes a free one. A gate stands before all routes."""
    import uvicorn

    from modak.runtime.web.connections import Prompt

    host = context.site.settings.http.host.strip("[]")
    app = create_app(context, further)
    config = uvicorn.Config(
        gate(app) if gate else app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        http=Prompt,
        # uvicorn's own limit counts connections that ask for nothing, and refuses the probes as well.
        limit_concurrency=None,
        timeout_graceful_shutdown=_END_SECONDS,
    )
    server = uvicorn.Server(config)
    bound = _bind(host, port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="modak-http", daemon=True)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{bound.getsockname()[1]}"
    context.pulse.address = address
    thread.start()
    log.info("http.listening", address=address)
    try:
        with context.series.sampling():
            yield address
    finally:
        server.should_exit = True
        context.queries.close()
        thread.join(timeout=2 * _END_SECONDS)
        bound.close()


def _bind(host: str, port: int) -> socket.socket:
    family: Any = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise ModakError(
            "http.address_in_use" if error.errno == 98 else "http.address",
            f"HTTP cannot listen on {host}:{port}: {error.strerror}.",
            hint="Choose another MODAK_METRICS_PORT or MODAK_CONSOLE_PORT, or MODAK_HTTP_HOST.",
        ) from None
    return bound
