"""From attribute rows to columns: the pivot, done a whole attribute at a time. No I/O.

It finds each attribute row's place among the sorted keys and scatters the values there; lists are put in the order of
their numbers. A value that does not fit its type leaves NULL behind and its row among the unfit. Memory is that of the
tables handed in and of the columns that come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modak.entities.changelog import Unfit
from modak.entities.registry import Attribute, EntitySchema
from modak.entities.types import arrow_scalar, arrow_type, file_schema
from modak.entities.values import typed

if TYPE_CHECKING:
    import pyarrow as pa

EMPTY_LIST = "[]"
"""What stands in `array_indices` of the one row that says: this list is there, and has no items."""
_NUMBERED = r"^(0|[1-9][0-9]{0,8})$"


@dataclass(frozen=True)
class Rows:
    """Rows as files have them, sorted by id; those in `unfit` have NULL where a value does not fit."""

    table: pa.Table
    unfit: tuple[Unfit, ...]
    bad: Any
    """A numpy mask of the unfit rows, `None` where there is none."""

    def fit(self) -> pa.Table:
        """The rows whose every value fits."""
        import pyarrow as pa

        return self.table if self.bad is None else self.table.filter(pa.array(~self.bad))


def pivot(schema: EntitySchema, main: pa.Table, eav: pa.Table | None) -> Rows:
    """Bring attribute rows beside their keys; pure."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    count = main.num_rows
    gone = np.asarray(pc.not_equal(main.column("deleted_at"), 0))
    spread = _Spread(_ordinals(main.column("key"), eav.column("key")), eav, count) if eav is not None else None
    at_fault = np.full(count, -1, np.int64)
    columns: dict[str, pa.Array] = {}
    bound = {each.name: at for at, each in enumerate(bound_to_columns(schema))}
    for number, attribute in enumerate(schema.attributes):
        if attribute.name in bound:
            raw = _whole(main.column(f"b{bound[attribute.name]}"))
            values, unfit = typed(attribute, raw)
            bad = None if unfit is None else np.asarray(pc.fill_null(unfit, False))
        elif spread is None:
            values, bad = pa.nulls(count, arrow_type(attribute)), None
        else:
            values, bad = spread.lists(attribute) if attribute.is_list else spread.scalars(attribute)
        if bad is not None:
            at_fault[bad & (at_fault < 0)] = number
        columns[attribute.name] = values
    if gone.any():
        # A tombstone has no values, whatever its row still holds.
        at_fault[gone] = -1
        alive = pa.array(np.arange(count), mask=gone)
        columns = {name: values.take(alive) for name, values in columns.items()}
    fixed = {
        "schema_id": pa.array(np.full(count, schema.schema_id, np.int16)),
        "row_id": main.column("row_id"),
        "changed_at": main.column("changed_at"),
        "deleted_at": main.column("deleted_at"),
        "ltbase_created_at": main.column("created"),
        "ltbase_updated_at": main.column("updated"),
        "ltbase_deleted_at": main.column("deleted"),
    }
    named = {**fixed, **columns}
    wanted = file_schema(schema)
    table = pa.Table.from_arrays([named[field.name] for field in wanted], schema=wanted)
    bad_rows = at_fault >= 0
    if not bad_rows.any():
        return Rows(table, (), None)
    faulty = np.flatnonzero(bad_rows)
    ids = table.column("row_id").take(pa.array(faulty)).to_pylist()
    reasons = [
        f"a value of {schema.attributes[number].name!r} is not a {schema.attributes[number].type_name}"
        for number in at_fault[faulty]
    ]
    return Rows(table, tuple(map(Unfit, ids, reasons)), bad_rows)


def in_key_order(main: pa.Table) -> pa.Table:
    """The rows sorted by their keys."""
    import numpy as np
    import pyarrow as pa

    high, low = _halves_of(main.column("key"))
    if len(high) < 2 or bool((high[1:] > high[:-1]).all()):
        return main
    return main.take(pa.array(np.lexsort((low, high))))


