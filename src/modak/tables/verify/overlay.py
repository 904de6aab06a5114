"""The delta's part in a comparison: keys that hide lake rows, and upserts that stand in their place.

Runs inside tasks, on `modak.delta` as the verification's snapshot and pin see it. Keys come back from their text into
the lake's types, so that they hash like the keys of files. A row that cannot be read is named and left out, and does
not end the verification. Memory is bounded by one batch, and for hidden keys by sixteen bytes per delta row in range.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modak.core.axis import TierKey
from modak.core.errors import ModakError
from modak.lake.decode import arrow_schema, arrow_type
from modak.lake.model import LakeColumn
from modak.lake.parse import parse_text
from modak.postgres.arrow import stream
from modak.postgres.dsn import Dsn
from modak.tables.verify.fingerprint import Prints, prints
from modak.tables.verify.report import Finding
from modak.tables.verify.shape import Shape, has_column, payload_texts

_MARK = "\x01"
_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class DeltaRange:
    """The delta rows of a stretch of the axis that a reader at the verification's point sees."""

    dsn: Dsn
    snapshot: str
    table_id: int
    generation: int
    lower: TierKey | None
    upper: TierKey

    def condition(self) -> str:
        """The WHERE condition; every part is a number."""
        lower = "" if self.lower is None else f" AND tier_key >= {self.lower:d}"
        return (
            f"table_id = {self.table_id:d}{lower} AND tier_key < {self.upper:d}"
            f" AND (folded_generation IS NULL OR folded_generation > {self.generation:d})"
        )


@dataclass(frozen=True, slots=True)
class Hidden:
    """The keys that the delta knows, by their hashes in order."""

    keys: Prints

    def hides(self, keys: Prints) -> Any:
        """Which rows of a batch the delta replaces or removes."""
        if not len(self.keys.first):
            return np.zeros(len(keys.first), bool)
        at = np.minimum(np.searchsorted(self.keys.first, keys.first), len(self.keys.first) - 1)
        return (self.keys.first[at] == keys.first) & (self.keys.second[at] == keys.second)


def hidden(source: DeltaRange, shape: Shape) -> Hidden:
    """The keys of all delta rows of a range, tombstones too."""
    query = f"SELECT pk, tier_key FROM modak.delta WHERE {source.condition()}"  # noqa: S608
    found = []
    for batch in stream(source.dsn, query, snapshot=source.snapshot):
        if len(batch):
            keys, _, _ = _readable(batch, lambda part: key_arrays(shape, part.column(0), part.column(1)))
            found.append(prints(keys))
    first = np.concatenate([one.first for one in found]) if found else np.zeros(0, np.uint64)
    second = np.concatenate([one.second for one in found]) if found else np.zeros(0, np.uint64)
    order = np.argsort(first)
    return Hidden(Prints(first[order], second[order]))


def upserts(source: DeltaRange, shape: Shape, findings: list[Finding]) -> Iterator[pa.RecordBatch]:
    """The rows that the delta puts into a range, in the lake's schema; what is wrong with one goes to `findings`."""
    texts = payload_texts(shape)
    flags = {
        at: has_column(one.column.name, shape.renames)
        for at, one in enumerate(shape.mapped)
        if shape.columns[at].initial_default is not None
    }
    chosen = ["pk", "tier_key", "op", *texts, *flags.values()]
    named = ", ".join(f"{expression} AS c{at}" for at, expression in enumerate(chosen))
    query = f"SELECT {named} FROM modak.delta WHERE {source.condition()}"  # noqa: S608
    places = {at: 3 + len(texts) + n for n, at in enumerate(flags)}

    def read(part: pa.RecordBatch) -> list[pa.Array]:
        own = key_arrays(shape, part.column(0), part.column(1))
        images = _images(part, shape, places)
        return [*images, *own]

    schema = arrow_schema(shape.columns)
    for batch in stream(source.dsn, query, snapshot=source.snapshot):
        kept = batch.filter(pc.equal(batch.column(2), 1))
        tombs = batch.filter(pc.equal(batch.column(2), 2))
        _, _, bad = _readable(tombs, lambda part: key_arrays(shape, part.column(0), part.column(1)))
        arrays, good, worse = _readable(kept, read)
        findings += [*bad, *worse]
        if not len(good):
            continue
        images, own = arrays[: len(shape.columns)], arrays[len(shape.columns) :]
        same = prints([images[at] for at in shape.keys]).first == prints(own).first
        for row in np.flatnonzero(~same)[:10]:
            what = f"The delta row of key {_shown(good, int(row))} holds the image of another key."
            findings.append(Finding("delta.other_key", what))
        yield pa.RecordBatch.from_arrays(images, schema=schema)


