"""A foreign Iceberg REST catalog on loopback: PyIceberg's SQL catalog behind the few routes that publication uses."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NamespaceAlreadyExistsError, NoSuchTableError, TableAlreadyExistsError

TOKEN = "token-of-the-foreign-catalog"


class Foreign:
    """The catalog, and what it was asked for."""

    def __init__(self, folder: Path, *, overwrites: bool) -> None:
        self.catalog = SqlCatalog("foreign", uri=f"sqlite:///{folder}/foreign.db", warehouse=f"file://{folder}")
        self.overwrites = overwrites
        self.calls: list[str] = []
        self.failing = 0
        self.address = ""

    def app(self) -> FastAPI:
        app = FastAPI()
        lock = threading.Lock()

        @app.middleware("http")
        async def check(request: Request, call_next: Any) -> Response:
            self.calls.append(f"{request.method} {request.url.path}")
            if request.headers.get("authorization") != f"Bearer {TOKEN}":
                return JSONResponse({"error": {"message": "who are you?", "type": "NotAuthorized", "code": 401}}, 401)
            if self.failing:
                self.failing -= 1
                return JSONResponse({"error": {"message": "not now", "type": "Busy", "code": 503}}, 503)
            answer: Response = await call_next(request)
            return answer

        @app.get("/v1/config")
        def config(warehouse: str | None = None) -> Any:
            return {"defaults": {}, "overrides": {"prefix": f"in/{warehouse}"} if warehouse else {}}

        @app.post("/v1/in/main/namespaces")
        def namespace(body: dict[str, Any]) -> Any:
            with lock:
                try:
                    self.catalog.create_namespace(tuple(body["namespace"]))
                except NamespaceAlreadyExistsError:
                    return JSONResponse({"error": {"message": "exists", "type": "AlreadyExists", "code": 409}}, 409)
            return body

        @app.get("/v1/in/main/namespaces/{space}/tables/{name}")
        def load(space: str, name: str) -> Any:
            with lock:
                try:
                    table = self.catalog.load_table((*space.split("\x1f"), name))
                except NoSuchTableError:
                    return JSONResponse({"error": {"message": "no", "type": "NoSuchTable", "code": 404}}, 404)
            # PyIceberg reads format version 3 and does not write it out again.
            return {
                "metadata-location": table.metadata_location,
                "metadata": json.loads(table.io.new_input(table.metadata_location).open().read()),
            }

        @app.post("/v1/in/main/namespaces/{space}/register")
        def register(space: str, body: dict[str, Any]) -> Any:
            name = (*space.split("\x1f"), body["name"])
            with lock:
                if body.get("overwrite") and self.overwrites:
                    self.catalog.drop_table(name)
                try:
                    table = self.catalog.register_table(name, body["metadata-location"])
                except TableAlreadyExistsError:
                    return JSONResponse({"error": {"message": "exists", "type": "AlreadyExists", "code": 409}}, 409)
            return {"metadata-location": table.metadata_location}

        @app.delete("/v1/in/main/namespaces/{space}/tables/{name}", status_code=204)
        def drop(space: str, name: str, purgeRequested: bool = True) -> Response:  # noqa: N803
            assert not purgeRequested, "the files are ours"
            with lock:
                try:
                    self.catalog.drop_table((*space.split("\x1f"), name))
                except NoSuchTableError:
                    return JSONResponse({"error": {"message": "no", "type": "NoSuchTable", "code": 404}}, 404)
            return Response(status_code=204)

        return app

    def shows(self) -> str:
        return str(self.catalog.load_table(("modak", "public", "events")).metadata_location)


@contextmanager
def serving_foreign(folder: Path, *, overwrites: bool) -> Iterator[Foreign]:
    """The catalog on a free port."""
    foreign = Foreign(folder, overwrites=overwrites)
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(foreign.app(), log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    foreign.address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        yield foreign
    finally:
        server.should_exit = True
        thread.join(10)
        bound.close()
