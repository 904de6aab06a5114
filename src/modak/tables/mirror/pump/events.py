"""What happened to keys: the changes of a piece as a table of events, one row each, whole columns at a time.

An event says of one key whether it carries a new image (`put`), whether the key was free before it (`fresh`), by how
many rows it changes the key (`net`: an insert one more, a delete one less, an update none) and where the row was before
(`tier`). An update of the key itself is two events. Image columns are named by attribute number and have the lake's
types. Memory: the arrays of one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modak.core.errors import Refused
from modak.lake.decode import arrow_type, decimals
from modak.lake.types import MappedColumn
from modak.postgres.changes.batch import Changes, Image, Old, Op
from modak.tables.mirror.pump.definition import Definition

PUT, FRESH, NET, ENDS, LOOSE, TIER = "put", "fresh", "net", "ends", "loose", "tier"


@dataclass(frozen=True, slots=True)
class Shape:
    """How the changes of one definition become events: its columns' numbers, their lake types, and which are keys."""

    definition: Definition
    mapped: tuple[MappedColumn, ...]
    identity: tuple[int, ...]
    tier: int

    def place(self, number: int) -> int:
        """Where the column of an attribute number stands in the change."""
        return self.definition.numbers.index(number)


def key_name(at: int) -> str:
    """The column of the at-th identity column."""
    return f"k{at}"


def root_name(at: int) -> str:
    """The column that says under which key an unknown value is found, at-th identity column."""
    return f"r{at}"


def image_name(number: int) -> str:
    """The column of an attribute."""
    return f"c{number}"


def unknown_name(number: int) -> str:
    """The column that marks values of an attribute which Postgres did not send."""
    return f"u{number}"


def events_of(changes: Changes, shape: Shape, heal_until: int, first: int) -> tuple[pa.Table, int]:
    """The events of changes, in their order; and how many of them come from the `first` so many changes.

    Those that committed before `heal_until` are `loose`: the lake may already hold what they bring, or a later state.
    """
    header = changes.header
    op = np.asarray(header["op"])
    deletes = op == Op.DELETE
    with_old = np.asarray(header["old"]) != Old.NOTHING
    if np.any(deletes & ~with_old):
        raise _no_identity(changes)
    keys_new = [_side(changes.new, shape, number) for number in shape.identity]
    keys_old = [_side(changes.old, shape, number) for number in shape.identity]
    if np.any(with_old | (op == Op.UPDATE)):
        _require_keys(changes, shape, keys_old, with_old)
    moved = _moved(keys_new, keys_old, with_old & (op == Op.UPDATE))
    keys = [_chosen(deletes, old, new) for old, new in zip(keys_old, keys_new, strict=True)]
    columns: dict[str, pa.Array] = {key_name(at): key for at, key in enumerate(keys)}
    columns |= _flags(changes, deletes, moved | (op == Op.INSERT), moved, heal_until)
    columns[TIER] = _old_tier(changes, shape, with_old, moved)
    columns |= _images(changes, shape)
    if any(name.startswith("u") for name in columns):
        for at, (key, old) in enumerate(zip(keys, keys_old, strict=True)):
            columns[root_name(at)] = _chosen(moved, old, key)
    table = pa.table(columns)
    if not np.any(moved):
        return table, first
    whole = _with_removals(table, keys_old, moved, _tiers_before(changes, shape))
    return whole, first + int(np.count_nonzero(moved[:first]))


def lake_values(array: pa.Array, mapped: MappedColumn) -> pa.Array:
    """The values of a stream column in the type of the lake column."""
    return _as(array, arrow_type(mapped.column.type), mapped)


def _as(array: pa.Array, target: pa.DataType, mapped: MappedColumn) -> pa.Array:
    if array.type == target:
        return array
    if pa.types.is_list(target):
        elements = _as(array.values, target.value_type, mapped)
        return pa.Array.from_buffers(
            target, len(array), array.buffers()[:2], array.null_count, array.offset, children=[elements]
        )
    if pa.types.is_decimal(target) and pa.types.is_string(array.type):
        return decimals(array, target, mapped.column.name, checked=mapped.decode.endswith("checked_decimal"))
    return array.cast(target)


def _side(image: Image | None, shape: Shape, number: int) -> pa.Array | None:
    if image is None:
        return None
    at = shape.place(number)
    return lake_values(image.column(at), shape.mapped[at])


def _moved(new: Sequence[pa.Array | None], old: Sequence[pa.Array | None], both: np.ndarray) -> np.ndarray:
    """Which updates changed the key."""
    moved = np.zeros(len(both), bool)
    if np.any(both):
        for one, other in zip(new, old, strict=True):
            same = pc.equal(_plain(one), _plain(other)).fill_null(True)
            moved |= both & ~np.asarray(same.cast(pa.uint8()), bool)
    return moved


def _plain(array: pa.Array | None) -> pa.Array:
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _chosen(first: np.ndarray, these: pa.Array | None, others: pa.Array | None) -> pa.Array:
    """`these` where `first` says so, else `others`; one of them may not exist when nobody needs it."""
    if these is None or not np.any(first):
        return others if others is not None else these
    if others is None or np.all(first):
        return these
    # Not if_else, which knows no extension types.
    take = np.arange(len(these)) + np.where(first, 0, len(these))
    return pa.concat_arrays([these, others]).take(pa.array(take))


