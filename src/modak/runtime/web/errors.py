"""Errors over HTTP: `{"error": {"code", "message", "hint"}}` and a status that says whose turn it is.

400 the request is wrong, 401 and 403 about tokens and what the role for queries may read, 404 and 405 about addresses,
409 the state of things does not allow it now, 413 its body or what it asks for is too large, 429 too much at once, 503
Postgres or the engine is away or too many requests are under way, 500 a fault of ours (logged, and not shown).
"""

from __future__ import annotations

from typing import Any

import psycopg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from modak.core.errors import ModakError, Refused, UsageError
from modak.postgres.connect import translate
from modak.runtime.web.auth import Forbidden, Unauthorised

log = structlog.get_logger()

_BY_CODE = {
    "catalog.not_registered": 404,
    "tables.not_registered": 404,
    "api.not_found": 404,
    "catalog.no_profile": 404,
    "api.busy": 429,
    "api.full": 503,
    "sql.timeout": 408,
    "sql.too_large": 413,
    "measurements.name": 400,
    "sql.failed": 400,
    "postgres.no_such_table": 409,
    "sql.not_granted": 403,
    "sql.row_security": 403,
}


_BY_KIND = {Unauthorised: 401, Forbidden: 403, UsageError: 400, Refused: 409}


class Problem(BaseModel):
    """What went wrong."""

    code: str
    message: str
    hint: str = ""


class Wrong(BaseModel):
    """The body of every answer that is an error."""

    error: Problem


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": Wrong, "description": text}
    for status, text in {
        400: "The request is wrong",
        401: "No token, or a wrong one",
        403: "The token does not allow this",
        404: "There is no such thing",
        409: "Not possible now",
        503: "Postgres or the engine is away",
    }.items()
}


def status_of(error: ModakError) -> int:
    """The HTTP status of an error."""
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    for kind, status in _BY_KIND.items():
        if isinstance(error, kind):
            return status
    return 503 if error.code.startswith(("postgres.", "spark.", "storage.")) else 409


def body_of(error: ModakError) -> dict[str, Any]:
    """The JSON body of an error."""
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def add_handlers(app: FastAPI) -> None:
    """Every exception that an endpoint raises on purpose becomes an answer; of others `crashed` makes one."""
    app.add_exception_handler(ModakError, _modak)
    app.add_exception_handler(psycopg.Error, _postgres)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)


async def answer_to(request: Request, error: ModakError | HTTPException) -> JSONResponse:
    """The answer to a refusal that no endpoint has raised."""
    return await (_modak if isinstance(error, ModakError) else _http)(request, error)


async def _modak(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ModakError)
    status = status_of(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {"Retry-After": "5"} if status in (429, 503) else {}
    return JSONResponse(body_of(error), status, headers)


async def _postgres(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, psycopg.Error)
    return await _modak(request, translate(error))


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0] if error.errors() else {"loc": (), "msg": "it cannot be read"}
    where = ".".join(str(part) for part in first["loc"][1:]) or "The request"
    return JSONResponse(
        body_of(UsageError("api.invalid", f"{where}: {first['msg']}.", hint="The OpenAPI document describes it.")), 400
    )


async def _http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {404: "api.not_found", 405: "api.method", 413: "api.too_large"}.get(error.status_code, "api.refused")
    return JSONResponse(
        {"error": {"code": code, "message": str(error.detail), "hint": ""}},
        error.status_code,
        dict(error.headers or {}),
    )


async def crashed(request: Request, error: Exception) -> JSONResponse:
    """The answer to a failure that nobody foresaw; the log has more."""
    log.error("api.crashed", code="api.crashed", method=request.method, path=request.url.path, exc_info=error)
    return JSONResponse(
        {"error": {"code": "api.crashed", "message": "This is a fault in Modak.", "hint": "The log has the details."}},
        500,
    )
