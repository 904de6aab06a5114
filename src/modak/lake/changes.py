"""What a commit changes in a lake table, as values. The plugin turns a sequence of them into one prepared commit.

Ranges are half open, `lower <= column < upper`, in axis values; `None` leaves a side open. Files carry their own JSON,
so a change travels from a Spark task to the driver, into the journal or into a test without any Java.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modak.lake.model import DataFile, EqualityDeletes, Vector


@dataclass(frozen=True, slots=True)
class Range:
    """Rows whose column lies in `lower <= column < upper`."""

    column: str
    lower: int | None
    upper: int | None


@dataclass(frozen=True, slots=True)
class Append:
    """Add data files."""

    files: tuple[DataFile, ...]


@dataclass(frozen=True, slots=True)
class RowDelta:
    """Add rows and deletion vectors together; a replaced vector goes in the same step."""

    rows: tuple[DataFile, ...] = ()
    vectors: tuple[Vector, ...] = ()
    removed_vectors: tuple[Vector, ...] = ()
    validate_from: int | None = None
    """The snapshot in which rows were located; anything that touched those files since is a conflict."""
    data_files_exist: tuple[str, ...] = ()
    """Data files that must still be live; those of `vectors` are added by themselves."""
    no_new_rows_in: Range | None = None
    """Where nobody may have added rows since `validate_from`."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Replace data files by others with the same rows. The removed files' vectors go with them."""

    removed: tuple[DataFile, ...]
    added: tuple[DataFile, ...]
    validate_from: int
    data_sequence_number: int | None = None
    """The sequence number of `validate_from`; looked up when not given."""
    vectors: tuple[Vector, ...] = ()
    """Rows of the added files that were deleted after their originals had been read."""
    removed_deletes: tuple[Vector | EqualityDeletes, ...] = ()
    """Delete files that no data file needs after this. A removed file's own go by themselves, unless `vectors` come."""


@dataclass(frozen=True, slots=True)
class RewriteManifests:
    """Write the data manifests anew: partitions (Iceberg's own text of each) of one cluster share manifests."""

    clusters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """Remove the whole files of a range; a file that only partly lies in it is refused."""

    column: str
    lower: int | None
    upper: int | None


@dataclass(frozen=True, slots=True)
class Overwrite:
    """Replace everything in a range by these files, all of which must lie in it."""

    column: str
    lower: int | None
    upper: int | None
    files: tuple[DataFile, ...]
    validate_from: int | None = None
    """Rows that others added to or deleted from the range since then are a conflict."""


@dataclass(frozen=True, slots=True)
class AddColumn:
    """Add an optional column at the end; old rows show `initial_default` (JSON single value) or NULL."""

    name: str
    type: str
    initial_default: str | None = None


@dataclass(frozen=True, slots=True)
class RenameColumn:
    """Give a column another name; its id and data stay."""

    name: str
    new_name: str


@dataclass(frozen=True, slots=True)
class DropColumn:
    """Remove a column from the schema; files keep its data, nobody sees it."""

    name: str


@dataclass(frozen=True, slots=True)
class WidenColumn:
    """Change a column to a wider type: int to long, float to double, more digits."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class MakeOptional:
    """Allow NULL in a column."""

    name: str


@dataclass(frozen=True, slots=True)
class SetProperties:
    """Set and remove table properties."""

    values: Mapping[str, str] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CreateTag:
    """Name a snapshot, which keeps it through any expiry."""

    name: str
    snapshot_id: int


@dataclass(frozen=True, slots=True)
class RemoveTag:
    """Remove a tag."""

    name: str


@dataclass(frozen=True, slots=True)
class ExpireSnapshots:
    """Remove exactly these snapshots. Their files stay: `Prepared.expired_from` tells where to look for them."""

    ids: tuple[int, ...]


SnapshotChange = Append | RowDelta | Rewrite | RewriteManifests | DeleteRange | Overwrite
SchemaChange = AddColumn | RenameColumn | DropColumn | WidenColumn | MakeOptional
Change = SnapshotChange | SchemaChange | SetProperties | CreateTag | RemoveTag | ExpireSnapshots
