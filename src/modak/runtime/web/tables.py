"""The fleet, single tables, the journal: everything that `status` shows, and what operators do about it."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field

from modak import __version__
from modak.catalog import operators, overview
from modak.catalog.records import PartitionRecord, TableRecord
from modak.core.axis import literal
from modak.core.errors import ModakError, UsageError
from modak.core.states import OpPhase
from modak.runtime import neighbours
from modak.runtime.web.auth import caller
from modak.runtime.web.context import API, Context
from modak.runtime.web.errors import RESPONSES
from modak.runtime.web.plain import entries, entry, plain
from modak.tables.foreign import accept
from modak.tables.status import collect_one

TableId = Annotated[str, Path(description="The number of a table, or its name as schema.table", max_length=300)]
Search = Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$", description="Part of a name")]
TableMode = Annotated[Literal["tiered", "mirrored"] | None, Query(description="Only tables of this mode")]
Attention = Annotated[bool, Query(description="Only tables that somebody should look at")]
Limit = Annotated[int, Query(ge=1, le=1000)]
SIZES = (1 << 20, 8 << 20, 32 << 20, 128 << 20, 512 << 20)
"""Upper edges of the classes in which data files are counted."""
MOST_FILES = 1_000_000


class PauseRequest(BaseModel):
    """Why a table is held back."""

    reason: str = Field("", max_length=500, pattern=r"^[^\x00]*$")


class PolicyEdit(BaseModel):
    """Changes of a maintenance policy, made all at once or not at all."""

    set: dict[str, str | int | float | bool] = Field(default_factory=dict, description="Keys and their new values")
    unset: list[str] = Field(default_factory=list, description="Keys that go back to the default")
    reset: bool = Field(False, description="All keys back to their defaults first")


class ProfileRequest(BaseModel):
    """A storage profile. Credentials are named, never given."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")
    warehouse: str = Field(min_length=1, max_length=1000, pattern=r"^[^\x00]+$")
    config: dict[str, str] = Field(default_factory=dict)
    credentials: str | None = Field(None, pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")
    default: bool = False


def router(context: Context) -> APIRouter:
    """The routes under `/api/v1` that are about tables."""
    site, guard = context.site, context.guard
    read = APIRouter(prefix=API, tags=["tables"], dependencies=[Depends(guard.reader)], responses=RESPONSES)

    @read.get("/overview", summary="The whole fleet")
    def overview_(
        limit: Limit = 200,
        offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
        q: Search = None,
        mode: TableMode = None,
        attention: Attention = False,
    ) -> dict[str, Any]:
        """Who leads, which workers there are, and a page of tables: lines, sizes, lag, backlog, last operation."""
        choice = overview.Choice(q or None, mode, attention)
        with site.connect(autocommit=True) as conn:
            return entry(
                {
                    "version": __version__,
                    "database": site.dsn.safe(),
                    "warehouse": site.settings.lake.warehouse,
                    "leader": asdict(operators.lead(conn)),
                    "workers": [asdict(each) for each in operators.workers(conn)],
                    **{f"tables_{name}": number for name, number in overview.count_tables(conn, choice).items()},
                    "tables": overview.tables_page(conn, choice, limit, offset),
                }
            )

    @read.get("/tables", summary="Registered tables, page by page")
    def tables(
        limit: Limit = 200,
        offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
        q: Search = None,
        mode: TableMode = None,
        attention: Attention = False,
    ) -> list[dict[str, Any]]:
        """One entry per table, by name."""
        with site.connect(autocommit=True) as conn:
            return entries(overview.tables_page(conn, overview.Choice(q or None, mode, attention), limit, offset))

    _add_tables(read, context)
    _add_fleet(read, context)
    _add_actions(read, context)
    return read


def _add_tables(read: APIRouter, context: Context) -> None:
    site = context.site

    @read.get("/tables/{table}", summary="One table in full")
    def table(table: TableId) -> dict[str, Any]:
        """Registration, lines, partitions, pins, lake health, the last pass, policy in force, pause, problems."""
        record = context.table(table)
        state = site.reader.state(record.name)
        with site.connect(autocommit=True) as conn:
            held = operators.pauses(conn).get(record.table_id)
            status = collect_one(site, record.name)
            recent = overview.operations(conn, 20, table_id=record.table_id)
            passes = overview.operations(conn, 1, table_id=record.table_id, kind="maintenance")
            health = overview.lake_health(conn, record.table_id)
            requests = overview.maintenance_requests(conn, record.table_id, 1)
        return entry(
            {
                "table_id": record.table_id,
                "status": status,
                "registration": _registration(record),
                "cutline": state.cutline,
                "partitions": [_partition(record, each) for each in state.partitions],
                "pins": state.pins,
                "policy": neighbours.policy_of(site, record),
                "pause": held,
                "health": health,
                "last_pass": passes[0] if passes else None,
                "last_request": requests[0] if requests else None,
                "operations": recent,
            }
        )

    @read.get("/tables/{table}/operations", summary="The journal of one table")
    def table_operations(table: TableId, limit: Limit = 50) -> list[dict[str, Any]]:
        """Newest first."""
        record = context.table(table)
        with site.connect(autocommit=True) as conn:
            return entries(overview.operations(conn, limit, table_id=record.table_id))

    @read.get("/tables/{table}/snapshots", summary="The lake's snapshots, with tags and pins")
    def snapshots(table: TableId) -> dict[str, Any]:
        """From the metadata that is published: every snapshot, the tags on them, and the readers that hold one."""
        record = context.table(table)
        state = site.reader.state(record.name)
        metadata = _metadata(site.store.read(state.cutline.metadata_location))
        return entry(
            {
                "published": state.cutline.snapshot_id,
                "snapshots": [
                    {
                        "id": each["snapshot-id"],
                        "at": datetime.fromtimestamp(each["timestamp-ms"] / 1000, UTC),
                        "operation": each.get("summary", {}).get("operation"),
                        "summary": each.get("summary", {}),
                    }
                    for each in metadata.get("snapshots", ())
                ],
                "refs": metadata.get("refs", {}),
                "pins": state.pins,
            }
        )

    @read.get("/tables/{table}/files", summary="The lake's files by size")
    def files(table: TableId) -> dict[str, Any]:
        """Data files of the published snapshot counted in classes of size, and how many carry deletion vectors."""
        record = context.table(table)
        snapshot = site.reader.state(record.name).cutline.snapshot_id
        classes = [{"below": edge, "files": 0, "bytes": 0, "rows": 0} for edge in (*SIZES, None)]
        vectors = 0
        if snapshot is not None:
            for seen, found in enumerate(site.lake.files(record.lake, snapshot)):
                at = sum(found.file.bytes >= edge for edge in SIZES)
                entry: Any = classes[at]
                entry["files"] += 1
                entry["bytes"] += found.file.bytes
                entry["rows"] += found.file.rows
                vectors += bool(found.vectors)
                if seen >= MOST_FILES:
                    break
        return {"snapshot": snapshot, "classes": classes, "files_with_deletes": vectors}

    @read.get("/tables/{table}/maintenance", summary="Maintenance passes that were asked for")
    def requested(table: TableId, limit: Limit = 20) -> list[dict[str, Any]]:
        """Newest first: who asked, whether it waits or runs and how far it is, what it did."""
        record = context.table(table)
        with site.connect(autocommit=True) as conn:
            return entries(overview.maintenance_requests(conn, record.table_id, limit))

    @read.get("/tables/{table}/policy", summary="The maintenance policy in force")
    def policy(table: TableId) -> list[dict[str, Any]]:
        """Every key with its value and where it comes from."""
        return entries(neighbours.policy_of(site, context.table(table)))


def _add_fleet(read: APIRouter, context: Context) -> None:
    site = context.site

    @read.get("/operations", summary="The journal of all tables")
    def journal(
        limit: Limit = 100,
        kind: Annotated[str | None, Query(max_length=60, pattern=r"^[^\x00]*$")] = None,
        phase: OpPhase | None = None,
        before: Annotated[datetime | None, Query(description="Only operations that began earlier")] = None,
        failed: Annotated[bool, Query(description="Only those that ended with an error")] = False,
    ) -> list[dict[str, Any]]:
        """Newest first; page on with `before`."""
        if before is not None and before.tzinfo is None:
            before = before.replace(tzinfo=UTC)
        with site.connect(autocommit=True) as conn:
            found = overview.operations(conn, limit, kind=kind, phase=phase, before=before, failed=failed)
        return entries(found)

    @read.get("/series", summary="Numbers over the last hour")
    def series(
        metric: Annotated[str, Query(max_length=60)] = "delta_backlog",
        name: Annotated[str | None, Query(max_length=300, description="One table or slot")] = None,
        most: Annotated[int | None, Query(ge=1, le=1000, description="Only so many, the largest last values")] = None,
    ) -> list[dict[str, Any]]:
        """A list of `{name, points}`; a point is `[seconds since 1970, value or null]`."""
        return context.series.points(metric, name, most)

    @read.get("/schema", summary="Columns of every registered table")
    def schema() -> list[dict[str, Any]]:
        """As Postgres has them; for completion in a query editor."""
        with site.connect(autocommit=True) as conn:
            return entries(overview.schema(conn))

    @read.get("/storage-profiles", summary="Storage profiles")
    def profiles() -> list[dict[str, Any]]:
        """Values that look like secrets are not shown."""
        return [_profile(plain(each)) for each in site.reader.profiles()]

    @read.get("/config", summary="Every setting in force")
    def config() -> list[dict[str, Any]]:
        """Its value (secrets masked) and where it comes from."""
        from modak.config import explain

        return entries(explain())


def _add_actions(routes: APIRouter, context: Context) -> None:
    site, guard = context.site, context.guard
    admin = Depends(guard.admin_only)

    @routes.post(
        "/tables/{table}/maintenance", status_code=202, summary="Ask for a maintenance pass now", dependencies=[admin]
    )
    def maintain(table: TableId, request: Request) -> dict[str, Any]:
        """Files a request that the leader claims with its next round; one that waits already is enough."""
        record = context.table(table)
        with site.connect() as conn:
            number, new = operators.request_maintenance(conn, record.table_id, caller(request))
        return {"request_id": number, "new": new}

    @routes.patch("/tables/{table}/policy", summary="Edit a maintenance policy", dependencies=[admin])
    def edit(table: TableId, change: PolicyEdit) -> list[dict[str, Any]]:
        """Returns the policy then in force. Unknown keys and wrong values are refused, and then nothing changes."""
        texts = {
            key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in change.set.items()
        }
        if not (texts or change.unset or change.reset):
            raise UsageError("api.invalid", "There is nothing to change.", hint="Give set, unset or reset.")
        return entries(neighbours.edit_policy(site, context.table(table), texts, change.unset, reset=change.reset))

    @routes.post("/tables/{table}/pause", summary="Hold a table back", dependencies=[admin])
    def pause(table: TableId, request: Request, why: PauseRequest | None = None) -> dict[str, Any]:
        """Nothing is done to the table until it is resumed; what runs now ends first."""
        record = context.table(table)
        with site.connect() as conn:
            new = operators.pause(conn, record.table_id, caller(request), why.reason if why else "")
            return entry({"pause": operators.pauses(conn).get(record.table_id), "new": new})

    @routes.post("/tables/{table}/resume", summary="Let a table go on", dependencies=[admin])
    def resume(table: TableId) -> dict[str, Any]:
        """The next round takes it up again."""
        with site.connect() as conn:
            return {"resumed": operators.resume(conn, context.table(table).table_id)}

    @routes.post("/tables/{table}/accept", summary="Accept a foreign snapshot", dependencies=[admin])
    def accepted(table: TableId) -> dict[str, Any]:
        """Publication goes on from what somebody else has committed to the lake table."""
        return {"message": accept(site, context.table(table).name)}

    @routes.post("/storage-profiles", status_code=201, summary="Create a storage profile", dependencies=[admin])
    def create_profile(wanted: ProfileRequest) -> dict[str, Any]:
        """The same again changes nothing; a different one of that name is refused."""
        neighbours.create_profile(
            site, wanted.name, wanted.warehouse, wanted.config, wanted.credentials, default=wanted.default
        )
        return _profile(plain(site.reader.profile(wanted.name)))


def _registration(record: TableRecord) -> dict[str, Any]:
    return {
        "table": str(record.name),
        "mode": record.mode,
        "primary_key": record.pk_columns,
        "tier_key": record.tier_key,
        "axis": record.axis,
        "partition_width": None if record.width is None else str(record.width),
        "keep_heap": record.keep_heap,
        "heap_retention": record.heap_retention,
        "lake_retention": record.lake_retention,
        "lake": str(record.lake),
        "location": record.location,
        "profile_id": record.profile_id,
        "numeric_as": record.numeric_as,
        "created_at": record.created_at,
        "frozen": record.frozen,
    }


def _partition(record: TableRecord, found: PartitionRecord) -> dict[str, Any]:
    """A partition, its bounds also as people write them."""
    return {
        **asdict(found),
        "lower_text": literal(record.axis, found.lower),
        "upper_text": literal(record.axis, found.upper),
    }


def _profile(row: dict[str, Any]) -> dict[str, Any]:
    hidden = ("secret", "token", "password", "access-key", "access_key")
    config = {
        key: "***" if any(word in key.lower() for word in hidden) else value for key, value in row["config"].items()
    }
    return {**row, "config": config}


def _metadata(raw: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except ValueError:
        raise ModakError("storage.broken", "The metadata of the lake table cannot be read.") from None
    return found
