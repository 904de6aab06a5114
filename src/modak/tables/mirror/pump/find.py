"""Where in the lake the rows of changed keys lie: file and position, by key columns only.

A key whose old row is known names its tier key too, so that only files which can hold it are looked into; others are
looked for everywhere. Key columns come from a cache on the local disk (`lake/iceberg/keycache.py`), a flush reads the
lake only for files it has not met. Few lake rows are looked through here, many in Spark tasks. Memory: the keys of one
part and one batch of a file; in the end one bitmap per file in which something was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap64

from modak.core.axis import TierKey
from modak.lake.iceberg.scan import sorted_positions
from modak.lake.iceberg.vectors import read_vector
from modak.lake.match import KeySet, is_cheap
from modak.lake.model import DataFile, LakeColumn, LakeFile
from modak.tables.mirror.pump.fold import encode

if TYPE_CHECKING:
    from modak.lake.iceberg.keycache import KeyCache

Places = npt.NDArray[np.int64]

TASK_ROWS = 4_000_000
"""Lake rows that the driver looks through by itself when the cache lacks their keys; more are worth a Spark job."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Keys to look for. `tiers` are axis values, `placed` says for which keys they are known."""

    columns: tuple[pa.Array, ...]
    tiers: Places
    placed: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tiers)

    def possible(self, lower: TierKey | None, upper: TierKey | None) -> npt.NDArray[np.bool_]:
        """Which keys a file of these bounds can hold."""
        inside = np.ones(len(self), bool)
        if lower is not None:
            inside &= self.tiers >= lower
        if upper is not None:
            inside &= self.tiers <= upper
        return inside | ~self.placed


@dataclass(frozen=True, slots=True)
class Hit:
    """Rows of one file that carry wanted keys, without those that are deleted; `keys` says which key each has."""

    path: str
    positions: Places
    keys: Places


@dataclass(frozen=True, slots=True)
class Look:
    """One task: look for keys in these files."""

    files: tuple[LakeFile, ...]
    columns: tuple[LakeColumn, ...]
    wanted: Wanted


def candidates(files: Iterable[LakeFile], wanted: Wanted) -> list[LakeFile]:
    """The files that can hold one of the keys."""
    if not len(wanted):
        return []
    if not np.all(wanted.placed):
        return list(files)
    tiers = np.sort(wanted.tiers)
    found = []
    for each in files:
        low = 0 if each.lower is None else int(np.searchsorted(tiers, each.lower, "left"))
        high = len(tiers) if each.upper is None else int(np.searchsorted(tiers, each.upper, "right"))
        if low < high:
            found.append(each)
    return found


def look(task: Look, cache: KeyCache | None = None) -> list[Hit]:
    """Look for the keys; with a cache in the driver, without one inside a Spark task."""
    wanted = task.wanted
    whole = KeySet(wanted.columns) if is_cheap(wanted.columns) else None
    hits = []
    for each in task.files:
        inside = wanted.possible(each.lower, each.upper)
        if not inside.any():
            continue
        keys = whole or KeySet([column.filter(pa.array(inside)) for column in wanted.columns])
        hit = _in_file(each, task.columns, keys, wanted, cache)
        if hit is not None:
            hits.append(hit)
    return hits


def _in_file(
    found: LakeFile, columns: Sequence[LakeColumn], keys: KeySet, wanted: Wanted, cache: KeyCache | None
) -> Hit | None:
    from modak.lake.iceberg.keycache import scanned_keys

    positions, held = [], []
    for start, batch in cache.batches(found, columns) if cache else scanned_keys(found, columns):
        rows = keys.find(batch.columns)
        if len(rows):
            positions.append(rows.astype(np.int64) + start)
            held.append([column.take(pa.array(rows)) for column in batch.columns])
    if not positions:
        return None
    places = np.concatenate(positions)
    columns_of = [pa.concat_arrays([part[at] for part in held]) for at in range(len(columns))]
    deleted = BitMap64()
    for vector in found.vectors:
        deleted |= read_vector(vector)
    gone = sorted_positions(deleted)
    if gone is not None:
        kept = ~np.isin(places, gone)
        if not kept.any():
            return None
        places = places[kept]
        columns_of = [column.filter(pa.array(kept)) for column in columns_of]
    return Hit(found.file.path, places, _which(wanted, columns_of))


def _which(wanted: Wanted, columns: Sequence[pa.Array]) -> Places:
    """Which wanted key each row has."""
    size = len(wanted)
    both = [
        pa.concat_arrays([_plain(key), _plain(column)]) for key, column in zip(wanted.columns, columns, strict=True)
    ]
    codes, count = encode(both)
    at = np.full(count, -1, np.int64)
    at[codes[:size]] = np.arange(size)
    return at[codes[size:]]


def _plain(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


@dataclass(slots=True)
class Listing:
    """The live files of the lake table at one snapshot, kept up to date by our own commits."""

    snapshot_id: int | None = None
    files: dict[str, LakeFile] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    """Files whose keys the cache should have by now."""

    def at(self, snapshot_id: int | None, read: Callable[[int], Iterable[LakeFile]]) -> Sequence[LakeFile]:
        """The files of a snapshot; read only when it is not the one that we made ourselves."""
        if snapshot_id is None:
            self.snapshot_id, self.files = None, {}
        elif snapshot_id != self.snapshot_id:
            self.files = {found.file.path: found for found in read(snapshot_id)}
            self.snapshot_id = snapshot_id
            self.met &= self.files.keys()
        return tuple(self.files.values())


def with_bounds(file: DataFile, tier_field: int | None) -> LakeFile:
    """A file that we have just written, as a scan would see it."""
    described = json.loads(file.json)
    return LakeFile(
        file, _bound(described.get("lower-bounds"), tier_field), _bound(described.get("upper-bounds"), tier_field)
    )


def _bound(bounds: dict[str, list[object]] | None, tier_field: int | None) -> TierKey | None:
    if bounds is None or tier_field not in bounds["keys"]:
        return None
    text = str(bounds["values"][bounds["keys"].index(tier_field)])
    return int.from_bytes(bytes.fromhex(text), "little", signed=True)
