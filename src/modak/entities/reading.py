"""Reading a store: the newest version of every row, those included that no flush has seen yet, as a DataFrame.

Rows that are dirty come from Postgres, all others from the files, where the newest version is found before any filter
applies: a filter that ran first would bring an older version back. The manifest is read, then the dirty rows under one
snapshot, then the manifest again; if rows were flushed in between, all of it is done once more. Dirty rows, tombstones
among them, are kept by Spark, so that the snapshot need not be held; nothing is collected in the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import structlog
from psycopg import sql

from modak.core.errors import Conflict, UsageError
from modak.core.faults import reach
from modak.entities.address import Address
from modak.entities.changelog import ChangeLog
from modak.entities.evolution import check_evolution
from modak.entities.kernel import Kernel, Merge, newest
from modak.entities.manifest import Manifest, ManifestEntry
from modak.entities.manifests import lost
from modak.entities.plan import KeyRange, cuts, ranges
from modak.entities.registry import FIXED_COLUMNS, Attribute, EntitySchema
from modak.entities.rows import Dirty, Source, rows_of
from modak.entities.snapshot import Snapshot, holding
from modak.entities.store import DRIVER_ROWS, EntityStore
from modak.entities.tables import EntityTables, check, identifier
from modak.entities.types import spark_struct
from modak.spark.frames import frame_of
from modak.spark.predicate import Predicate, one_of
from modak.spark.pushdown import asked

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

log = structlog.get_logger()

Found = TypeVar("Found")
TRIES = 10
"""How often rows may be flushed in the middle of a read before it gives up."""
READ_MB = 64
"""Megabytes of files per task of a read."""

_DIRTY_BOUNDS = """
SELECT row_id::text FROM (
    SELECT row_id, row_number() OVER (ORDER BY row_id) AS number FROM {log}
    WHERE schema_id = %(schema)s AND flushed_at = 0
) AS numbered WHERE number > 1 AND (number - 1) %% %(rows)s = 0 ORDER BY row_id
"""


@dataclass(frozen=True, slots=True)
class Hot:
    """One task's share of the dirty rows."""

    address: Address
    snapshot: str
    tables: EntityTables
    schema: EntitySchema
    within: KeyRange


def read(
    spark: SparkSession,
    store: EntityStore,
    schema: int | str,
    columns: Sequence[str] | None = None,
    where: str | Column | None = None,
    row_ids: Sequence[str] | None = None,
) -> DataFrame:
    """The live rows of a schema (its id or its name), each in its newest version.

    `columns` are attributes to read, all if not given; `where` is a condition on the newest version, of which as much
    as possible is applied before rows reach Spark; `row_ids` looks single rows up without reading the others.
    """
    described = resolve(store, schema)
    wanted = _wanted(described, columns)
    if where is None:
        return assemble(spark, store, described, wanted, None, row_ids)
    wish = asked(spark, spark_struct(described.attributes), where)
    needed = tuple(each for each in described.attributes if each in wanted or each.name in wish.columns)
    frame = assemble(spark, store, described, needed, wish.predicate, row_ids).where(where)
    return frame if needed == wanted else frame.select(*_names(wanted))


def assemble(
    spark: SparkSession,
    store: EntityStore,
    schema: EntitySchema,
    wanted: Sequence[Attribute],
    predicate: Predicate | None = None,
    row_ids: Sequence[str] | None = None,
) -> DataFrame:
    """Some attributes of the live rows; `predicate` may hold rows back that nobody wants, and need not."""
    # Only what is asked for is read on either side.
    narrow = replace(schema, attributes=tuple(wanted))
    manifest, hot = _settled(spark, store, schema, narrow)
    ids = _looked_up(predicate, row_ids)
    files = _file_rows(spark, store, manifest, narrow.attributes, ids, predicate)
    if hot is None:
        return files
    touched = hot.select(hot["row_id"].alias("~row_id"))
    mine = hot.where(hot["deleted_at"] == 0)
    if ids is not None:
        mine = mine.where(mine["row_id"].isin(list(ids)))
    return files.join(touched, files["row_id"] == touched["~row_id"], "left_anti").unionByName(mine)


def _looked_up(predicate: Predicate | None, row_ids: Sequence[str] | None) -> tuple[str, ...] | None:
    """The only rows that are wanted, where somebody says so. All versions of a row have its id."""
    if row_ids is not None:
        return tuple(each.lower() for each in row_ids)
    tied = one_of(predicate, "row_id")
    return None if tied is None else tuple(each for each in tied if isinstance(each, str))


def resolve(store: EntityStore, schema: int | str) -> EntitySchema:
    """A schema by its id or its name."""
    if isinstance(schema, int):
        return store.registry.resolve(schema)
    found = store.registry.named(schema)
    if found is None:
        known = ", ".join(each.name for each in store.registry.schemas)
        raise UsageError("entities.unknown_schema", f"There is no schema {schema!r}.", hint=f"Known: {known}.")
    return found