def key_arrays(shape: Shape, pk: pa.Array, tier: pa.Array) -> list[pa.Array]:
    """The columns of a row's identity in the lake's types, from the delta's key text and tier key."""
    parts = split_keys(pk, len(shape.pk))
    arrays = [_typed(shape, at, texts) for at, texts in zip(shape.pk, parts, strict=True)]
    if shape.tier not in shape.pk:
        arrays.append(_on_column(tier, arrow_type(shape.tier_column.type)))
    return arrays


def split_keys(keys: pa.Array, columns: int) -> list[pa.Array]:
    """Key texts (see `catalog/pk.py`) as one column of texts for each key column."""
    if columns == 1:
        return [keys]
    escaped = pc.any(pc.match_substring(keys, "\\")).as_py()
    if escaped:
        # Escapes become sequences without a separator in them, made of a mark that has itself been spelled out before.
        for plain, spelled in ((_MARK, _MARK + "m"), ("\\\\", _MARK + "b"), ("\\" + _SEPARATOR, _MARK + "s")):
            keys = pc.replace_substring(keys, plain, spelled)
    lists = pc.split_pattern(keys, _SEPARATOR)
    if pc.any(pc.not_equal(pc.list_value_length(lists), columns)).as_py():
        raise ModakError("types.malformed", f"A key text does not have {columns} parts.")
    parts = [pc.list_element(lists, at) for at in range(columns)]
    if escaped:
        for plain, spelled in (("\\", _MARK + "b"), (_SEPARATOR, _MARK + "s"), (_MARK, _MARK + "m")):
            parts = [pc.replace_substring(part, spelled, plain) for part in parts]
    return parts


def _images(part: pa.RecordBatch, shape: Shape, flags: dict[int, int]) -> list[pa.Array]:
    arrays = []
    for at in range(len(shape.columns)):
        values = _typed(shape, at, part.column(3 + at))
        if at in flags:
            there = part.column(flags[at])
            values = _chosen(there, values, _initial_values(shape, at, len(values)))
        arrays.append(values)
    return arrays


def _chosen(there: pa.Array, values: pa.Array, others: pa.Array) -> pa.Array:
    if not isinstance(values, pa.ExtensionArray):
        return pc.if_else(there, values, others)
    return pa.ExtensionArray.from_storage(values.type, pc.if_else(there, values.storage, others.storage))


def _initial_values(shape: Shape, at: int, size: int) -> pa.Array:
    """What a delta row from before the column shows: its initial default, or NULL."""
    return _typed(shape, at, pa.repeat(pa.scalar(_default_text(shape.columns[at]), pa.string()), size))


def _default_text(column: LakeColumn) -> str | None:
    """Iceberg's JSON of a default as Postgres text, the form that parse_text reads."""
    if column.initial_default is None:
        return None
    value = json.loads(column.initial_default)
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value if isinstance(value, str) else str(value)
    return f"\\x{text}" if column.type == "binary" else text


def _typed(shape: Shape, at: int, texts: pa.Array) -> pa.Array:
    array = parse_text(shape.mapped[at], texts)
    wanted = arrow_schema([shape.columns[at]]).field(0).type
    if array.type == wanted:
        return array
    if pa.types.is_list(wanted):
        # Only the ids of the elements differ.
        return pa.Array.from_buffers(
            wanted, len(array), array.buffers()[:2], array.null_count, array.offset, children=[array.values]
        )
    return array.cast(wanted)


def _on_column(axis: pa.Array, kind: pa.DataType) -> pa.Array:
    """Axis values as values of the tier-key column."""
    if pa.types.is_date32(kind):
        return axis.cast(pa.int32()).cast(kind)
    return axis.cast(kind)


def _readable(
    batch: pa.RecordBatch, read: Callable[[pa.RecordBatch], list[pa.Array]]
) -> tuple[list[pa.Array], pa.RecordBatch, list[Finding]]:
    """What can be read of a batch, the rows that it stands for, and the others by name (halving until one is found)."""
    try:
        return read(batch), batch, []
    except ModakError as error:
        if len(batch) <= 1:
            what = f"The delta row of key {_shown(batch, 0)} cannot be read: {error.message}"
            return read(batch.slice(0, 0)), batch.slice(0, 0), [Finding("delta.unreadable", what)]
    middle = len(batch) // 2
    left, right = _readable(batch.slice(0, middle), read), _readable(batch.slice(middle), read)
    arrays = [pa.concat_arrays(pair) for pair in zip(left[0], right[0], strict=True)]
    rows = pa.Table.from_batches([left[1], right[1]]).combine_chunks()
    good = rows.to_batches()[0] if len(rows) else batch.slice(0, 0)
    return arrays, good, [*left[2], *right[2]]


def _shown(batch: pa.RecordBatch, row: int) -> str:
    key, tier = batch.column(0)[row].as_py(), batch.column(1)[row].as_py()
    return f"{key.replace(_SEPARATOR, ', ')} (tier key {tier})"
