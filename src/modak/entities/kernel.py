"""The newest version of every row of some files, within a range of ids: the kernel of reads and rewrites.

DuckDB does it inside a task, with a limit on its memory and a folder to spill to. Every file is read under the names
and types of today's registry (`evolution.py`); whole rows win, never single values. The newest is the row whose file
was listed last; among files of one listing the later stamp, and a tombstone wins a tie.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from modak.core.errors import ModakError
from modak.entities.config import CDCConfig
from modak.entities.evolution import column_in
from modak.entities.files import local_files
from modak.entities.manifest import DELTA, ManifestEntry, stored
from modak.entities.plan import KeyRange
from modak.entities.registry import FIXED_COLUMNS, Attribute
from modak.entities.types import arrow_type, duckdb_type, fixed_fields
from modak.spark.predicate import Predicate, Value, render
from modak.storage.objects import Objects

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 65_536
MEMORY = "1GiB"
"""What a kernel may hold before it spills, where nothing else is said."""
_FIXED_TYPES = ("SMALLINT", "VARCHAR", "BIGINT", "BIGINT", "BIGINT", "BIGINT", "BIGINT")
_SEQ = "~seq"


@dataclass(frozen=True, slots=True)
class Kernel:
    """How DuckDB runs inside a task."""

    threads: int = 1
    memory: str = MEMORY
    path: str = ""
    timeout_seconds: float = 0.0

    @classmethod
    def of(cls, config: CDCConfig) -> Kernel:
        """As the configuration wants it."""
        limit = config.duck_mem_limit
        memory = (f"{limit}B" if isinstance(limit, int) else limit) if limit else MEMORY
        return cls(config.duck_threads or 1, memory, config.duckdb_path, config.query_timeout)


@dataclass(frozen=True, slots=True)
class Merge:
    """What a task merges: files, the attributes that are wanted, and a range of ids."""

    objects: Objects
    sources: tuple[ManifestEntry, ...]
    attributes: tuple[Attribute, ...]
    within: KeyRange
    kernel: Kernel
    verify: bool = False
    """Whether the files' checksums are looked at first."""
    in_order: bool = False
    """Whether rows are wanted sorted by id."""
    row_ids: tuple[str, ...] | None = None
    """Only these rows, where they are few."""
    predicate: Predicate | None = None
    """What the newest version of a row must be like; it is weighed against older ones before."""


def newest(merge: Merge) -> Iterator[pa.RecordBatch]:
    """The live rows of the range, each in its newest version, batch by batch."""
    import pyarrow as pa

    sources = tuple(entry for entry in merge.sources if entry.row_count or not entry.checksum)
    sources = tuple(entry for entry in sources if merge.within.meets(entry))
    wanted = merged_schema(merge.attributes)
    if not sources:
        return
    with local_files(merge.objects, sources, verify=merge.verify) as paths, running(merge.kernel) as duck:
        files = [
            (_described(entry, path, merge.attributes), str(path)) for entry, path in zip(sources, paths, strict=True)
        ]
        query = merge_sql(merge, files)
        for batch in duck.execute(query).to_arrow_reader(BATCH_ROWS):
            columns = [batch.column(at).cast(field.type) for at, field in enumerate(wanted)]
            yield pa.RecordBatch.from_arrays(columns, schema=wanted)


def merged_schema(attributes: Sequence[Attribute]) -> pa.Schema:
    """The columns of merged rows."""
    import pyarrow as pa

    return pa.schema([*fixed_fields(), *(pa.field(each.name, arrow_type(each)) for each in attributes)])


def merge_sql(merge: Merge, files: Sequence[tuple[ManifestEntry, str]]) -> str:
    """The query over local files. Names and paths are quoted, bounds are literals."""
    base = [pair for pair in files if pair[0].level != DELTA]
    delta = [pair for pair in files if pair[0].level == DELTA]
    if base and delta and min(e.seq for e, _ in delta) <= max(e.seq for e, _ in base):
        # A promoted delta may have been listed after one that is still a delta: then all are weighed against all.
        base, delta = [], [*base, *delta]
    names = ", ".join(map(_quoted, (*FIXED_COLUMNS, *(each.name for each in merge.attributes))))
    order = " ORDER BY row_id" if merge.in_order else ""
    live = " AND ".join(filter(None, ("deleted_at = 0", _condition(merge))))
    if not delta:
        return f"SELECT {names} FROM ({_union(merge, base)}) WHERE {live}{order}"  # noqa: S608
    ranked = (
        f"SELECT * FROM ({_union(merge, delta)}) QUALIFY row_number() OVER "  # noqa: S608
        f'(PARTITION BY row_id ORDER BY "{_SEQ}" DESC, changed_at DESC, deleted_at <> 0 DESC) = 1'
    )
    if not base:
        return f"SELECT {names} FROM ({ranked}) WHERE {live}{order}"  # noqa: S608
    return (
        f"WITH late AS MATERIALIZED ({ranked}) "  # noqa: S608
        f"SELECT {names} FROM (SELECT * FROM late WHERE {live} UNION ALL "
        f"SELECT * FROM ({_union(merge, base)}) AS early WHERE {live} "
        f"AND NOT EXISTS (SELECT 1 FROM late WHERE late.row_id = early.row_id)){order}"
    )


