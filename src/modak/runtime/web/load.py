"""`POST /api/load/{schema}.{table}`: the door of Stream Load.

The body goes to disk while it arrives; then one thread takes it in (`tables/load/run.py`). Tokens are compared in
constant time. So many batches at once as there are places; the next one is asked to come back.
"""

from __future__ import annotations

import hmac
import re
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from modak.core.errors import Conflict, ModakError, UsageError
from modak.core.names import TableName
from modak.runtime import metrics
from modak.tables.load.body import Spool, plain
from modak.tables.load.run import BadRows, LoadRequest, load, refuse_under_pressure
from modak.tables.site import Site

if TYPE_CHECKING:
    from modak.spark.texts import Format
    from modak.tables.load.body import Encoding

log = structlog.get_logger()

PLACES = 8
"""Batches at once per process."""

_FORMATS: dict[str, Format] = {
    "": "jsonl",
    "application/x-ndjson": "jsonl",
    "application/jsonl": "jsonl",
    "application/json": "jsonl",
    "application/octet-stream": "jsonl",
    "application/x-www-form-urlencoded": "jsonl",
    "text/plain": "jsonl",
    "text/csv": "csv",
    "application/vnd.apache.parquet": "parquet",
    "application/x-parquet": "parquet",
    "application/vnd.apache.arrow.stream": "arrow",
    "application/vnd.apache.arrow.file": "arrow",
}
_ENCODINGS: dict[str, Encoding] = {"": "identity", "identity": "identity", "gzip": "gzip", "zstd": "zstd"}
_LABEL = re.compile(r"[\x21-\x7e]{1,256}")
_STATUS = {
    "catalog.not_registered": 404,
    "load.in_flight": 409,
    "load.label_taken": 409,
    "load.too_large": 413,
    "load.pressure": 429,
    "load.busy": 429,
    "load.media_type": 415,
    "load.content_encoding": 415,
    "load.token": 401,
    "load.no_space": 503,
}
_BAD_REQUEST = ("load.", "usage.", "types.", "evolve.", "ingest.", "amend.")


def router(site: Site) -> APIRouter:
    """The routes of Stream Load; without `MODAK_LOAD_TOKEN` there are none."""
    routes = APIRouter()
    token = site.settings.load.token
    if token is None:
        return routes
    door = _Door(site, token.get_secret_value())

    @routes.post("/api/load/{table}", name="load", response_model=None)
    async def take_in(table: str, request: Request) -> JSONResponse:
        return await door.answer(table, request)

    return routes


class _Door:
    def __init__(self, site: Site, token: str) -> None:
        self._site = site
        self._token = token.encode()
        self._places = threading.BoundedSemaphore(PLACES)

    async def answer(self, table: str, request: Request) -> JSONResponse:
        try:
            self._check_token(request)
            asked = _asked(table, request)
            encoding = _encoding(request)
            async with self._place():
                return await self._take_in(asked, encoding, request)
        except ModakError as error:
            return _refused(error)
        except OSError as error:
            return _refused(_no_space(error))
        except ClientDisconnect:
            return JSONResponse({"error": "load.disconnected"}, 400)

    async def _take_in(self, asked: LoadRequest, encoding: Encoding, request: Request) -> JSONResponse:
        most = self._site.settings.load.max_bytes
        await run_in_threadpool(refuse_under_pressure, self._site, asked)
        with tempfile.TemporaryDirectory(prefix="modak-load-") as folder:
            path = Path(folder) / "body"
            with Spool(path, most) as spool:
                async for piece in request.stream():
                    spool.write(piece)
            body = await run_in_threadpool(plain, path, encoding, most)
            done = await run_in_threadpool(load, self._site, asked, body)
        if not done.replay:
            paths = {"hot": done.hot_rows, "delta": done.delta_rows, "spooled": done.spooled_rows}
            metrics.loaded(asked.table, done.state, paths)
        return JSONResponse(
            {
                "label": done.label,
                "state": done.state,
                "hot_rows": done.hot_rows,
                "delta_rows": done.delta_rows,
                "spooled_rows": done.spooled_rows,
                "staged_files": done.staged_files,
                "rejected_rows": done.rejected_rows,
                "replay": done.replay,
            }
        )

    def _check_token(self, request: Request) -> None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = request.headers.get("x-modak-token") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token):
            raise ModakError("load.token", "The token is missing or wrong.", hint="Send X-Modak-Token.")

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if not self._places.acquire(blocking=False):
            raise ModakError("load.busy", f"{PLACES} batches are being loaded.", hint="Try again.", retryable=True)
        try:
            yield
        finally:
            self._places.release()


def _asked(table: str, request: Request) -> LoadRequest:
    label = request.headers.get("x-modak-label", "")
    if not _LABEL.fullmatch(label):
        raise UsageError("load.label", "X-Modak-Label names the batch: 1 to 256 visible ASCII characters.")
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media not in _FORMATS:
        raise ModakError(
            "load.media_type",
            f"Content-Type {media!r} is not known.",
            hint="Send application/x-ndjson, text/csv, application/vnd.apache.parquet or …arrow.stream.",
        )
    try:
        name = TableName.parse(table)
    except ModakError:
        raise ModakError("catalog.not_registered", f"{table!r} is not the name of a table.") from None
    ratio = request.query_params.get("max_error_ratio", request.headers.get("x-modak-max-error-ratio", "0"))
    return LoadRequest(name, label, _FORMATS[media], _ratio(ratio))


def _ratio(text: str) -> float:
    if not re.fullmatch(r"(?:0|1)?(?:\.\d{1,400})?", text) or not text or text == "." or float(text or 0) > 1:
        raise UsageError("load.max_error_ratio", "max_error_ratio is a number from 0 to 1.")
    return float(text)


def _encoding(request: Request) -> Encoding:
    given = request.headers.get("content-encoding", "").strip().lower()
    if given not in _ENCODINGS:
        raise ModakError("load.content_encoding", f"Content-Encoding {given!r} is not known.", hint="gzip or zstd.")
    return _ENCODINGS[given]


def _no_space(error: OSError) -> ModakError:
    """The body, and what is made of it, waits on the disk of this machine."""
    return ModakError(
        "load.no_space",
        f"The worker cannot keep the batch on its disk: {error.strerror or error}.",
        hint="Free space in its folder for temporary files (TMPDIR), and send the batch again.",
        retryable=True,
    )


def _refused(error: ModakError) -> JSONResponse:
    answer: dict[str, Any] = {"error": error.code, "message": error.message, "hint": error.hint}
    if isinstance(error, BadRows):
        answer["rows"] = [{"line": line, "reason": reason} for line, reason in error.faults]
        answer["rejected_rows"] = error.rejected
    status = _STATUS.get(error.code)
    if status is None:
        sent_wrong = error.code.startswith(_BAD_REQUEST) or isinstance(error, UsageError)
        status = 400 if sent_wrong and not isinstance(error, Conflict) else 409 if isinstance(error, Conflict) else 503
    headers = {"Retry-After": "1"} if status in (409, 429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 503:
        log.error("load.failed", code=error.code, error=error.message)
    return JSONResponse(answer, status, headers)
