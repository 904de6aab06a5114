"""From attribute rows to columns: the pivot, done a whole attribute at a time. No I/O.

Each batch is put in the order of its attributes, so that an attribute's values lie together; these take their type and
only then go to the places of their keys. Lists are put in the order of their numbers. A value that does not fit its
type leaves NULL behind and its row among the unfit. Memory is that of the rows handed in and of the columns that come
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
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


def pivot(schema: EntitySchema, main: pa.Table, eav: Sequence[Iterable[pa.RecordBatch]]) -> Rows:
    """Bring attribute rows beside their sorted keys, in as many threads as there are streams of them."""
    import numpy as np
    import pyarrow as pa

    count = main.num_rows
    keys = _Keys(*_halves_of(_whole(main.column("key"))))
    bound = {each.name: at for at, each in enumerate(bound_to_columns(schema))}
    with ThreadPoolExecutor(max(len(eav), 1)) as pool:
        spread = _Spread(count, list(pool.map(lambda batches: _pieces(keys, batches), eav)))

        def column(attribute: Attribute) -> tuple[pa.Array, Any]:
            if attribute.name in bound:
                return _bound(attribute, _whole(main.column(f"b{bound[attribute.name]}")))
            return spread.lists(attribute) if attribute.is_list else spread.scalars(attribute)

        made = list(pool.map(column, schema.attributes))
    at_fault = np.full(count, -1, np.int64)
    for number, (_, bad) in enumerate(made):
        if bad is not None:
            at_fault[bad & (at_fault < 0)] = number
    columns = {each.name: values for each, (values, _) in zip(schema.attributes, made, strict=True)}
    fixed = _fixed(schema, main, row_ids((keys.high, keys.low)))
    gone = np.asarray(fixed["deleted_at"]) != 0
    if gone.any():
        # A tombstone has no values, whatever its row still holds.
        at_fault[gone] = -1
        alive = pa.array(np.arange(count), mask=gone)
        columns = {name: values.take(alive) for name, values in columns.items()}
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


def _fixed(schema: EntitySchema, main: pa.Table, ids: pa.Array) -> dict[str, Any]:
    """The columns that every file begins with; live rows come without those that only deleted ones need."""
    import numpy as np
    import pyarrow as pa

    count = main.num_rows
    known = set(main.schema.names)
    updated = main.column("updated")
    return {
        "schema_id": pa.array(np.full(count, schema.schema_id, np.int16)),
        "row_id": ids,
        "changed_at": main.column("changed_at") if "changed_at" in known else updated,
        "deleted_at": main.column("deleted_at") if "deleted_at" in known else pa.array(np.zeros(count, np.int64)),
        "ltbase_created_at": main.column("created"),
        "ltbase_updated_at": updated,
        "ltbase_deleted_at": main.column("deleted") if "deleted" in known else pa.nulls(count, pa.int64()),
    }


def in_key_order(main: pa.Table) -> pa.Table:
    """The rows sorted by their keys."""
    import numpy as np
    import pyarrow as pa

    high, low = _halves_of(_whole(main.column("key")))
    if len(high) < 2 or bool((high[1:] > high[:-1]).all()):
        return main
    order = np.argsort(high)
    if _repeats(high[order]):
        order = np.lexsort((low, high))
    return main.take(pa.array(order))


def row_ids(keys: tuple[Any, Any]) -> pa.Array:
    """Keys as the texts of UUIDs."""
    import numpy as np
    import pyarrow as pa

    count = len(keys[0])
    octets = np.stack(keys, axis=1).astype(">u8").view(np.uint8)
    texts = np.full((count, 36), ord("-"), np.uint8)
    digits = np.frombuffer(b"".join(b"%02x" % octet for octet in range(256)), np.uint16)[octets].view(np.uint8)
    for begin, end, dashes in ((0, 8, 0), (8, 12, 1), (12, 16, 2), (16, 20, 3), (20, 32, 4)):
        texts[:, begin + dashes : end + dashes] = digits[:, begin:end]
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(36)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(texts)])


def row_ids_of(keys: pa.ChunkedArray) -> pa.Array:
    """A column of keys as the texts of UUIDs."""
    return row_ids(_halves_of(_whole(keys)))


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of one attribute: the places of their keys, their values, and the indices where one of them has one."""

    ordinals: Any
    values: pa.Array
    index: pa.Array | None


