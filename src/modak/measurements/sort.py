"""Large windows: one sort over all cores of the cluster instead of batches in tasks.

Spark reads the pinned files under one schema and shuffles rows into ranges of the sort keys, as many as there will be
outputs. Each task sorts its range with DuckDB, drops repeated rows (equal rows have equal keys, so they meet in one
range), writes files that roll at the target and uploads them. What a task that was run twice has uploaded twice is
removed before the commit.

Memory: a task holds DuckDB's limit and one row group; the driver holds footers and descriptions of outputs.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.measurements.child import memory_bytes, newest_stamp
from modak.measurements.footers import Pinned, footers
from modak.measurements.isolation import SECRETS_VARIABLE, SubprocessJobConfig, SubprocessJobResult
from modak.measurements.layout import output_name, parse_name
from modak.measurements.reading import frame_of, rows_frame, spark_schema
from modak.storage.objects import Meta, Objects

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from modak.measurements.types import Unified

_FOOTERS_PER_TASK = 200
_ATTEMPTS = 100
_FILES = 1_000


@dataclass(frozen=True)
class Range:
    """What every task of the sort must know."""

    objects: Objects
    config: SubprocessJobConfig
    stem: tuple[str, str]
    schema: bytes
    keys: tuple[str, ...]
    tags: tuple[str, ...]
    group_rows: int


def sort_in_spark(spark: SparkSession, config: SubprocessJobConfig) -> SubprocessJobResult:
    """Do a job as one distributed sort; a failure is an answer, as it is of a child."""
    try:
        return _sorted(spark, config)
    except ModakError as error:
        return SubprocessJobResult.failed(f"{error.code}: {error.message}")
    except Exception as error:
        return SubprocessJobResult.failed(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:500]}")


def _sorted(spark: SparkSession, config: SubprocessJobConfig) -> SubprocessJobResult:
    import time

    begun = time.monotonic()
    place = json.loads(config.storage_config)
    secrets = json.loads(config.extra_env.get(SECRETS_VARIABLE, "{}"))
    objects = Objects.of(place["root"], {**place.get("props", {}), **secrets})
    pinned = _pinned(spark, objects, config)
    unified, aside = _unified(pinned)
    used = {path for group in unified.groups for path in group.paths}
    chosen = [each for each in pinned if each.meta.path in used]
    if not chosen:
        return SubprocessJobResult(False, "no valid input", aside=aside, reason="no_valid_input")
    outputs, duplicates = _written(spark, objects, config, unified, chosen)
    _remove_strays(objects, config, {output[0] for output in outputs})
    rows_out = sum(output[4] for output in outputs)
    if unified.rows != rows_out + duplicates:
        return SubprocessJobResult(
            False, f"{unified.rows} rows went in, {rows_out} and {duplicates} duplicates came out", aside=aside
        )
    return SubprocessJobResult(
        True,
        files_compacted=len(chosen),
        bytes_before=sum(each.meta.size for each in chosen),
        bytes_after=sum(output[1] for output in outputs),
        output_file=outputs[0][0] if outputs else "",
        outputs=tuple(outputs),
        used=tuple(each.meta.path for each in chosen),
        aside=aside,
        rows_in=unified.rows,
        rows_out=rows_out,
        duplicates=duplicates,
        seconds=round(time.monotonic() - begun, 3),
    )


def _pinned(spark: SparkSession, objects: Objects, config: SubprocessJobConfig) -> list[Pinned]:
    from modak.spark.distribute import distribute

    metas = [
        Meta(path, size, etag, datetime.fromtimestamp(0, UTC))
        for path, (size, etag) in zip(config.files, config.pins, strict=True)
    ]
    parts = [tuple(metas[at : at + _FOOTERS_PER_TASK]) for at in range(0, len(metas), _FOOTERS_PER_TASK)]
    return [each for some in distribute(spark, footers, [(objects, part) for part in parts]) for each in some]


def _unified(pinned: list[Pinned]) -> tuple[Unified, tuple[tuple[str, str, str], ...]]:
    import pyarrow as pa

    from modak.measurements.types import Footer, is_nanoseconds, time_type, unify

    etags = {each.meta.path: each.meta.etag for each in pinned}
    sound = [each for each in pinned if not each.problem]
    read = [
        Footer(each.meta.path, each.rows, pa.ipc.read_schema(pa.py_buffer(each.schema)), each.tags) for each in sound
    ]
    for footer in read:
        doubtful = [each for each in footer.schema if is_nanoseconds(each.type)]
        time = footer.schema.field("time").type if "time" in footer.schema.names else None
        if doubtful or (time is not None and time_type(time) is not None and not pa.types.is_timestamp(time)):
            raise ModakError(
                "measurements.not_sortable",
                f"The times of {footer.path} must be looked at one by one: merge in batches.",
            )
    unified = unify(read)
    if spark_schema(unified.schema) != unified.schema:
        raise ModakError("measurements.not_sortable", "Spark has no word for a type of these files: merge in batches.")
    corrupt = tuple(
        (each.meta.path, each.meta.etag, f"it is corrupt: {each.problem}") for each in pinned if each.problem
    )
    return unified, corrupt + tuple((path, etags[path], reason) for path, reason in unified.aside)


def _written(
    spark: SparkSession, objects: Objects, config: SubprocessJobConfig, unified: Unified, chosen: list[Pinned]
) -> tuple[list[tuple[str, int, str, str, int]], int]:
    from pyspark.sql import functions
    from pyspark.sql.types import StringType, StructField, StructType

    from modak.measurements.output import rows_per_group
    from modak.measurements.types import TIME

    keys = (*(key for key in config.sort_keys if key in unified.schema.names and key != TIME), TIME)
    size = sum(each.meta.size for each in chosen)
    stamp = newest_stamp(tuple(each.meta.path for each in chosen), config)
    # The name of an output before and after the number that tells it from its siblings.
    stem = output_name(config.measurement, stamp, config.job_id, 0, config.tier_word).rsplit("0000", 1)
    work = Range(
        objects,
        config,
        (f"{config.partition_path}/{stem[0]}", stem[1]),
        unified.schema.serialize().to_pybytes(),
        keys,
        unified.tags,
        rows_per_group(size, unified.rows, config.target_bytes),
    )
    ranges = max(-(-size // config.target_bytes), 1)
    frame = rows_frame(spark, objects, unified.schema, chosen)
    ordered = [functions.col(f"`{key.replace('`', '``')}`").asc_nulls_first() for key in keys]
    spread = frame.repartitionByRange(ranges, *ordered)
    answer = StructType([StructField("answer", StringType())])
    found = frame_of(spread, _task(work), answer).collect()
    told = [json.loads(row["answer"]) for row in found]
    outputs = sorted(tuple(output) for each in told for output in each["outputs"])
    return outputs, sum(each["duplicates"] for each in told)


def _task(work: Range) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        first = (context.partitionId() * _ATTEMPTS + context.attemptNumber()) * _FILES
        told = json.dumps(sort_range(work, rows, first))
        yield pa.RecordBatch.from_pydict({"answer": [told]})

    return run


def sort_range(work: Range, rows: Iterator[pa.RecordBatch], first: int) -> dict[str, Any]:
    """Sort, write and upload one range, with numbers from `first` on; runs in a task."""
    import pyarrow as pa

    from modak.measurements.engine import opened, quoted
    from modak.measurements.output import ROW_HASH, RollingWriter, distinct, finished, neighbours

    schema = pa.ipc.read_schema(pa.py_buffer(work.schema))
    config = work.config
    names = ", ".join(quoted(name) for name in schema.names)
    ordering = ", ".join(f"{quoted(key)} NULLS FIRST" for key in work.keys)
    if work.tags:
        names, ordering = f"{names}, hash({names}) AS {ROW_HASH}", f"{ordering}, {neighbours(schema)}"
    Path(config.temp_directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sort-", dir=config.temp_directory) as name:
        folder = Path(name)
        writer = RollingWriter(
            folder, config.target_bytes, schema, keys=work.keys[:-1], tags=work.tags, group_rows=work.group_rows
        )
        with opened(folder, memory_bytes(config.memory_limit), 1) as engine, contextlib.closing(writer):
            given = pa.RecordBatchReader.from_batches(schema, (batch.cast(schema) for batch in rows))
            engine.register("given", given)
            found = engine.execute(f"SELECT {names} FROM given ORDER BY {ordering}").to_arrow_reader(work.group_rows)  # noqa: S608
            for batch in distinct(engine, iter(found), writer) if work.tags else found:
                writer.write(batch)
        outputs = []
        for index, file in enumerate(writer.files):
            done = finished(file)
            reach("sort.before_upload")
            meta = work.objects.upload(f"{work.stem[0]}{first + index:08d}{work.stem[1]}", file)
            reach("sort.uploaded")
            outputs.append((meta.path, done.size, done.sha256, meta.etag, done.rows))
    return {"outputs": outputs, "duplicates": writer.duplicates}


def _remove_strays(objects: Objects, config: SubprocessJobConfig, wanted: set[str]) -> None:
    """Outputs of tasks that Spark has run twice."""
    strays = [
        meta.path
        for meta in objects.list(config.partition_path)
        if (said := parse_name(meta.path.rpartition("/")[2])) is not None
        and said.job == config.job_id
        and meta.path not in wanted
    ]
    if strays:
        objects.delete(strays)
