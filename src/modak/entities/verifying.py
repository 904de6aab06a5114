"""Whether a store says what Postgres says, attribute by attribute, at one point in time.

Dirty rows are read from Postgres by every reader, so they are equal by nature; all others must be the same in the
files. Both sides of a range of ids are read by one task and compared by the kernel; counts and the first differences
come back. Memory is that of one pivot and the kernel's limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from modak.core.errors import ModakError
from modak.entities.address import Address
from modak.entities.initial import live_ranges
from modak.entities.kernel import Merge, merged_schema, newest, running
from modak.entities.plan import KeyRange
from modak.entities.reading import merges, resolve, settle
from modak.entities.registry import EntitySchema
from modak.entities.rows import Live, Source, rows_of
from modak.entities.snapshot import Snapshot
from modak.entities.store import EntityStore
from modak.entities.tables import EntityTables, identifier

if TYPE_CHECKING:
    import pyarrow as pa

log = structlog.get_logger()
SHOWN = 50


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that is not the same on both sides; `attribute` names what differs where both have it."""

    kind: str
    row_id: str
    attribute: str = ""
    postgres: str = ""
    store: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found."""

    schema_id: int
    compared: int
    dirty: int
    differing: int
    differences: tuple[Difference, ...]
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether both sides say the same."""
        return self.differing == 0


@dataclass(frozen=True, slots=True)
class Share:
    """One task's range of ids."""

    address: Address
    snapshot: str
    tables: EntityTables
    schema: EntitySchema
    within: KeyRange
    dirty: str
    """The query for the ids that are dirty in the range."""
    merge: Merge


@dataclass(frozen=True, slots=True)
class Answer:
    """What a task found in its range."""

    compared: int
    dirty: int
    differing: int
    differences: tuple[Difference, ...]


def verify(store: EntityStore, schema: int | str) -> VerifyReport:
    """Compare every attribute of every settled row of a schema."""
    began = time.monotonic()
    described = resolve(store, schema)

    def compared(snapshot: Snapshot) -> list[Answer]:
        manifest = store.manifests.load(described.schema_id).manifest
        count, parts, _ = live_ranges(store, described, snapshot)
        work = merges(store, manifest, described.attributes, parts)
        shares = [
            Share(
                store.address,
                snapshot.id,
                store.tables,
                described,
                part,
                _dirty_query(store.tables, described.schema_id, part),
                merge,
            )
            for part, merge in zip(parts, work, strict=True)
        ]
        return store.crew.run(verify_share, shares, max(count, manifest.base_rows + manifest.delta_rows))

    _, answers = settle(store, described, compared)
    return VerifyReport(
        described.schema_id,
        sum(each.compared for each in answers),
        sum(each.dirty for each in answers),
        sum(each.differing for each in answers),
        tuple(difference for each in answers for difference in each.differences)[:SHOWN],
        time.monotonic() - began,
    )


def verify_share(share: Share) -> Answer:
    """Inside a task: both sides of a range, joined by id."""
    import pyarrow as pa

    from modak.postgres.arrow import stream

    schema = merged_schema(share.schema.attributes)
    source = Source(share.address, share.snapshot, share.tables, share.schema)
    with running(share.merge.kernel) as duck:
        duck.register("empty", pa.Table.from_batches([], schema))
        duck.execute("CREATE TABLE pg AS SELECT * FROM empty; CREATE TABLE lake AS SELECT * FROM empty")
        duck.execute("CREATE TABLE dirty (row_id VARCHAR)")
        for batch in stream(share.address.fresh(), share.dirty, snapshot=share.snapshot):
            _insert(duck, "dirty", pa.Table.from_batches([batch]))
        for rows in rows_of(source, Live(share.within, settled=True)):
            _insert(duck, "pg", rows.table)
        for batch in newest(share.merge):
            _insert(duck, "lake", pa.Table.from_batches([batch], schema))
        duck.execute("DELETE FROM lake WHERE row_id IN (SELECT row_id FROM dirty)")
        return _compared(duck, share.schema)


def _compared(duck: Any, schema: EntitySchema) -> Answer:
    names = ["ltbase_created_at", "ltbase_updated_at", *(each.name for each in schema.attributes)]
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    unequal = " OR ".join(f"pg.{name} IS DISTINCT FROM lake.{name}" for name in quoted)
    joined = (
        f"FROM pg FULL JOIN lake ON pg.row_id = lake.row_id WHERE pg.row_id IS NULL OR lake.row_id IS NULL OR {unequal}"
    )
    (differing,) = duck.execute(f"SELECT count(*) {joined}").fetchone()
    (compared,) = duck.execute("SELECT count(*) FROM pg").fetchone()
    (dirty,) = duck.execute("SELECT count(*) FROM dirty").fetchone()
    if not differing:
        return Answer(compared, dirty, 0, ())
    pairs = ", ".join(f"pg.{name}::VARCHAR, lake.{name}::VARCHAR" for name in quoted)
    found = duck.execute(
        f"SELECT pg.row_id, lake.row_id, {pairs} {joined} ORDER BY coalesce(pg.row_id, lake.row_id) LIMIT {SHOWN}"
    ).fetchall()
    return Answer(compared, dirty, differing, tuple(_difference(row, names) for row in found))


def _difference(row: tuple[Any, ...], names: list[str]) -> Difference:
    here, there, *values = row
    if there is None:
        return Difference("missing in the store", str(here))
    if here is None:
        return Difference("extra in the store", str(there))
    for at, name in enumerate(names):
        mine, other = values[2 * at], values[2 * at + 1]
        if mine != other:
            return Difference("changed", str(here), name, _shown(mine), _shown(other))
    raise ModakError("entities.merge_failed", f"{here} differs and nothing in it does.")


def _shown(value: str | None) -> str:
    return "NULL" if value is None else value


def _insert(duck: Any, table: str, rows: pa.Table) -> None:
    duck.register("portion", rows)
    duck.execute(f"INSERT INTO {table} SELECT * FROM portion")  # noqa: S608 - one of three constants
    duck.unregister("portion")


def _dirty_query(tables: EntityTables, schema_id: int, within: KeyRange) -> str:
    from psycopg import sql

    parts: list[sql.Composable] = [
        sql.SQL("SELECT row_id::text AS row_id FROM {} WHERE schema_id = {} AND flushed_at = 0").format(
            identifier(tables.log), sql.Literal(schema_id)
        )
    ]
    if within.lower is not None:
        parts.append(sql.SQL(" AND row_id >= {}::uuid").format(sql.Literal(within.lower)))
    if within.upper is not None:
        parts.append(sql.SQL(" AND row_id < {}::uuid").format(sql.Literal(within.upper)))
    return sql.Composed(parts).as_string()