def _flags(
    changes: Changes, deletes: np.ndarray, fresh: np.ndarray, moved: np.ndarray, heal_until: int
) -> dict[str, pa.Array]:
    net = np.where(deletes, -1, np.where(fresh | moved, 1, 0)).astype(np.int32)
    loose = np.asarray(changes.header["commit_lsn"]) < np.uint64(heal_until)
    put = pa.array(~deletes)
    return {PUT: put, FRESH: pa.array(fresh), NET: pa.array(net), ENDS: put, LOOSE: pa.array(loose)}


def _tiers_before(changes: Changes, shape: Shape) -> pa.Array:
    """The tier keys of whole old rows as axis values; a key alone does not tell it unless it is part of the key."""
    at = shape.place(shape.tier)
    if changes.old is None:
        return pa.nulls(len(changes), pa.int64())
    values = axis_values(lake_values(changes.old.column(at), shape.mapped[at]))
    if changes.relation.columns[at].key:
        return values
    whole = pc.equal(changes.header["old"], pa.scalar(Old.FULL, pa.uint8()))
    return pc.if_else(whole, values, pa.scalar(None, pa.int64()))


def _old_tier(changes: Changes, shape: Shape, with_old: np.ndarray, moved: np.ndarray) -> pa.Array:
    """Where the row of the event's own key was; a row that came under a new key was not there before."""
    before = _tiers_before(changes, shape)
    if shape.tier in shape.identity and changes.new is not None:
        # Part of the key, so an update that kept the key kept it too, and needs no old row to tell.
        at = shape.place(shape.tier)
        before = pc.coalesce(before, axis_values(lake_values(changes.new.column(at), shape.mapped[at])))
    if not np.any(moved):
        return before
    return pc.if_else(pa.array(moved), pa.scalar(None, pa.int64()), before)


def axis_values(column: pa.Array) -> pa.Array:
    """Tier keys as axis values."""
    plain = column.cast(pa.int32()) if pa.types.is_date32(column.type) else column
    return plain.cast(pa.int64())


def _images(changes: Changes, shape: Shape) -> dict[str, pa.Array]:
    found: dict[str, pa.Array] = {}
    for at, number in enumerate(shape.definition.numbers):
        mapped = shape.mapped[at]
        if changes.new is None:
            found[image_name(number)] = pa.nulls(len(changes), arrow_type(mapped.column.type))
            continue
        values, unknown = changes.completed(at)
        found[image_name(number)] = lake_values(values, mapped)
        if unknown is not None and pc.any(unknown).as_py():
            found[unknown_name(number)] = unknown
    return found


def _with_removals(
    table: pa.Table, keys_old: Sequence[pa.Array | None], moved: np.ndarray, tiers: pa.Array
) -> pa.Table:
    """The events with one more before each change of a key: the old key loses its row."""
    rows = pa.array(np.flatnonzero(moved))
    size = len(rows)
    gone: Mapping[str, pa.Array] = {
        PUT: pa.array(np.zeros(size, bool)),
        FRESH: pa.array(np.zeros(size, bool)),
        NET: pa.array(np.full(size, -1, np.int32)),
        ENDS: pa.array(np.zeros(size, bool)),
        LOOSE: table[LOOSE].take(rows),
        TIER: tiers.take(rows),
        **{key_name(at): key.take(rows) for at, key in enumerate(keys_old) if key is not None},
        **{root_name(at): key.take(rows) for at, key in enumerate(keys_old) if key is not None},
    }
    columns = [
        gone[field.name]
        if field.name in gone
        else pa.array(np.zeros(size, bool))
        if field.name.startswith("u")
        else pa.nulls(size, field.type)
        for field in table.schema
    ]
    both = pa.concat_tables([pa.Table.from_arrays(columns, schema=table.schema), table])
    order = np.argsort(np.concatenate([2 * np.flatnonzero(moved), 2 * np.arange(len(table)) + 1]), kind="stable")
    return both.take(pa.array(order)).combine_chunks()


def _require_keys(changes: Changes, shape: Shape, keys_old: Sequence[pa.Array | None], with_old: np.ndarray) -> None:
    """Under the replica identity of another index a row that changes its key leaves no trace of the old one."""
    columns = changes.relation.columns
    by_key = all(columns[shape.place(number)].key for number in shape.identity)
    wrote = pa.array(with_old)
    # A partition may have such an identity under a root that has not.
    half = any(key is not None and pc.any(pc.and_(wrote, _plain(key).is_null())).as_py() for key in keys_old)
    if half or not by_key:
        raise _no_identity(changes)


def _no_identity(changes: Changes) -> Refused:
    return Refused(
        "mirror.no_identity",
        f"A row of {changes.relation.name} changed while its replica identity did not hold its key: nobody can tell"
        " which.",
        hint="The table is compared with the lake anew; leave its REPLICA IDENTITY as it is.",
    )