def keys_sql(paths: Sequence[str]) -> str:
    """The query that tells whether the row ids of files are all different."""
    listed = ", ".join(_literal(path) for path in paths)
    return f"SELECT count(*) = count(DISTINCT row_id) FROM read_parquet([{listed}], union_by_name = true)"  # noqa: S608


@contextmanager
def running(kernel: Kernel) -> Iterator[Any]:
    """A DuckDB for a block; one that takes longer than it may is interrupted."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="modak-kernel-") as spill:
        # Beside the file that was named, because tasks run side by side and DuckDB opens a file only once.
        database = Path(f"{kernel.path}.{token_hex(8)}") if kernel.path else None
        duck = duckdb.connect(
            str(database or ":memory:"),
            config={
                "threads": kernel.threads,
                "memory_limit": kernel.memory,
                "temp_directory": spill,
                "preserve_insertion_order": False,
            },
        )
        late = threading.Event()
        timer = threading.Timer(kernel.timeout_seconds, _interrupt, (duck, late)) if kernel.timeout_seconds else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield duck
        except duckdb.Error as error:
            if late.is_set():
                raise ModakError(
                    "entities.timeout",
                    f"A merge took longer than {kernel.timeout_seconds:g} s.",
                    hint="Raise MODAK_ENTITIES_QUERY_TIMEOUT.",
                    retryable=True,
                ) from None
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModakError("entities.merge_failed", f"Merging files failed: {said}") from error
        finally:
            if timer is not None:
                timer.cancel()
            duck.close()
            if database is not None:
                database.unlink(missing_ok=True)


def _interrupt(duck: Any, late: threading.Event) -> None:
    late.set()
    duck.interrupt()


def _union(merge: Merge, files: Sequence[tuple[ManifestEntry, str]]) -> str:
    return " UNION ALL ".join(_one(merge, entry, path) for entry, path in files)


def _one(merge: Merge, entry: ManifestEntry, path: str) -> str:
    """One file under today's names and types."""
    columns = [f"CAST({name} AS {kind}) AS {name}" for name, kind in zip(FIXED_COLUMNS, _FIXED_TYPES, strict=True)]
    columns += [f"{_column(each, entry)} AS {_quoted(each.name)}" for each in merge.attributes]
    columns.append(f'{entry.seq:d} AS "{_SEQ}"')
    conditions = [
        f"row_id {sign} {_literal(bound)}"
        for sign, bound in ((">=", merge.within.lower), ("<", merge.within.upper))
        if bound is not None
    ]
    if merge.row_ids is not None:
        conditions.append(f"row_id IN ({', '.join(map(_literal, merge.row_ids)) or 'NULL'})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {', '.join(columns)} FROM read_parquet({_literal(path)}){where}"  # noqa: S608


def _condition(merge: Merge) -> str | None:
    """The filter in DuckDB's words; its texts, numbers and truths are compared as Spark compares them."""
    names = {*FIXED_COLUMNS, *(each.name for each in merge.attributes)}
    if merge.predicate is None:
        return None
    return render(merge.predicate, lambda name: _quoted(name) if name in names else None, _constant)


def _constant(_: str, value: Value, exact: bool) -> str | None:
    if isinstance(value, str):
        return _literal(value) if exact and "\x00" not in value else None
    if isinstance(value, bool):
        return str(value).upper()
    return f"({value:f})" if isinstance(value, Decimal) else f"({value:d})"


def _described(entry: ManifestEntry, path: Path, attributes: Sequence[Attribute]) -> ManifestEntry:
    """The entry, with its attributes by their names where a writer that knows fewer fields has not described them."""
    if entry.attributes:
        return entry
    import pyarrow.parquet as pq

    there = set(pq.read_schema(path).names)
    return replace(entry, attributes=stored(each for each in attributes if each.name in there))


def _column(attribute: Attribute, entry: ManifestEntry) -> str:
    kind = duckdb_type(attribute)
    name = column_in(attribute, entry.attributes)
    if name is None:
        return f"CAST(NULL AS {kind})"
    scalar_before = not entry.attributes[name].type.startswith("list<")
    if attribute.is_list and scalar_before:
        return f"CASE WHEN {_quoted(name)} IS NULL THEN NULL ELSE CAST([{_quoted(name)}] AS {kind}) END"
    return f"CAST({_quoted(name)} AS {kind})"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
