"""Rows of a file as columns of Postgres texts, batch after batch, with the line of each: the way in of loads.

JSON lines, CSV, Parquet and Arrow IPC all become the same thing: for every column of a table the text that Postgres
itself would take. DuckDB takes JSON apart and writes values as texts, whole columns at a time. Memory is bounded by one
piece of the file and what DuckDB makes of it (`memory_limit`).
"""

from __future__ import annotations

import contextlib
import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modak.core.errors import ModakError

Format = Literal["jsonl", "csv", "parquet", "arrow"]

PIECE = 2 << 20
"""Bytes of JSON lines, or of typed values, that are taken apart at once; DuckDB needs some thirty times as much."""
CSV_PIECE = 2 << 20
"""Arrow reads some thirty pieces of CSV ahead. No row can be longer than one."""
BATCH_ROWS = 65_536
LONGEST_LINE = 16 << 20
LINE = "!line"
FAULTY = "!faulty"
_MEMORY = 64 << 20
_MEMORY_PER_BYTE = 32
"""What DuckDB takes for each byte of JSON at worst; a long line gets more than `_MEMORY`."""


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column that is wanted, and how its values are spelled as text."""

    name: str
    kind: Literal["plain", "json", "list", "binary"] = "plain"
    required: bool = False


@dataclass(slots=True)
class Texts:
    """One batch: a string column for each wanted column that the source has, the lines, and what is wrong with some."""

    rows: pa.RecordBatch
    lines: pa.Array
    faults: list[tuple[int, str]] = field(default_factory=list)
    """Lines that are no rows, with the reason; they are not among `rows`."""


def read_texts(path: Path, form: Format, columns: Sequence[TextColumn]) -> Iterator[Texts]:
    """The rows of a file; `load.columns` names columns that the table does not have."""
    try:
        match form:
            case "jsonl":
                yield from _json_lines(path, columns)
            case "csv":
                yield from _csv(path, columns)
            case "parquet":
                yield from _typed(_parquet(path), columns)
            case "arrow":
                yield from _typed(_arrow(path), columns)
    except (pa.ArrowException, ValueError, OverflowError, EOFError, KeyError, TypeError) as error:
        # Whatever a library says about bytes that somebody sent is about those bytes.
        raise _unreadable(error) from error


def _json_lines(path: Path, columns: Sequence[TextColumn]) -> Iterator[Texts]:
    known = {column.name for column in columns}
    listed = ", ".join(_literal(name) for name in sorted(known))
    picked = ", ".join(f"{_json_text(column, at)} AS c{at}" for at, column in enumerate(columns))
    # One walk over each line for all columns; only arrays are looked at once more.
    wanted = {column.name: "JSON" if column.kind == "json" else "VARCHAR" for column in columns}
    shape = _literal(json.dumps(wanted))
    query = f"""
        WITH valid AS MATERIALIZED (
            SELECT n, json_valid(line) AS good, CASE WHEN json_valid(line) THEN line ELSE 'null' END AS line FROM lines
        ), objects AS MATERIALIZED (
            SELECT n, good AND json_type(line) = 'OBJECT' AS good,
                CASE WHEN json_type(line) = 'OBJECT' THEN line ELSE '{{}}' END AS line FROM valid
        ), named AS MATERIALIZED (
            SELECT n, good, line, list_filter(json_keys(line), k -> k NOT IN ({listed})) AS strange FROM objects
        )
        SELECT n, CASE WHEN NOT good THEN 'is not a JSON object'
            WHEN len(strange) > 0 THEN 'has unknown columns: ' || array_to_string(strange[1:5], ', ') END AS fault,
            {picked}
        FROM (SELECT *, from_json(line, {shape}) AS r FROM named) ORDER BY n
    """  # noqa: S608
    with _duckdb() as duck, path.open("rb") as file:
        for first, lines in _lines(file):
            numbers = pa.array(range(first, first + len(lines)), pa.int64())
            kept = pc.not_equal(pc.utf8_trim_whitespace(lines), "")
            needed = max(_MEMORY, _MEMORY_PER_BYTE * lines.nbytes)
            duck.execute(f"SET memory_limit = '{needed}B'")
            duck.register("lines", pa.table({"n": numbers.filter(kept), "line": lines.filter(kept)}))
            try:
                answer = _tabled(duck.execute(query))
            except Exception as error:
                raise _unreadable(error) from error
            duck.unregister("lines")
            yield from _split(answer, columns)


def _split(answer: pa.Table, columns: Sequence[TextColumn]) -> Iterator[Texts]:
    for batch in answer.combine_chunks().to_batches():
        fault = batch.column("fault")
        sound = pc.is_null(fault)
        bad = batch.filter(pc.invert(sound))
        faults = list(zip(bad.column("n").to_pylist(), bad.column("fault").to_pylist(), strict=True))
        rows = batch if not faults else batch.filter(sound)
        names = [column.name for column in columns]
        texts = pa.RecordBatch.from_arrays([rows.column(f"c{at}") for at in range(len(names))], names=names)
        yield Texts(texts, rows.column("n"), faults)


def _json_text(column: TextColumn, at: int) -> str:
    """Postgres' text of a JSON value: strings as they are, arrays as array literals, documents as documents."""
    value = f"struct_extract_at(r, {at + 1})"
    if column.kind == "json":
        return f"nullif({value}::VARCHAR, 'null')"
    path = _literal(_path_of(column.name))
    if column.kind == "list":
        # An array in JSON; a text is taken for an array literal of Postgres.
        element = r"""CASE WHEN x IS NULL THEN 'NULL'
            ELSE '"' || replace(replace(x, '\', '\\'), '"', '\"') || '"' END"""
        each = _literal(_path_of(column.name) + "[*]")
        elements = f"list_transform(json_extract_string(line, {each}), x -> {element})"
        return (
            f"CASE json_type(line, {path}) WHEN 'ARRAY' THEN '{{' || array_to_string({elements}, ',') || '}}'"
            f" ELSE json_extract_string(line, {path}) END"
        )
    return value


