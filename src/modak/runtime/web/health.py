"""Probes and `/metrics`. The probes need no token and say no more than a supervisor must know.

They look at memory only, in the event loop itself: they wait for no thread, however many requests hold one.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse

from modak.runtime.pulse import Health
from modak.runtime.web.context import Context

_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def router(context: Context) -> APIRouter:
    """`/livez`, `/readyz` and `/metrics`."""
    routes = APIRouter(tags=["health"])

    @routes.get("/livez", summary="Whether this process can go on")
    async def live() -> JSONResponse:
        """503 when only a restart helps: a loop hangs, or the JVM is gone."""
        return _answer(context.pulse.live())

    @routes.get("/readyz", summary="Whether this process does its part")
    async def ready() -> JSONResponse:
        """503 while it starts or stops, and while Postgres does not answer. A standby is ready."""
        return _answer(context.pulse.ready())

    @routes.get(
        "/metrics",
        summary="Numbers for Prometheus",
        dependencies=[Depends(context.guard.reader)],
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    def metrics() -> Response:
        """In Prometheus' text format; gauges of tables come from the leader only."""
        return Response(context.fleet.text(), media_type=_TEXT)

    return routes


def _answer(health: Health) -> JSONResponse:
    word = "ok" if health.good else "failing"
    return JSONResponse({"status": word, "reasons": list(health.reasons)}, 200 if health.good else 503)