def _bound(attribute: Attribute, raw: pa.Array) -> tuple[pa.Array, Any]:
    import numpy as np
    import pyarrow.compute as pc

    values, unfit = typed(attribute, raw)
    return values, None if unfit is None else np.asarray(pc.fill_null(unfit, False))


def _pieces(keys: _Keys, batches: Iterable[pa.RecordBatch]) -> dict[int, list[_Piece]]:
    """Attribute rows by attribute: each batch is put in that order while it is in the processor's cache."""
    import numpy as np
    import pyarrow as pa

    pieces: dict[int, list[_Piece]] = {}
    for batch in batches:
        if not batch.num_rows:
            continue
        ordinals = keys.places(_whole(batch.column("key")))
        attributes, index = _attributes_of(batch)
        order = np.argsort(attributes, kind="stable")
        if (ordinals < 0).any():
            order = order[ordinals[order] >= 0]
        attributes, ordinals, rows = attributes[order], ordinals[order], pa.array(order)
        values, index = batch.column("value").take(rows), None if index is None else index.take(rows)
        edges = [0, *(np.flatnonzero(attributes[1:] != attributes[:-1]) + 1).tolist(), len(attributes)]
        for begin, end in pairwise(edges):
            if begin < end:
                parts = [None if each is None else each.slice(begin, end - begin) for each in (values, index)]
                pieces.setdefault(int(attributes[begin]), []).append(_Piece(ordinals[begin:end], *parts))
    return pieces


def _attributes_of(batch: pa.RecordBatch) -> tuple[Any, pa.Array | None]:
    """The attribute of each row, and the indices where one of them has one: most batches have no list in them."""
    import numpy as np
    import pyarrow as pa

    attributes = np.asarray(batch.column("attr_id"))
    if "at" in batch.schema.names:
        index = batch.column("at")
        return attributes, index if index.null_count < len(index) else None
    indexed = attributes < 0
    if not indexed.any():
        return attributes, None
    return np.abs(attributes), pa.array(np.where(indexed, "some", ""), pa.string(), mask=~indexed)


class _Spread:
    """Attribute rows, and the keys beside which they belong."""

    def __init__(self, count: int, lanes: Sequence[dict[int, list[_Piece]]]) -> None:
        self._count = count
        self._lanes = lanes

    def scalars(self, attribute: Attribute) -> tuple[pa.Array, Any]:
        """One value per key; an indexed one does not belong to a scalar."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        piece = self._whole_of(attribute)
        if piece is None:
            return pa.nulls(self._count, arrow_type(attribute)), None
        values, unfit = typed(attribute, piece.values)
        places = np.full(self._count, -1, np.int32)
        places[piece.ordinals] = np.arange(len(piece.ordinals), dtype=np.int32)
        absent = places < 0
        found = values.take(pa.array(places, mask=absent) if absent.any() else pa.array(places))
        wrong = [] if unfit is None else [np.asarray(pc.fill_null(unfit, False))]
        if piece.index is not None and piece.index.null_count < len(piece.index):
            wrong.append(np.asarray(pc.is_valid(piece.index)))
        if not wrong:
            return found, None
        bad = np.zeros(self._count, bool)
        for each in wrong:
            bad[piece.ordinals[each]] = True
        return found, bad

    def lists(self, attribute: Attribute) -> tuple[pa.Array, Any]:
        """The items of each key in the order of their numbers; a value without one is a list of one."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        piece = self._whole_of(attribute)
        if piece is None:
            return pa.nulls(self._count, arrow_type(attribute)), None
        ordinals = piece.ordinals
        index = pa.nulls(len(ordinals), pa.string()) if piece.index is None else piece.index
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
        items, unfit = typed(attribute, piece.values.take(pa.array(order)))
        if unfit is not None:
            bad[ordinals[order][np.asarray(pc.fill_null(unfit, False))]] = True
        counts = np.bincount(ordinals[order], minlength=self._count)
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        absent = pa.array((rows == 0) | bad)
        found = pa.ListArray.from_arrays(pa.array(offsets), items.cast(arrow_scalar(attribute)), mask=absent)
        return found.cast(arrow_type(attribute)), bad if bad.any() else None

    def _whole_of(self, attribute: Attribute) -> _Piece | None:
        """All rows of an attribute, which are then let go."""
        import numpy as np
        import pyarrow as pa

        pieces = [piece for lane in self._lanes for piece in lane.pop(attribute.id, ())]
        if not pieces:
            return None
        blank = [pa.nulls(len(piece.ordinals), pa.string()) if piece.index is None else piece.index for piece in pieces]
        return _Piece(
            np.concatenate([piece.ordinals for piece in pieces]),
            pa.concat_arrays([piece.values for piece in pieces]),
            pa.concat_arrays(blank) if any(piece.index is not None for piece in pieces) else None,
        )


