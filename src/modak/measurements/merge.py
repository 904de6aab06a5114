"""The merge itself: many small Parquet files in, few large sorted ones out, inside one process.

Footers are read first: they tell what is corrupt, which schema holds all files, how many rows there must be. DuckDB
reads and sorts, texts that repeat as codes (`codes.py`), with a limit on its memory and a folder of its own to spill
into; pyarrow writes, and begins a new file at the target size. Rolling inside the engine would break the order. Where
there are thousands of files, they are gathered in fewer ones first (`gather.py`).

Where a writer declares tags, rows that agree in every column collapse into one (`output.py`).

Memory: DuckDB's limit, plus one row group in Arrow form. Disk: what DuckDB spills, what is gathered, and the outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from modak.core.errors import ModakError
from modak.measurements.codes import coded_types, rows_of
from modak.measurements.engine import columns, opened, quoted
from modak.measurements.gather import gathered
from modak.measurements.output import (
    MOST_ROWS,
    ROW_HASH,
    MergedFile,
    RollingWriter,
    distinct,
    finished,
    neighbours,
    rows_per_group,
)
from modak.measurements.types import TAGS_KEY, TIME, Footer, Unified, is_nanoseconds, plain, unify


@dataclass(frozen=True)
class MergeOrder:
    """What to merge, and how. `inputs` are local files by the path that people know them by."""

    inputs: Mapping[str, Path]
    work: Path
    target_bytes: int
    sort_keys: tuple[str, ...] = ()
    memory_bytes: int = 1 << 30
    threads: int = 1


@dataclass(frozen=True)
class Merged:
    """What came out: rows in = rows out + duplicates, or nothing came out at all."""

    outputs: tuple[MergedFile, ...]
    used: tuple[str, ...]
    aside: tuple[tuple[str, str], ...]
    rows_in: int
    rows_out: int
    duplicates: int
    tags: tuple[str, ...] = field(default=())


def merge(order: MergeOrder) -> Merged:
    """Merge the inputs; those that cannot be read or joined without loss are named and left out."""
    footers, aside = read_footers(order.inputs)
    unified = unify(footers)
    aside += unified.aside
    odd = tuple(_too_fine(order, unified))
    if odd:
        aside += odd
        named = {path for path, _ in (*unified.aside, *odd)}
        unified = unify([each for each in footers if each.path not in named])
    try:
        return _merged(order, unified, aside)
    except duckdb.Error as error:
        broken = tuple(_undecodable(order, unified)) if _may_be_a_file(error) else ()
        if not broken:
            raise
    named = {path for path, _ in (*aside, *broken)}
    _empty(order.work)
    return _merged(order, unify([each for each in footers if each.path not in named]), aside + broken)


def read_footers(inputs: Mapping[str, Path]) -> tuple[list[Footer], tuple[tuple[str, str], ...]]:
    """What every file says about itself; those that say nothing sensible are named with the reason."""
    footers: list[Footer] = []
    corrupt: list[tuple[str, str]] = []
    schemas: dict[pa.Schema, pa.Schema] = {}
    for path, file in inputs.items():
        try:
            meta = pq.read_metadata(file)
            tags = (meta.metadata or {}).get(TAGS_KEY, b"").decode()
            schema = meta.schema.to_arrow_schema().remove_metadata()
            # One object for all files of a schema: there may be a hundred thousand of them.
            schema = schemas.setdefault(schema, schema)
            footers.append(Footer(path, meta.num_rows, schema, tuple(tag for tag in tags.split(",") if tag)))
        except FileNotFoundError:
            corrupt.append((path, "it is gone"))
        except (pa.ArrowException, OSError, ValueError) as error:
            corrupt.append((path, f"it is corrupt: {_first_line(error)}"))
    return footers, tuple(corrupt)


def _merged(order: MergeOrder, unified: Unified, aside: tuple[tuple[str, str], ...]) -> Merged:
    used = tuple(path for group in unified.groups for path in group.paths)
    if not used:
        return Merged((), (), aside, 0, 0, 0)
    keys = [key for key in order.sort_keys if key in unified.schema.names and key != TIME]
    with opened(order.work, order.memory_bytes, order.threads) as engine:
        size = sum(order.inputs[path].stat().st_size for path in used)
        group_rows = rows_per_group(size, unified.rows, order.target_bytes)
        writer = RollingWriter(
            order.work, order.target_bytes, unified.schema, keys=keys, tags=unified.tags, group_rows=group_rows
        )
        with contextlib.closing(writer):
            source, inputs = gathered(engine, unified, order.inputs, order.work / "gathered", group_rows)
            rows = _sorted_rows(engine, source, inputs, keys, group_rows)
            for batch in distinct(engine, rows, writer) if unified.tags else rows:
                writer.write(batch)
    outputs = tuple(finished(file) for file in writer.files)
    rows_out = sum(each.rows for each in outputs)
    if unified.rows != rows_out + writer.duplicates:
        raise ModakError(
            "measurements.rows",
            f"{unified.rows} rows went in, {rows_out} and {writer.duplicates} duplicates came out: nothing is kept.",
        )
    return Merged(outputs, used, aside, unified.rows, rows_out, writer.duplicates, unified.tags)


def _sorted_rows(
    engine: duckdb.DuckDBPyConnection,
    unified: Unified,
    inputs: Mapping[str, Path],
    keys: Sequence[str],
    group_rows: int,
) -> Iterator[pa.RecordBatch]:
    def files(paths: Sequence[str]) -> list[str]:
        return [str(inputs[path]) for path in paths]

    codes = coded_types(engine, unified, files, group_rows)
    names = ", ".join(quoted(name) for name in unified.schema.names)
    values = ", ".join(
        f"CAST({quoted(name)} AS {codes[name]}) AS {quoted(name)}" if name in codes else quoted(name)
        for name in unified.schema.names
    )
    ordering = ", ".join(f"{quoted(key)} NULLS FIRST" for key in (*keys, TIME))
    if unified.tags:
        names += f", hash({names}) AS {ROW_HASH}"
        ordering += f", {neighbours(unified.schema)}"
    statement = (
        f"SELECT {names} FROM (SELECT {values} FROM ({rows_of(unified.groups, unified.schema)}))"  # noqa: S608 - quoted names
        f" ORDER BY {ordering}"
    )
    given = [files(group.paths) for group in unified.groups]
    yield from engine.execute(statement, given).to_arrow_reader(group_rows)


def _too_fine(order: MergeOrder, unified: Unified) -> Iterator[tuple[str, str]]:
    """Files with times between two microseconds, which the output could not hold."""
    for group in unified.groups:
        doubtful = [each.name for each in group.schema if is_nanoseconds(each.type) or _is_time_as_text(each)]
        if not doubtful:
            continue
        for path in group.paths:
            try:
                reader = pq.ParquetFile(order.inputs[path])
                for batch in reader.iter_batches(columns=doubtful):
                    if any(_has_nanoseconds(batch.column(name)) for name in batch.schema.names):
                        yield path, "it has times between two microseconds"
                        break
            except (pa.ArrowException, OSError) as error:
                yield path, f"it is corrupt: {_first_line(error)}"


def _is_time_as_text(column: pa.Field) -> bool:
    return bool(column.name == TIME and plain(column.type) == pa.string())


def _has_nanoseconds(column: pa.Array) -> bool:
    if pa.types.is_timestamp(column.type):
        values = column.cast(pa.int64())
        whole = pc.multiply(pc.divide(values, 1000), 1000)
        return bool(pc.any(pc.not_equal(values, whole)).as_py())
    texts = column.cast(pa.string())
    return bool(pc.any(pc.match_substring_regex(texts, r"\.\d{6}\d*[1-9]")).as_py())


def _may_be_a_file(error: duckdb.Error) -> bool:
    return not isinstance(error, duckdb.OutOfMemoryException)


def _undecodable(order: MergeOrder, unified: Unified) -> Iterator[tuple[str, str]]:
    """Files whose footer is fine and whose pages are not; found by reading each of them alone."""
    with opened(order.work, order.memory_bytes, order.threads) as engine:
        for group in unified.groups:
            for path in group.paths:
                chosen = columns(group.schema, unified.schema)
                statement = f"SELECT {chosen} FROM read_parquet($1, hive_partitioning=false)"  # noqa: S608
                try:
                    for _ in engine.execute(statement, [[str(order.inputs[path])]]).to_arrow_reader(MOST_ROWS):
                        pass
                except duckdb.OutOfMemoryException:
                    raise
                except (duckdb.Error, pa.ArrowException, OSError) as error:
                    yield path, f"it cannot be decoded: {_first_line(error)}"


def _empty(work: Path) -> None:
    for file in work.glob("out-*.parquet"):
        file.unlink()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
