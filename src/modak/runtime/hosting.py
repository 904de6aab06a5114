"""A whole worker: the daemon with its heartbeat, its HTTP server where a port is given, metrics and traces.

`modak-worker run` and the console both host it; the console passes its own port and pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from modak.runtime import daemon, tracing
from modak.runtime.daemon import OnEvent
from modak.runtime.pulse import Pulse
from modak.tables.site import Site

if TYPE_CHECKING:
    from fastapi import APIRouter

    from modak.runtime.web.context import Context


log = structlog.get_logger()


class Guest(Protocol):
    """What else is served by the same server: the console."""

    def routers(self) -> Sequence[APIRouter]:
        """Further routes."""
        ...

    def gate(self, app: Any) -> Any:
        """The whole application behind the guest's own checks."""
        ...


Guests = Callable[["Context"], Guest]


def host(
    site: Site,
    *,
    stop: threading.Event,
    on_event: OnEvent | None = None,
    port: int | None = None,
    guests: Guests | None = None,
) -> None:
    """Run the worker until `stop` is set; HTTP listens on `port`, else on MODAK_METRICS_PORT, else nowhere."""
    pulse = Pulse(site.clock)
    chosen = port if port is not None else site.settings.http.metrics_port
    with ExitStack() as stack:
        tracing.begin(site.settings.log.otlp_endpoint, pulse.holder)
        stack.callback(tracing.end)
        stack.enter_context(pulse.beating(site.dsn))
        if chosen is not None:
            from modak.runtime import metrics
            from modak.runtime.web.context import Context
            from modak.runtime.web.server import listening

            metrics.listen()
            context = Context(site, pulse)
            guest = guests(context) if guests else None
            further = [*loads(context), *(guest.routers() if guest else ())]
            stack.enter_context(listening(context, chosen, further, gate=guest.gate if guest else None))
        elif site.settings.load.token is not None:
            log.warning("load.not_served", because="MODAK_LOAD_TOKEN is set and MODAK_METRICS_PORT is not")
        daemon.run(site, stop=stop, on_event=on_event, pulse=pulse)


def loads(context: Context) -> Sequence[APIRouter]:
    """The router of Stream Load, where a token for it is set."""
    if context.site.settings.load.token is None:
        return ()
    from modak.runtime.web.load import router

    return (router(context.site),)
