"""How the schemas of a store are doing: what waits in Postgres, what lies in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from modak.entities.changelog import ChangeLog, Unfit
from modak.entities.plan import plan_compaction
from modak.entities.registry import EntitySchema
from modak.entities.store import EntityStore
from modak.entities.tables import check

SHOWN = 10


@dataclass(frozen=True, slots=True)
class SchemaStatus:
    """One schema at one moment."""

    schema_id: int
    name: str
    dirty: int
    oldest_seconds: float | None
    quarantined: int
    base_files: int
    base_rows: int
    base_bytes: int
    delta_files: int
    delta_rows: int
    delta_bytes: int
    version: int
    waiting_for_gc: int
    compaction: str
    """What a compaction would say."""
    put_aside: tuple[Unfit, ...]
    """The first rows of the quarantine, and why they are there."""


def status(store: EntityStore) -> tuple[SchemaStatus, ...]:
    """The status of every schema to serve."""
    with store.connect() as conn:
        check(conn, store.tables)
        return tuple(_status(store, conn, store.registry.resolve(each)) for each in store.schema_ids())


def _status(store: EntityStore, conn: psycopg.Connection[Any], schema: EntitySchema) -> SchemaStatus:
    changes = ChangeLog(store.tables, schema.schema_id, schema.digest)
    dirty, oldest = changes.stats(conn)
    manifest = store.manifests.load(schema.schema_id).manifest
    planned = plan_compaction(manifest, store.compaction, 1)
    return SchemaStatus(
        schema_id=schema.schema_id,
        name=schema.name,
        dirty=dirty,
        oldest_seconds=max(0.0, (store.now_ms - oldest) / 1000) if dirty else None,
        quarantined=changes.count_quarantined(conn),
        base_files=len(manifest.base),
        base_rows=manifest.base_rows,
        base_bytes=sum(entry.size_bytes for entry in manifest.base),
        delta_files=len(manifest.delta),
        delta_rows=manifest.delta_rows,
        delta_bytes=sum(entry.size_bytes for entry in manifest.delta),
        version=manifest.version,
        waiting_for_gc=len(manifest.removed),
        compaction=getattr(planned, "because", "large deltas may be promoted"),
        put_aside=tuple(changes.quarantined(conn, SHOWN)),
    )