def settle(store: EntityStore, schema: EntitySchema, hot_at: Callable[[Snapshot], Found]) -> tuple[Manifest, Found]:
    """Read the manifest and something under a snapshot so that no flush came in between; the later manifest counts."""
    with store.connect() as conn:
        installed = check(conn, store.tables)
    changes = ChangeLog(store.tables, schema.schema_id, schema.digest)
    for _ in range(TRIES):
        before = store.manifests.load(schema.schema_id)
        check_evolution(schema, before.manifest)
        reach("read.manifest_read")
        with holding(store, installed) as snapshot:
            found = hot_at(snapshot)
            stored = before.meta is None and changes.stored(snapshot.conn)
            snapshot.check()
        reach("read.rows_read")
        after = store.manifests.load(schema.schema_id)
        if after.meta is None and stored:
            raise lost(store.manifests.key(schema.schema_id), schema.schema_id)
        if after.manifest.last_flush_seq == before.manifest.last_flush_seq:
            return after.manifest, found
        log.debug("entities.read_again", schema=schema.schema_id)
    raise Conflict(
        "entities.read_unsettled",
        f"Rows of schema {schema.schema_id} were flushed in the middle of every try to read them.",
        hint="Try again; a longer MODAK_ENTITIES_FLUSH_INTERVAL_SECONDS helps.",
    )


def hot_rows(hot: Hot) -> Iterator[pa.RecordBatch]:
    """Inside a task: dirty rows as Postgres has them, tombstones among them; a value that does not fit is NULL."""
    source = Source(hot.address, hot.snapshot, hot.tables, hot.schema)
    for rows in rows_of(source, Dirty(hot.within)):
        yield from rows.table.to_batches(65_536)


def hot_shares(store: EntityStore, schema: EntitySchema, snapshot: Snapshot, rows: int = DRIVER_ROWS) -> list[Hot]:
    """The dirty rows of a schema in shares of about equal size."""
    bounds = dirty_bounds(snapshot.conn, store.tables, schema.schema_id, rows)
    return [Hot(store.address, snapshot.id, store.tables, schema, within) for within in ranges(bounds)]


def dirty_bounds(
    conn: psycopg.Connection[tuple[object, ...]], tables: EntityTables, schema_id: int, rows: int
) -> list[str]:
    """Row ids that cut the dirty rows into portions."""
    query = sql.SQL(_DIRTY_BOUNDS).format(log=identifier(tables.log))
    return [str(row[0]) for row in conn.execute(query, {"schema": schema_id, "rows": rows})]


def merges(
    store: EntityStore,
    manifest: Manifest,
    attributes: Sequence[Attribute],
    within: Sequence[KeyRange],
    row_ids: tuple[str, ...] | None = None,
    predicate: Predicate | None = None,
) -> list[Merge]:
    """The tasks that read the files of a manifest."""
    return [
        Merge(
            store.objects,
            tuple(entry for entry in manifest.entries if part.meets(entry) and _may_hold(entry, row_ids)),
            tuple(attributes),
            part,
            Kernel.of(store.config),
            row_ids=row_ids,
            predicate=predicate,
        )
        for part in within
    ]


def _may_hold(entry: ManifestEntry, row_ids: tuple[str, ...] | None) -> bool:
    if row_ids is None or not entry.min_row_id or not entry.max_row_id:
        return True
    return any(entry.min_row_id <= each <= entry.max_row_id for each in row_ids)


def _settled(
    spark: SparkSession, store: EntityStore, schema: EntitySchema, narrow: EntitySchema
) -> tuple[Manifest, DataFrame | None]:
    def materialised(snapshot: Snapshot) -> DataFrame | None:
        shares = hot_shares(store, narrow, snapshot)
        frame = frame_of(spark, spark_struct(narrow.attributes), shares, hot_rows).localCheckpoint(eager=True)
        return None if frame.isEmpty() else frame

    return settle(store, schema, materialised)


def _file_rows(
    spark: SparkSession,
    store: EntityStore,
    manifest: Manifest,
    attributes: Sequence[Attribute],
    row_ids: tuple[str, ...] | None,
    predicate: Predicate | None,
) -> DataFrame:
    lanes = 1 if row_ids is not None else spark.sparkContext.defaultParallelism
    parts = ranges(cuts(manifest.entries, lanes, READ_MB))
    work = merges(store, manifest, attributes, parts, row_ids, predicate) if manifest.entries else []
    return frame_of(spark, spark_struct(attributes), work, newest)


def _wanted(schema: EntitySchema, columns: Sequence[str] | None) -> tuple[Attribute, ...]:
    if columns is None:
        return schema.attributes
    known = {each.name: each for each in schema.attributes}
    for name in columns:
        if name not in known:
            raise UsageError(
                "entities.no_attribute",
                f"Schema {schema.schema_id} has no attribute {name!r}.",
                hint=f"Known: {', '.join(known)}.",
            )
    return tuple(known[name] for name in dict.fromkeys(columns))


def _names(attributes: Sequence[Attribute]) -> list[str]:
    """The columns of a frame, ready for Spark."""
    every = (*FIXED_COLUMNS, *(each.name for each in attributes))
    return ["`" + name.replace("`", "``") + "`" for name in every]