class _Spread:
    """Attribute rows and where each belongs."""

    def __init__(self, ordinals: Any, eav: pa.Table, count: int) -> None:
        import numpy as np

        self._count = count
        self._texts = _whole(eav.column("value_text"))
        self._numbers = _whole(eav.column("value_numeric"))
        self._index = _whole(eav.column("at"))
        self._plain = self._index.null_count == len(self._index)
        self._ordinals = ordinals
        self._attributes = np.asarray(_whole(eav.column("attr_id")))
        self._known = ordinals >= 0

    def scalars(self, attribute: Attribute) -> tuple[pa.Array, Any]:
        """One value per key; an indexed one does not belong to a scalar."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        positions = self._positions(attribute.id)
        places = np.full(self._count, -1, np.int64)
        places[self._ordinals[positions]] = positions
        values, unfit = typed(attribute, self._taken(attribute, pa.array(places, mask=places < 0)))
        bad = None if unfit is None else np.asarray(pc.fill_null(unfit, False))
        if not self._plain:
            indexed = positions[np.asarray(pc.is_valid(self._index.take(pa.array(positions))))]
            if len(indexed):
                bad = np.zeros(self._count, bool) if bad is None else bad.copy()
                bad[self._ordinals[indexed]] = True
        return values, bad

    def lists(self, attribute: Attribute) -> tuple[pa.Array, Any]:
        """The items of each key in the order of their numbers; a value without one is a list of one."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        positions = self._positions(attribute.id)
        ordinals = self._ordinals[positions]
        index = self._index.take(pa.array(positions))
        marker = np.asarray(pc.fill_null(pc.equal(index, EMPTY_LIST), False))
        numbered = np.asarray(pc.fill_null(pc.match_substring_regex(index, _NUMBERED), False))
        legacy = np.asarray(pc.is_null(index))
        bad = np.zeros(self._count, bool)
        # Nested indices, leading zeroes and words; and a lone form that has company.
        bad[ordinals[~(marker | numbered | legacy)]] = True
        rows = np.bincount(ordinals, minlength=self._count)
        bad[ordinals[(marker | legacy) & (rows[ordinals] > 1)]] = True
        numbers = np.asarray(
            pc.fill_null(pc.if_else(pa.array(numbered), index, pa.scalar(None, pa.string())).cast(pa.int64()), -1)
        )
        kept = np.flatnonzero(~marker & ~bad[ordinals])
        order = kept[np.lexsort((numbers[kept], ordinals[kept]))]
        items, unfit = typed(attribute, self._taken(attribute, pa.array(positions[order])))
        if unfit is not None:
            bad[ordinals[order][np.asarray(pc.fill_null(unfit, False))]] = True
        counts = np.bincount(ordinals[order], minlength=self._count)
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        absent = pa.array((rows == 0) | bad)
        found = pa.ListArray.from_arrays(pa.array(offsets), items.cast(arrow_scalar(attribute)), mask=absent)
        return found.cast(arrow_type(attribute)), bad if bad.any() else None

    def _taken(self, attribute: Attribute, places: pa.Array) -> pa.Array:
        """The values at some places: texts for texts, else numbers, and texts only where there is no number."""
        import pyarrow.compute as pc

        if attribute.scalar in ("text", "uuid"):
            return self._texts.take(places)
        numbers = self._numbers.take(places)
        return numbers if numbers.null_count == places.null_count else pc.coalesce(numbers, self._texts.take(places))

    def _positions(self, attribute_id: int) -> Any:
        import numpy as np

        return np.flatnonzero((self._attributes == attribute_id) & self._known)


def _ordinals(keys: pa.ChunkedArray, wanted: pa.ChunkedArray) -> Any:
    """For each wanted key its place among the sorted keys, −1 where it is none of them."""
    import numpy as np

    known, asked = _halves_of(keys), _halves_of(wanted)
    if not len(asked[0]):
        return np.zeros(0, np.int64)
    # The rows of an entity were mostly written together, so they come in runs: each run is looked up once.
    begins = np.flatnonzero((asked[0][1:] != asked[0][:-1]) | (asked[1][1:] != asked[1][:-1])) + 1
    heads = np.concatenate(([0], begins))
    high, low = asked[0][heads], asked[1][heads]
    places = np.minimum(_search(known, (high, low)), len(known[0]) - 1)
    same = (known[0][places] == high) & (known[1][places] == low)
    return np.repeat(np.where(same, places, -1), np.diff(np.append(heads, len(asked[0]))))


def _search(known: tuple[Any, Any], asked: tuple[Any, Any]) -> Any:
    """Where keys stand among sorted ones; the first half decides alone unless ids were made in one moment."""
    import numpy as np

    if not (known[0][1:] == known[0][:-1]).any():
        return np.searchsorted(known[0], asked[0])
    pairs = []
    for high, low in (known, asked):
        pair = np.empty(len(high), np.dtype([("high", "u8"), ("low", "u8")]))
        pair["high"], pair["low"] = high, low
        pairs.append(pair)
    return np.searchsorted(pairs[0], pairs[1])


def _halves_of(keys: pa.ChunkedArray) -> tuple[Any, Any]:
    """128-bit keys as two columns of unsigned numbers, in an order-preserving form."""
    import numpy as np

    column = _whole(keys)
    if not len(column):
        return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    _, offsets, data = column.buffers()
    start = int(np.frombuffer(offsets, np.int32)[column.offset])
    pairs = np.frombuffer(data, np.uint8)[start : start + 16 * len(column)].view(">u8").reshape(-1, 2)
    return pairs[:, 0].astype(np.uint64), pairs[:, 1].astype(np.uint64)


def bound_to_columns(schema: EntitySchema) -> list[Attribute]:
    """The attributes that live in columns of `entity_main`, in the order in which they are read."""
    return [each for each in schema.attributes if each.column is not None]


def _whole(column: pa.ChunkedArray) -> Any:
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    return array.storage if isinstance(array, pa.ExtensionArray) else array