class _Keys:
    """Sorted keys, among which others are looked up."""

    def __init__(self, high: Any, low: Any) -> None:
        self.high, self.low = high, low
        self._ranks = _Ranks(high, low) if _repeats(high) else None
        """Only needed where ids were made in one moment: else the first half decides alone."""

    def places(self, wanted: pa.Array) -> Any:
        """For each wanted key its place among the sorted keys, −1 where it is none of them."""
        import numpy as np

        words = _words(wanted)
        # The rows of an entity were mostly written together, so they come in runs: each run is looked up once.
        begins = np.flatnonzero((words[1:, 0] != words[:-1, 0]) | (words[1:, 1] != words[:-1, 1])) + 1
        heads = np.concatenate(([0], begins))
        high, low = _halves(words[heads])
        found = _search(self.high, high) if self._ranks is None else self._ranks.search(high, low)
        found = np.minimum(found, len(self.high) - 1).astype(np.int32)
        same = (self.high[found] == high) & (self.low[found] == low)
        return np.repeat(np.where(same, found, np.int32(-1)), np.diff(np.append(heads, len(words))))


class _Ranks:
    """Each half of sorted keys by its rank, so that both fit into one number."""

    def __init__(self, high: Any, low: Any) -> None:
        import numpy as np

        self._firsts = high[np.concatenate(([True], high[1:] != high[:-1]))]
        self._seconds = np.unique(low)
        self._known = self._of(high, low)

    def search(self, high: Any, low: Any) -> Any:
        """Where keys stand."""
        return _search(self._known, self._of(high, low))

    def _of(self, high: Any, low: Any) -> Any:
        import numpy as np

        return (np.searchsorted(self._firsts, high) << 32) | np.searchsorted(self._seconds, low)


def _search(known: Any, asked: Any) -> Any:
    """Where numbers stand among sorted ones: asked in order, one look-up finds what the one before has fetched."""
    import numpy as np

    order = np.argsort(asked)
    places = np.empty(len(asked), np.int64)
    places[order] = np.searchsorted(known, asked[order])
    return places


def _repeats(ordered: Any) -> bool:
    return bool((ordered[1:] == ordered[:-1]).any())


def _halves_of(keys: pa.Array) -> tuple[Any, Any]:
    """128-bit keys as two columns of unsigned numbers, in an order-preserving form."""
    return _halves(_words(keys))


def _halves(words: Any) -> tuple[Any, Any]:
    import numpy as np

    return words[:, 0].view(">u8").astype(np.uint64), words[:, 1].view(">u8").astype(np.uint64)


def _words(keys: pa.Array) -> Any:
    """128-bit keys as pairs of numbers in the byte order of the wire: good for telling whether two are the same."""
    import numpy as np

    if not len(keys):
        return np.zeros((0, 2), np.uint64)
    _, offsets, data = keys.buffers()
    start = int(np.frombuffer(offsets, np.int32)[keys.offset])
    return np.frombuffer(data, np.uint8)[start : start + 16 * len(keys)].view(np.uint64).reshape(-1, 2)


def bound_to_columns(schema: EntitySchema) -> list[Attribute]:
    """The attributes that live in columns of `entity_main`, in the order in which they are read."""
    return [each for each in schema.attributes if each.column is not None]


def _whole(column: pa.ChunkedArray | pa.Array) -> Any:
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    return array.storage if isinstance(array, pa.ExtensionArray) else array
