"""The application: which routes there are, who may call them, what every answer carries.

`create_app` takes further routers (Stream Load, the console), which bring their own rules about who may call them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse

from modak import __version__
from modak.runtime.web import asking, health, iceberg, stores, tables
from modak.runtime.web.bodies import Bodies
from modak.runtime.web.context import API, Context
from modak.runtime.web.errors import add_handlers
from modak.runtime.web.measured import Measured
from modak.runtime.web.room import Room

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

    # The last one added is the outermost.
    app.add_middleware(Bodies, guard=context.guard)
    app.add_middleware(Room)
    app.add_middleware(Measured)
    return app
