"""Rewriting data files, as values: bins of files that become one file, and what came of them.

Maintenance plans bins, the plugin's kernel (`lake/iceberg/rewrite.py`) works on one at a time in the driver or in a
Spark task. Nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from modak.lake.model import DataFile, EqualityDeletes, LakeColumn, LakeFile, Layout, Vector


@dataclass(frozen=True, slots=True)
class Bin:
    """Files of one lake partition that are written anew together."""

    files: tuple[LakeFile, ...]

    @property
    def rows(self) -> int:
        """Rows to read, deleted ones included."""
        return sum(found.file.rows for found in self.files)

    @property
    def bytes(self) -> int:
        """Bytes to read."""
        return sum(found.file.bytes for found in self.files)

    @property
    def deletes(self) -> int:
        """Delete files that its data files carry."""
        return sum(found.deletes for found in self.files)

    @property
    def deleted_rows(self) -> int:
        """Rows that vectors hide."""
        return sum(found.deleted_rows for found in self.files)


@dataclass(frozen=True, slots=True)
class DeletedKeys:
    """Foreign equality deletes of one partition and one set of columns, gathered into Arrow files."""

    spec_id: int
    partition: tuple[object, ...]
    everywhere: bool
    """Deletes of an unpartitioned spec apply to all files."""
    columns: tuple[LakeColumn, ...]
    uris: tuple[str, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Gathering:
    """One task: the values that some equality delete files hold, as one Arrow file."""

    files: tuple[EqualityDeletes, ...]
    columns: tuple[LakeColumn, ...]
    uri: str


@dataclass(frozen=True, slots=True)
class Rewriting:
    """One task: some bins, and how their rows are to be written."""

    bins: tuple[Bin, ...]
    columns: tuple[LakeColumn, ...]
    layout: Layout
    spec_id: int
    tier_key: str
    folder: str
    task: str
    target_bytes: int
    cut: tuple[int, ...] = ()
    sort: tuple[str, ...] = ()
    zorder: tuple[str, ...] = ()
    deleted: tuple[DeletedKeys, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """One bin and the files that can take its place."""

    bin: Bin
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        """Rows that are left."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """Bytes written."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Replacement:
    """What a commit replaces: the bins that are still as they were read, with what was deleted in them since."""

    done: tuple[Rewritten, ...]
    overtaken: int
    """Bins whose files somebody else has replaced or changed in a way that cannot be carried over."""
    vectors: tuple[Vector, ...] = ()
    """Rows that were deleted after they had been read, by their new places."""
    removed_deletes: tuple[Vector | EqualityDeletes, ...] = ()
