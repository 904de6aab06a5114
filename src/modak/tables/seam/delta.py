"""The corrections that lie over the pinned lake state: which cold rows they replace, and the rows that they bring.

A reader at a pin sees the delta rows below its T, from its R on, that are not folded into its own lake state. They are
read under the point's snapshot: a small delta by the driver, into an Arrow table of bounded size, a large one by Spark
tasks like the heap. Payloads are column → text; Postgres picks the texts, whole columns are parsed to lake types here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from modak.catalog.delta import Rename, image_cases
from modak.lake.types import MappedColumn
from modak.postgres.splits import ctid_predicate, ctid_splits
from modak.spark.frames import frame_of
from modak.tables.seam.columns import SeamColumn, struct_of
from modak.tables.seam.pinned import PinnedTable
from modak.tables.seam.plan import Span
from modak.tables.seam.predicate import Predicate, one_of, text_literal
from modak.tables.seam.reader import Access
from modak.tables.seam.sieve import Sieve, sieve_of
from modak.tables.seam.streams import ImageSplit, KeySplit, delta_images, delta_keys

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Item = TypeVar("Item")

LOCAL_ROWS = 20_000
LOCAL_BYTES = 16 << 20
"""Up to here the driver reads the delta itself, once, and plans carry it."""
LOCAL_KEYS = 500_000
"""Up to so many whole-number keys the driver reads even of a large delta: about fifty bytes each, for the sieve."""
SPLIT_BYTES = 64 << 20
_INT64 = (-(2**63), 2**63 - 1)
_TEXT_KEYS = frozenset({"int2", "int4", "int8", "text", "varchar", "uuid"})


@dataclass(frozen=True, slots=True)
class Older:
    """Under which names older payloads have a column."""

    renames: tuple[Rename, ...] = ()
    former: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names that the lake knows it by and that no column has now, whenever the payload was written."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """What is laid over the lake: the identities that it loses and the rows that come in their place."""

    keys: DataFrame | Sieve
    """A sieve where the primary key is one whole number and there are not too many."""
    images: DataFrame
    rows: int


def overlay(
    spark: SparkSession,
    table: PinnedTable,
    access: Access,
    span: Span,
    columns: Sequence[SeamColumn],
    older: Older,
    predicate: Predicate | None,
) -> Overlay | None:
    """The delta of a span, or nothing when there is none."""
    if not table.delta.rows:
        return None
    shape = table.shape
    local = table.delta.rows <= LOCAL_ROWS and table.delta.bytes <= LOCAL_BYTES
    where = delta_condition(table, span, predicate)
    parts = [where] if local else [f"{part} AND {where}" for part in _pages(table, spark)]
    pk = [shape.named(name) for name in shape.pk]
    tier = None if shape.tier_key in shape.pk else shape.named(shape.tier_key)
    texts = [f"{payload_text(column, older)} AS c{i}" for i, column in enumerate(columns)]
    sifted = shape.whole_number_key and table.delta.rows <= LOCAL_KEYS
    keys = [
        KeySplit(
            access,
            f"SELECT pk, tier_key FROM modak.delta WHERE {part}",  # noqa: S608
            _mapped(pk),
            tier.mapped if tier else None,
        )
        for part in ([where] if sifted else parts)
    ]
    images = [
        ImageSplit(
            access,
            f"SELECT {', '.join(texts)} FROM modak.delta WHERE op = 1 AND {part}",  # noqa: S608
            _mapped(columns),
        )
        for part in parts
    ]
    identity = [*pk, *([tier] if tier else [])]
    return Overlay(
        _identities(spark, keys, identity, sifted, local),
        spark.createDataFrame(_gathered(images, delta_images, columns), struct_of(columns))
        if local
        else frame_of(spark, struct_of(columns), images, delta_images),
        table.delta.rows,
    )


def _identities(
    spark: SparkSession, keys: Sequence[KeySplit], identity: Sequence[SeamColumn], sifted: bool, local: bool
) -> DataFrame | Sieve:
    if not sifted and not local:
        return frame_of(spark, struct_of(identity), keys, delta_keys)
    found = _gathered(keys, delta_keys, identity)
    sieve = sieve_of(spark, found) if sifted else None
    return sieve if sieve is not None else spark.createDataFrame(found, struct_of(identity))


def delta_condition(table: PinnedTable, span: Span, predicate: Predicate | None) -> str:
    """What a reader at the pin sees; filters on the key and the tier key may go first, others must not."""
    pin = table.pin
    generation = f"(folded_generation IS NULL OR folded_generation > {pin.generation})"
    conditions = [f"table_id = {pin.table_id}", generation]
    if span.lower is not None:
        conditions.append(f"tier_key >= {_int64(span.lower)}")
    if span.upper is not None:
        conditions.append(f"tier_key < {_int64(span.upper)}")
    (first, *more) = table.shape.pk
    tied = one_of(predicate, first) if not more else None
    if tied and table.shape.named(first).heap.type.name in _TEXT_KEYS:
        texts = [str(value) for value in tied if isinstance(value, int | str) and "\x00" not in str(value)]
        if len(texts) == len(tied):
            conditions.append(f"pk IN ({', '.join(map(text_literal, texts))})")
    return " AND ".join(conditions)


def payload_text(column: SeamColumn, older: Older) -> str:
    """The text of a column in a payload; a payload from before the column shows what Postgres shows for such rows."""
    cases = image_cases(column.name, older.renames)
    known = {name for _, name in cases}
    cases += [
        (f"payload ? {text_literal(name)}", name) for name in older.former.get(column.name, ()) if name not in known
    ]
    missing = column.heap.missing_value
    if missing is None and cases == image_cases(column.name, ()):
        return f"payload ->> {text_literal(column.name)}"
    chosen = " ".join(f"WHEN {condition} THEN payload ->> {text_literal(name)}" for condition, name in cases)
    return f"CASE {chosen} ELSE {'NULL' if missing is None else text_literal(missing)} END"


def _pages(table: PinnedTable, spark: SparkSession) -> list[str]:
    size = table.delta
    cores = spark.sparkContext.defaultParallelism
    return [ctid_predicate(split) for split in ctid_splits(size.pages, size.table_bytes, SPLIT_BYTES, cores)]


def _gathered(
    items: Sequence[Item], produce: Callable[[Item], Iterator[pa.RecordBatch]], columns: Sequence[SeamColumn]
) -> pa.Table:
    import pyarrow as pa

    from modak.lake.decode import arrow_schema

    batches = (batch for item in items for batch in produce(item))
    return pa.Table.from_batches(batches, schema=arrow_schema([each.mapped.column for each in columns]))


def _mapped(columns: Sequence[SeamColumn]) -> tuple[MappedColumn, ...]:
    return tuple(column.mapped for column in columns)


def _int64(value: int) -> int:
    return min(max(value, _INT64[0]), _INT64[1])
