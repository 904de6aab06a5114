"""A read-only Iceberg REST catalog over our tables, so that Spark, Trino, DuckDB and PyIceberg open them by name.

What is served is the state that is published here: the metadata that `modak.cutline` points at. Nothing can be changed
through it, and no credential leaves unless `MODAK_ICEBERG_VEND_CREDENTIALS` says so. Memory: one metadata file at a
time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse

from modak.catalog.records import TableRecord
from modak.runtime.web.context import Context
from modak.storage.access import Key

SEPARATOR = "\x1f"
_OPEN = frozenset({"s3.endpoint", "s3.path-style-access", "client.region", "gcs.project-id", "gcs.service.host"})
"""Properties that say where files are and open nothing; every other is taken for a secret."""
_ENDPOINTS = [
    "GET /v1/{prefix}/namespaces",
    "HEAD /v1/{prefix}/namespaces/{namespace}",
    "GET /v1/{prefix}/namespaces/{namespace}",
    "GET /v1/{prefix}/namespaces/{namespace}/tables",
    "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "HEAD /v1/{prefix}/namespaces/{namespace}/tables/{table}",
]


def router(context: Context) -> APIRouter:
    """The routes under `/iceberg`."""
    site = context.site
    routes = APIRouter(prefix="/iceberg", tags=["iceberg"], dependencies=[Depends(context.guard.reader)])

    @routes.get("/v1/config", summary="What a client must know")
    def config(warehouse: Annotated[str | None, Query(max_length=1000)] = None) -> dict[str, Any]:
        """The calls that exist; there is one warehouse, whatever a client asks for."""
        return {"defaults": {}, "overrides": {}, "endpoints": _ENDPOINTS}

    @routes.get("/v1/namespaces", summary="Namespaces")
    def namespaces(parent: Annotated[str | None, Query(max_length=1000)] = None) -> Any:
        """The namespaces right below a parent, or at the top."""
        above = _levels(parent) if parent else ()
        known = _namespaces(site.reader.tables())
        if above and above not in known:
            return _missing("Namespace", above)
        below = sorted(
            {levels[: len(above) + 1] for levels in known if levels[: len(above)] == above and levels != above}
        )
        return {"namespaces": [list(levels) for levels in below], "next-page-token": None}

    @routes.get("/v1/namespaces/{namespace}", summary="One namespace")
    def namespace(namespace: str) -> Any:
        """Its properties."""
        levels = _levels(namespace)
        if levels not in _namespaces(site.reader.tables()):
            return _missing("Namespace", levels)
        return {"namespace": list(levels), "properties": {"owner": "modak"}}

    @routes.head("/v1/namespaces/{namespace}", summary="Whether there is such a namespace", status_code=204)
    def has_namespace(namespace: str) -> Response:
        """204 or 404."""
        return Response(status_code=204 if _levels(namespace) in _namespaces(site.reader.tables()) else 404)

    @routes.get("/v1/namespaces/{namespace}/tables", summary="Tables of a namespace")
    def tables(namespace: str) -> Any:
        """By name."""
        levels, records = _levels(namespace), site.reader.tables()
        if levels not in _namespaces(records):
            return _missing("Namespace", levels)
        names = sorted(each.lake.name for each in records if each.lake.namespace == levels)
        return {
            "identifiers": [{"namespace": list(levels), "name": name} for name in names],
            "next-page-token": None,
        }

    @routes.get("/v1/namespaces/{namespace}/views", summary="Views of a namespace")
    def views(namespace: str) -> Any:
        """There are none."""
        return {"identifiers": [], "next-page-token": None}

    @routes.head("/v1/namespaces/{namespace}/tables/{table}", summary="Whether there is such a table", status_code=204)
    def has_table(namespace: str, table: str) -> Response:
        """204 or 404."""
        return Response(status_code=204 if _find(context, namespace, table) else 404)

    @routes.get("/v1/namespaces/{namespace}/tables/{table}", summary="One table")
    def load(
        namespace: str,
        table: str,
        snapshots: Annotated[str | None, Query(pattern="^(all|refs)$")] = None,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> Any:
        """Its metadata as it is published now; 304 where the client has that already."""
        record = _find(context, namespace, table)
        if record is None:
            return _missing("Table", (*_levels(namespace), unquote(table)))
        location = site.reader.state(record.name).cutline.metadata_location
        etag = f'"{hashlib.sha256(f"{snapshots}{location}".encode()).hexdigest()[:32]}"'
        if if_none_match == etag:
            return Response(status_code=304, headers={"ETag": etag})
        raw = site.store.read(location)
        metadata = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        if snapshots == "refs":
            kept = {ref["snapshot-id"] for ref in metadata.get("refs", {}).values()}
            metadata["snapshots"] = [each for each in metadata.get("snapshots", ()) if each["snapshot-id"] in kept]
        answer = {
            "metadata-location": location,
            "metadata": metadata,
            "config": access(site.key_of(record.profile_id), vend=site.settings.lake.vend_credentials),
        }
        return JSONResponse(answer, headers={"ETag": etag})

    @routes.post("/v1/namespaces/{namespace}/tables/{table}/metrics", summary="Reports of clients", status_code=204)
    def report(namespace: str, table: str) -> Response:
        """Taken and dropped: clients send them unasked."""
        return Response(status_code=204)

    @routes.api_route("/v1/{path:path}", methods=["POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
    def refused(path: str, request: Request) -> JSONResponse:
        return _error(
            405,
            "UnsupportedOperationException",
            "This catalog only reads; tables change through Modak and its Postgres.",
        )

    return routes


def access(key: Key, *, vend: bool) -> dict[str, str]:
    """How a client reaches the files of a table; what could open them only where the operator wants that."""
    found = {name: value for name, value in key.props.items() if vend or name in _OPEN}
    if "client.region" in found:
        found["s3.region"] = found["client.region"]
    return found


def _find(context: Context, namespace: str, table: str) -> TableRecord | None:
    levels, name = _levels(namespace), unquote(table)
    found = (each for each in context.site.reader.tables() if (each.lake.namespace, each.lake.name) == (levels, name))
    return next(found, None)


def _namespaces(records: list[TableRecord]) -> set[tuple[str, ...]]:
    """Every namespace of a table and those above it."""
    return {record.lake.namespace[:depth] for record in records for depth in range(1, len(record.lake.namespace) + 1)}


def _levels(text: str) -> tuple[str, ...]:
    # Some clients encode the separator twice.
    return tuple((unquote(text) if "%" in text else text).split(SEPARATOR))


def _missing(what: str, levels: tuple[str, ...]) -> JSONResponse:
    kind = "NoSuchTableException" if what == "Table" else "NoSuchNamespaceException"
    return _error(404, kind, f"{what} does not exist: {'.'.join(levels)}")


def _error(status: int, kind: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