def _path_of(name: str) -> str:
    return "$." + '"' + name.replace('"', '\\"') + '"'


def _lines(file: IO[bytes]) -> Iterator[tuple[int, pa.Array]]:
    """Pieces of a text by whole lines, with the number of the first; what is no UTF-8 becomes visible garbage."""
    number, rest = 1, b""
    while True:
        piece = file.read(PIECE)
        whole = rest + piece
        cut = len(whole) if not piece else whole.rfind(b"\n") + 1
        if len(whole) - cut > LONGEST_LINE:
            raise ModakError("load.line_too_long", f"Line {number} has more than {LONGEST_LINE >> 20} MiB.")
        text, rest = whole[:cut], whole[cut:]
        # What is not needed any more would wait here for as long as the lines are worked on.
        del whole
        if text:
            lines = _cut(_sound(text))
            del text
            yield number, lines
            number += len(lines)
        if not piece:
            return


def _sound(text: bytes) -> bytes:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        text = text.decode("utf-8", "replace").encode()
    return text.replace(b"\x00", "\ufffd".encode())


def _cut(text: bytes) -> pa.Array:
    """The lines of a text, over its own bytes; each keeps its line break, which JSON takes for a blank."""
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
    if not len(ends) or ends[-1] != len(text):
        ends = np.append(ends, len(text))
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    return pa.StringArray.from_buffers(len(ends), pa.py_buffer(offsets), pa.py_buffer(text))


def _csv(path: Path, columns: Sequence[TextColumn]) -> Iterator[Texts]:
    from pyarrow import csv

    from modak.spark.csv_lines import Numbering

    try:
        header = _header(path)
        _refuse_strange(header, [column.name for column in columns])
        numbering = Numbering(header)
        reader = csv.open_csv(
            path,
            read_options=csv.ReadOptions(block_size=CSV_PIECE, use_threads=False),
            parse_options=csv.ParseOptions(newlines_in_values=True, invalid_row_handler=numbering.refuse),
            convert_options=csv.ConvertOptions(
                column_types={name: pa.string() for name in header},
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=[""],
            ),
        )
        for batch in reader:
            lines, faults = numbering.number(batch)
            yield Texts(_in_order(batch, columns), lines, faults)
        if rest := numbering.rest():
            yield Texts(_nothing(columns), pa.array([], pa.int64()), rest)
    except pa.ArrowInvalid as error:
        if "straddl" in str(error):
            raise ModakError(
                "load.line_too_long",
                f"A row of the CSV body has more than {CSV_PIECE >> 20} MiB.",
                hint="As JSON lines, Parquet or Arrow it may be longer.",
            ) from error
        raise _unreadable(error) from error


