"""How the rows of a query leave the program: a grid, CSV, JSON lines, or a Parquet file.

Values become text in Spark, before they reach Python: there every moment and every decimal has one exact form. Rows are
taken partition by partition (a terminal sees a first few only), and a Parquet file is written by Spark's tasks and
joined row group by row group, so no answer is ever held as a whole.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from modak.cli.output import ReaderGone, note, number, on_terminal, table
from modak.core.errors import UsageError
from modak.tables.seam.texts import AS_JSON, texts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FORMATS = ("table", "csv", "json", "parquet")
TERMINAL_ROWS = 500
"""What a person at a terminal is shown at most."""
_WIDTHS_BY = 1_000
"""So many rows decide how wide the columns of a plain table are."""
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")
_QUOTED = frozenset(',"\r\n')


def deliver(frame: DataFrame, form: str, output: Path | None) -> None:
    """Bring the rows out in one of the formats, to a file or to stdout."""
    if form == "parquet":
        if output is None:
            raise UsageError("usage.output", "Parquet goes into a file.", hint="Add --output answer.parquet.")
        _parquet(frame, output)
        return
    with _opened(output) as stream:
        if form == "csv":
            _csv(frame, stream)
        elif form == "json":
            _json(frame, stream)
        else:
            _table(frame, stream)


def _csv(frame: DataFrame, stream: IO[str]) -> None:
    with _pipe():
        stream.write(_csv_line(frame.columns))
        for row in texts(frame).toLocalIterator():
            stream.write(_csv_line(row))


def _csv_line(row: Iterable[str | None]) -> str:
    """A line as COPY writes it, which tells a text without letters from NULL."""
    return ",".join("" if value is None else _csv_field(value) for value in row) + "\n"


def _csv_field(value: str) -> str:
    return '"' + value.replace('"', '""') + '"' if not value or _QUOTED & set(value) else value


def _json(frame: DataFrame, stream: IO[str]) -> None:
    from pyspark.sql import functions

    twice = {name for name in frame.columns if frame.columns.count(name) > 1}
    if twice:
        raise UsageError("sql.same_name", f"Two columns are called {min(twice)}.", hint="Give them names with AS.")
    whole = functions.struct(*(functions.col("`" + name.replace("`", "``") + "`") for name in frame.columns))
    lines = frame.select(functions.to_json(whole, {**AS_JSON, "ignoreNullFields": "false"}).alias("line"))
    with _pipe():
        for (line,) in lines.toLocalIterator():
            stream.write(f"{line}\n")


def _table(frame: DataFrame, stream: IO[str]) -> None:
    names = frame.columns
    right = frozenset(name for name, kind in frame.dtypes if kind.startswith(_NUMBERS) and names.count(name) == 1)
    if on_terminal(stream):
        found = texts(frame).limit(TERMINAL_ROWS + 1).collect()
        table(names, [_cells(row) for row in found[:TERMINAL_ROWS]], right=right)
        if len(found) > TERMINAL_ROWS:
            note(f"The first {number(TERMINAL_ROWS)} rows; --format csv or --output FILE gives all of them.")
        return
    rows = (_cells(row) for row in texts(frame).toLocalIterator())
    first = list(islice(rows, _WIDTHS_BY))
    widths = [max(len(cell) for cell in column) for column in zip(names, *first, strict=True)]
    aligned = [(width, name in right) for name, width in zip(names, widths, strict=True)]
    with _pipe():
        for line in chain([tuple(names)], first, rows):
            cells = (
                cell.rjust(width) if number_like else cell.ljust(width)
                for cell, (width, number_like) in zip(line, aligned, strict=True)
            )
            stream.write("  ".join(cells).rstrip() + "\n")


def _cells(row: Sequence[Any]) -> tuple[str, ...]:
    return tuple("NULL" if value is None else str(value).replace("\n", "\\n") for value in row)


def _parquet(frame: DataFrame, output: Path) -> None:
    import pyarrow.parquet as pq

    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        frame.write.mode("overwrite").parquet((folder / "parts").as_uri())
        parts = sorted((folder / "parts").glob("part-*.parquet"))
        if not parts:
            # Spark writes no file at all for an answer without rows in some plans.
            frame.limit(0).coalesce(1).write.mode("overwrite").parquet((folder / "parts").as_uri())
            parts = sorted((folder / "parts").glob("part-*.parquet"))
        joined = folder / "joined"
        with pq.ParquetWriter(joined, pq.read_schema(parts[0]), compression="zstd") as writer:
            for part in parts:
                with pq.ParquetFile(part) as file:
                    for group in range(file.num_row_groups):
                        writer.write_table(file.read_row_group(group))
        joined.replace(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    import sys

    if output is None:
        yield sys.stdout
        return
    with output.open("w", encoding="utf-8", newline="") as stream:
        yield stream


@contextmanager
def _pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error
