"""Key columns of data files, kept as Arrow on the local disk: who looks up keys again and again reads the lake once.

Data files never change, so an entry is right for as long as it lives; it is made when a file is first looked into, and
the entries that were used least lately go when all together pass a limit. Entries are mapped into memory, not read.
Memory: one batch while an entry is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from modak.core.faults import reach
from modak.lake.iceberg.scan import POSITION, scan_file, scan_schema
from modak.lake.model import LakeColumn, LakeFile

LIMIT_BYTES = 2 << 30
_SCAN_ROWS = 1_048_576


class KeyCache:
    """The key columns of recent files of one table. Not for several threads at once."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._sizes: dict[str, int] | None = None

    def batches(self, found: LakeFile, columns: Sequence[LakeColumn]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The key columns of all rows of a file, deleted or not, each batch with the position of its first row."""
        path = self._folder / f"{_name(found.file.path, columns)}.arrow"
        table = self._known(path)
        if table is None:
            try:
                table = self._made(path, found, columns)
            except OSError:
                # A full or missing disk: the lake itself will do.
                table = None
        if table is None:
            yield from scanned_keys(found, columns)
            return
        start = 0
        for batch in table.to_batches():
            yield start, batch
            start += len(batch)

    def _known(self, path: Path) -> pa.Table | None:
        sizes = self._listed()
        if path.name not in sizes:
            return None
        # Used just now: the last to go.
        sizes[path.name] = sizes.pop(path.name)
        try:
            return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowInvalid):
            sizes.pop(path.name, None)
            return None

    def _made(self, path: Path, found: LakeFile, columns: Sequence[LakeColumn]) -> pa.Table:
        sizes = self._listed()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        reach("keycache.writing")
        with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, scan_schema(columns)) as file:
            for _, batch in scanned_keys(found, columns):
                file.write_batch(batch)
        part.replace(path)
        reach("keycache.written")
        sizes[path.name] = path.stat().st_size
        while sum(sizes.values()) > self._limit and len(sizes) > 1:
            oldest = next(iter(sizes))
            sizes.pop(oldest)
            with contextlib.suppress(OSError):
                (self._folder / oldest).unlink()
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()

    def _listed(self) -> dict[str, int]:
        if self._sizes is None:
            entries = []
            if self._folder.is_dir():
                for entry in os.scandir(self._folder):
                    if entry.name.endswith(".part"):
                        with contextlib.suppress(OSError):
                            os.unlink(entry.path)
                    else:
                        about = entry.stat()
                        entries.append((about.st_mtime, entry.name, about.st_size))
            self._sizes = {name: size for _, name, size in sorted(entries)}
        return self._sizes


def scanned_keys(found: LakeFile, columns: Sequence[LakeColumn]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The key columns of all rows of a file, out of the lake."""
    for batch in scan_file(found.file.path, columns, with_positions=True, batch_rows=_SCAN_ROWS):
        keys = batch.select([column.name for column in columns])
        yield (batch.column(POSITION)[0].as_py() if len(batch) else 0), keys


def _name(path: str, columns: Sequence[LakeColumn]) -> str:
    about = "\n".join([path, *(f"{column.field_id} {column.type}" for column in columns)])
    return hashlib.sha256(about.encode()).hexdigest()[:40]