def _header(path: Path) -> list[str]:
    import csv

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(error) from error
    if not names or len(set(names)) != len(names):
        raise ModakError("load.columns", "The first line of a CSV body names each column once.")
    return names


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    try:
        # Else whole columns of a row group, or all of it, would be read at once.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield pa.RecordBatch.from_pylist([], schema=file.schema_arrow)
            for at in range(file.num_row_groups):
                group = file.metadata.row_group(at)
                rows = _rows_of(group.total_byte_size, group.num_rows)
                yield from file.iter_batches(rows, row_groups=[at], use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(error) from error


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        with path.open("rb") as file:
            # Mapped, because a batch is as large as its sender made it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        source = pa.BufferReader(pa.py_buffer(mapped))
        opened = pa.ipc.open_file(source) if mapped[:6] == b"ARROW1" else pa.ipc.open_stream(source)
        yield pa.RecordBatch.from_pylist([], schema=opened.schema)
        for batch in _ipc_batches(opened):
            step = _rows_of(batch.nbytes, len(batch))
            for start in range(0, len(batch), step):
                yield batch.slice(start, step)
                # Pages that were read go back; they come from the file again if they are asked for.
                mapped.madvise(mmap.MADV_DONTNEED)
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        raise _unreadable(error) from error


def _ipc_batches(opened: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(opened, pa.RecordBatchStreamReader):
        yield from opened
        return
    for at in range(opened.num_record_batches):
        yield opened.get_batch(at)


def _rows_of(size: int, rows: int) -> int:
    """How many rows make a piece, where so many have that size."""
    return max(1, min(BATCH_ROWS, PIECE * rows // max(size, 1)))


def _typed(batches: Iterator[pa.RecordBatch], columns: Sequence[TextColumn]) -> Iterator[Texts]:
    """Values that have types already, spelled as texts."""
    head = next(batches, None)
    if head is None:
        return
    names = head.schema.names
    if len(set(names)) != len(names):
        raise ModakError("load.columns", "Two columns of the body have one name.")
    _refuse_strange(names, [column.name for column in columns])
    wanted = [column for column in columns if column.name in names]
    kinds = [head.schema.field(column.name).type for column in wanted]
    parts = ", ".join(f"{_typed_text(column, kinds[at])} AS c{at}" for at, column in enumerate(wanted))
    at = 1
    with _duckdb() as duck:
        for batch in batches:
            step = _rows_of(batch.nbytes, len(batch))
            for piece in (batch.slice(start, step) for start in range(0, len(batch), step)):
                try:
                    piece.validate(full=True)
                    duck.register("rows", pa.Table.from_batches([piece]))
                    answer = _tabled(duck.execute(f"SELECT {parts} FROM rows"))  # noqa: S608
                    duck.unregister("rows")
                except (pa.ArrowException, ValueError) as error:
                    raise _unreadable(error) from error
                except Exception as error:
                    raise _unreadable(error) from error
                arrays = [answer.column(f"c{index}").combine_chunks() for index in range(len(wanted))]
                made = pa.RecordBatch.from_arrays(arrays, names=[column.name for column in wanted])
                yield Texts(_in_order(made, columns), pa.array(range(at, at + len(piece)), pa.int64()))
                at += len(piece)


def _typed_text(column: TextColumn, kind: pa.DataType) -> str:
    name = '"' + column.name.replace('"', '""') + '"'
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = r"""CASE WHEN x IS NULL THEN 'NULL'
            ELSE '"' || replace(replace(x::VARCHAR, '\', '\\'), '"', '\"') || '"' END"""
        return f"'{{' || array_to_string(list_transform({name}, x -> {element}), ',') || '}}'"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return f"'\\x' || lower(hex({name}))" if column.kind == "binary" else f"{name}::VARCHAR"
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return f"strftime({name} AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M:%S.%f') || '+00'"
    return f"{name}::VARCHAR"


def _in_order(batch: pa.RecordBatch, columns: Sequence[TextColumn]) -> pa.RecordBatch:
    """The wanted columns that the source has; its other columns were refused."""
    here = [column.name for column in columns if column.name in batch.schema.names]
    arrays = [_plain(batch.column(name)) for name in here]
    return pa.RecordBatch.from_arrays(arrays, names=here)


def _plain(array: pa.Array) -> pa.Array:
    return array.cast(pa.string()) if array.type != pa.string() else array


def _nothing(columns: Sequence[TextColumn]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], pa.string()) for _ in columns], names=[c.name for c in columns])


def _refuse_strange(names: Sequence[str], known: Sequence[str]) -> None:
    strange = [name for name in names if name not in known]
    if strange:
        raise ModakError(
            "load.columns",
            f"The table has no column {', '.join(map(repr, strange[:5]))}.",
            hint=f"Its columns are {', '.join(known)}.",
        )


def _tabled(answer: Any) -> pa.Table:
    found = answer.arrow()
    return found.read_all() if isinstance(found, pa.RecordBatchReader) else found


@contextlib.contextmanager
def _duckdb() -> Iterator[Any]:
    import duckdb

    settings: dict[str, Any] = {"memory_limit": f"{_MEMORY}B", "threads": 1, "enable_external_access": "false"}
    duck = duckdb.connect(":memory:", config=settings)
    try:
        duck.execute("SET TimeZone = 'UTC'")
        yield duck
    finally:
        duck.close()


def _unreadable(error: Exception) -> ModakError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return ModakError("load.unreadable", f"The rows cannot be read: {first[:300]}")


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
