"""The application: which routes there are, who may call them, what every answer carries.

`create_app` takes further routers (Stream Load, the console), which bring their own rules about who may call them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from modak import __version__
from modak.runtime import metrics
from modak.runtime.tracing import span
from modak.runtime.web import asking, health, iceberg, stores, tables
from modak.runtime.web.context import API, Context
from modak.runtime.web.errors import add_handlers

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_DESCRIPTION = """
Modak keeps the cold half of a Postgres database in an open lake. This is what the command line shows and does, over
HTTP. Send `Authorization: Bearer <token>`. Errors are `{"error": {"code", "message", "hint"}}`.
"""


def create_app(context: Context, further: Sequence[APIRouter] = ()) -> FastAPI:
    """All routes of a server; `further` ones are included as they are."""
    app = FastAPI(
        title="Modak",
        version=__version__,
        description=_DESCRIPTION,
        # The pages that FastAPI brings fetch their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.context = context
    add_handlers(app)
    app.include_router(health.router(context))
    app.include_router(tables.router(context))
    app.include_router(stores.router(context))
    if context.site.settings.http.console_sql:
        app.include_router(asking.router(context))
    app.include_router(iceberg.router(context))
    for router in further:
        app.include_router(router)

    @app.get(f"{API}/openapi.json", include_in_schema=False, dependencies=[Depends(context.guard.reader)])
    def document() -> JSONResponse:
        return JSONResponse(app.openapi())

    app.middleware("http")(_measured)
    return app


async def _measured(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    began = time.monotonic()
    with span(f"HTTP {request.method}", {"http.request.method": request.method, "url.path": request.url.path}):
        response = await call_next(request)
    route: Any = request.scope.get("route")
    path = str(getattr(route, "path", "unknown"))
    metrics.REQUESTS.labels(request.method, path, str(response.status_code)).inc()
    metrics.REQUEST_SECONDS.labels(path).observe(time.monotonic() - began)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response
