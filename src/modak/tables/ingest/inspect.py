"""Reading footers: what each Parquet file holds and whether it fits the lake table. No rows are read.

Files are looked at by a few threads, because a footer on an object store is mostly waiting. Memory is bounded by the
footers in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from modak.core.errors import ModakError
from modak.lake.mapping import misnamed
from modak.lake.model import LakeColumn, LakeTable
from modak.tables.fold.read import Shape
from modak.tables.ingest.inputs import Source
from modak.tables.ingest.plan import Facts

if TYPE_CHECKING:
    import pyarrow as pa

THREADS = 8


def inspect(sources: Sequence[Source], shape: Shape, lake: LakeTable, cut: Sequence[int]) -> list[Facts]:
    """The facts of all sources, in their order."""
    with ThreadPoolExecutor(THREADS, "modak-footers") as threads:
        return list(threads.map(lambda source: _facts(source, shape, lake, cut), sources))


def _facts(source: Source, shape: Shape, lake: LakeTable, cut: Sequence[int]) -> Facts:
    if source.kind == "jsonl":
        return Facts(source, 0)
    import pyarrow as pa

    from modak.lake.iceberg.output import parquet_file, storage_errors

    try:
        with storage_errors(source.uri), parquet_file(source.uri) as file:
            return _of_footer(source, file.metadata, file.schema_arrow, shape, lake, cut)
    except (pa.ArrowException, ModakError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Facts(source, 0, misfits=(f"is not a Parquet file that can be read: {first}",))


def _of_footer(
    source: Source, metadata: Any, schema: pa.Schema, shape: Shape, lake: LakeTable, cut: Sequence[int]
) -> Facts:
    from modak.lake.decode import FIELD_ID
    from modak.lake.iceberg.buckets import one_bucket

    names = tuple(schema.names)
    known = {column.name: column for column in shape.columns}
    misfits, rough = _columns(schema, metadata, known)
    ids = {name: int((field.metadata or {}).get(FIELD_ID, -1)) for name, field in zip(names, schema, strict=True)}
    has_ids = any(number >= 0 for number in ids.values())
    if has_ids and any(name in known and ids[name] != known[name].field_id for name in names):
        rough.append("its field ids are those of another table")
    if not has_ids:
        rough += [
            f"column {name} has meant another column before" for name in misnamed(lake.properties, lake.schema, names)
        ]
    lower, upper = _extent(metadata, schema, shape.tier_key)
    bucket = None
    if lower is not None and upper is not None:
        kind = known[shape.tier_key].type
        bucket = one_bucket(lower, upper, kind, lake.layout, cut)
    return Facts(
        source,
        metadata.num_rows,
        columns=names,
        has_ids=has_ids,
        lower=lower,
        upper=upper,
        one_partition=bucket is not None,
        misfits=tuple(misfits),
        rough=tuple(rough),
    )


def _columns(schema: pa.Schema, metadata: Any, known: Mapping[str, LakeColumn]) -> tuple[list[str], list[str]]:
    misfits: list[str] = []
    rough: list[str] = []
    names = schema.names
    extra = [name for name in dict.fromkeys(names) if name not in known]
    if extra:
        misfits.append(f"has columns that the table lacks: {', '.join(extra)}")
    if len(set(names)) != len(names):
        misfits.append("has two columns of one name")
    for name, column in known.items():
        if name not in names:
            if column.required and column.initial_default is None:
                misfits.append(f"lacks column {name}, which may not be NULL")
            continue
        held = schema.field(name).type
        fit = _fit(held, column)
        if fit == "never":
            misfits.append(f"column {name} is {held}, the table's is {column.type}")
        elif fit == "cast":
            rough.append(f"column {name} is {held}, the table's is {column.type}")
        if column.required and _nulls(metadata, schema, name) != 0:
            rough.append(f"its footer does not prove that column {name} is never NULL")
    return misfits, rough


def _fit(held: pa.DataType, column: LakeColumn) -> str:
    """Whether readers of the lake take a column as it is, after a cast, or never."""
    import pyarrow as pa

    from modak.lake.decode import arrow_type

    wanted = arrow_type(column.type)
    if held == wanted or (pa.types.is_large_string(held) and pa.types.is_string(wanted)):
        return "same"
    if column.element is not None:
        if not (pa.types.is_list(held) or pa.types.is_large_list(held)):
            return "never"
        return "same" if held.value_type == wanted.value_type else "cast"
    texts = pa.types.is_string(held) or pa.types.is_large_string(held)
    if texts != pa.types.is_string(wanted) and not pa.types.is_dictionary(held):
        return "never"
    try:
        target = wanted.storage_type if isinstance(wanted, pa.BaseExtensionType) else wanted
        plain = held.storage_type if isinstance(held, pa.BaseExtensionType) else held
        pa.array([], plain).cast(target)
    except (pa.ArrowException, NotImplementedError):
        return "never"
    return "cast"


def _extent(metadata: Any, schema: pa.Schema, name: str) -> tuple[int | None, int | None]:
    from modak.lake.iceberg.scan import _on_axis

    if name not in schema.names or not _on_axis(schema.field(name).type):
        return None, None
    low: list[int] = []
    high: list[int] = []
    for statistics in _statistics(metadata, name):
        if statistics is None or not statistics.has_min_max or not statistics.has_null_count or statistics.null_count:
            return None, None
        low.append(statistics.min_raw)
        high.append(statistics.max_raw)
    return (min(low), max(high)) if low else (None, None)


def _nulls(metadata: Any, schema: pa.Schema, name: str) -> int | None:
    if not schema.field(name).nullable:
        return 0
    found = list(_statistics(metadata, name))
    if any(one is None or not one.has_null_count for one in found):
        return None
    return sum(int(one.null_count) for one in found)


def _statistics(metadata: Any, name: str) -> list[Any]:
    found = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        chunks = (row_group.column(at) for at in range(row_group.num_columns))
        found.append(next((chunk.statistics for chunk in chunks if chunk.path_in_schema == name), None))
    return found
