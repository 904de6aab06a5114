"""Folding events to one per key: the state before the batch from its first event, the state after it from its last.

`fold` is associative: folding folded parts gives the same as folding everything at once, so a transaction that does
not fit into memory is folded part by part (`buffer.py`). Everything is whole columns: keys become small numbers by
their order or Arrow's hash kernel, first and last events by numpy. Memory: a few integers per event beside the events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from modak.lake.match import Integers, integers, is_integral
from modak.tables.mirror.pump.events import ENDS, FRESH, LOOSE, NET, PUT, TIER, image_name, key_name, root_name

Places = npt.NDArray[np.int64]

_FIRST = (FRESH, LOOSE, TIER)


def joined(tables: Sequence[pa.Table], shown: Mapping[int, pa.Scalar] | None = None) -> pa.Table:
    """Event tables of several definitions as one: columns by number, in the types of the last.

    Rows from before a column was added have its value in `shown` (what Postgres shows for such rows), or NULL.
    """
    if all(table.schema == tables[0].schema for table in tables):
        return pa.concat_tables(tables).combine_chunks()
    fields: dict[str, pa.Field] = {}
    for table in tables:
        fields |= {field.name: field for field in table.schema}
    values = {image_name(number): value for number, value in (shown or {}).items()}
    return pa.concat_tables([_fitted(table, list(fields.values()), values) for table in tables]).combine_chunks()


def fold(events: pa.Table) -> pa.Table:
    """One event per key, in the order in which keys first appeared."""
    if not len(events):
        return events
    codes, count = encode(key_columns(events))
    if any(name.startswith("u") for name in events.column_names):
        events = _filled(events, codes)
    if count == len(events):
        return events
    order = np.arange(len(events))
    first = np.empty(count, np.int64)
    first[codes[::-1]] = order[::-1]
    last = np.empty(count, np.int64)
    last[codes] = order
    puts = np.flatnonzero(_numpy(events[PUT]))
    image = np.full(count, -1, np.int64)
    image[codes[puts]] = puts
    net = np.bincount(codes, _numpy(events[NET]), count).astype(np.int32)
    by_first = np.argsort(first, kind="stable")
    first, last, image, net = first[by_first], last[by_first], image[by_first], net[by_first]
    whence = {name: pa.array(first) for name in (*_FIRST, *_named(events, "k"))}
    whence[ENDS] = pa.array(last)
    imaged = pa.array(np.maximum(image, 0), mask=image < 0)
    columns = []
    for name in events.column_names:
        if name == PUT:
            columns.append(pa.array(image >= 0))
        elif name == NET:
            columns.append(pa.array(net))
        else:
            columns.append(_flat(events[name]).take(whence.get(name, imaged)))
    return pa.Table.from_arrays(
        [_no_null_marks(name, column) for name, column in zip(events.column_names, columns, strict=True)],
        schema=events.schema,
    )


def key_columns(events: pa.Table) -> list[pa.Array]:
    """The identity columns."""
    return [_flat(events[name]) for name in _named(events, "k")]


def encode(columns: Sequence[pa.Array]) -> tuple[Places, int]:
    """A small number for each row, the same for the same values; and how many there are."""
    codes, count = _codes(columns[0])
    for column in columns[1:]:
        more, distinct = _codes(column)
        codes, count = _numbered(codes * distinct + more)
    return codes, count


def unknown_numbers(events: pa.Table) -> list[int]:
    """Attribute numbers of which some value is unknown."""
    return [int(name[1:]) for name in _named(events, "u") if pc.any(events[name]).as_py()]


def buckets(events: pa.Table, count: int) -> Places:
    """For each event a bucket that depends on its key only, on every machine and at any time."""
    mixed = np.zeros(len(events), np.uint64)
    for column in key_columns(events):
        mixed = _mix(mixed * np.uint64(31) + _hash(column))
    return (mixed % np.uint64(count)).astype(np.int64)


def _fitted(table: pa.Table, fields: Sequence[pa.Field], shown: Mapping[str, pa.Scalar]) -> pa.Table:
    columns = []
    for field in fields:
        if field.name not in table.column_names:
            columns.append(_absent(table, field, shown.get(field.name)))
        elif table[field.name].type == field.type:
            columns.append(table[field.name])
        else:
            columns.append(_cast(table[field.name], field.type))
    return pa.table(columns, schema=pa.schema(fields))


def _absent(table: pa.Table, field: pa.Field, shown: pa.Scalar | None) -> pa.Array:
    if field.name[0] == "u":
        return pa.array(np.zeros(len(table), bool))
    if field.name[0] == "r":
        return table[key_name(int(field.name[1:]))].cast(field.type)
    if shown is None:
        return pa.nulls(len(table), field.type)
    if isinstance(field.type, pa.ExtensionType):
        plain = pa.repeat(shown.value if isinstance(shown, pa.ExtensionScalar) else shown, len(table))
        return pa.ExtensionArray.from_storage(field.type, plain)
    return pa.repeat(shown, len(table)).cast(field.type)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Another type altogether: the heap was rewritten, and the lake is compared with it after this batch.
        return pa.chunked_array([pa.nulls(len(column), kind)])


def _filled(events: pa.Table, codes: Places) -> pa.Table:
    """The events with unknown values taken from the image before, along the way of the row through its keys."""
    roots = [_flat(events[name]) for name in _named(events, "r")]
    keys = key_columns(events)
    both, _ = encode([pa.concat_arrays([key, root]) for key, root in zip(keys, roots, strict=True)])
    size = len(events)
    mine, root = both[:size], both[size:]
    puts = np.flatnonzero(_numpy(events[PUT]))
    # The last image under the root's key before the event itself.
    line = np.sort(mine[puts] * (size + 1) + puts)
    at = np.searchsorted(line, root * (size + 1) + np.arange(size)) - 1
    before = np.where(at >= 0, line[np.maximum(at, 0)], -1)
    before = np.where(before // (size + 1) == root, before % (size + 1), -1)
    columns = dict(zip(events.column_names, events.columns, strict=True))
    # Where an image is still unknown after all of the batch, the lake has it under this key.
    origin = np.arange(size)
    for name in _named(events, "u"):
        unknown = _numpy(events[name])
        if not unknown.any():
            continue
        source = np.where(unknown & (before >= 0), before, np.arange(size))
        while True:
            further = source[source]
            if np.array_equal(further, source):
                break
            source = further
        column = image_name(int(name[1:]))
        columns[column] = pa.chunked_array([_flat(events[column]).take(pa.array(source))])
        columns[name] = pa.chunked_array([pa.array(unknown[source])])
        origin = np.where(unknown[source], source, origin)
    for at_key, values in enumerate(roots):
        columns[root_name(at_key)] = pa.chunked_array([values.take(pa.array(origin))])
    return pa.Table.from_arrays(list(columns.values()), schema=events.schema)


def _codes(column: pa.Array) -> tuple[Places, int]:
    plain = column.storage if isinstance(column, pa.ExtensionArray) else column
    if is_integral(plain.type) and len(plain) and not plain.null_count:
        return _numbered(np.asarray(integers(plain)))
    encoded = plain.dictionary_encode()
    return np.asarray(encoded.indices).astype(np.int64), len(encoded.dictionary)


def _numbered(values: Places) -> tuple[Places, int]:
    if not len(values):
        return values, 0
    lookup = Integers(values)
    return lookup.places(values), lookup.distinct


def _named(events: pa.Table, letter: str) -> list[str]:
    return [name for name in events.column_names if name[0] == letter and name[1:].isdigit()]


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    flat = _flat(column)
    if pa.types.is_boolean(flat.type):
        return np.asarray(flat.cast(pa.uint8())).astype(bool)
    return np.asarray(flat)


def _no_null_marks(name: str, column: pa.Array) -> pa.Array:
    return column.fill_null(False) if name[0] == "u" and name[1:].isdigit() else column


def _hash(column: pa.Array) -> npt.NDArray[np.uint64]:
    plain = column.storage if isinstance(column, pa.ExtensionArray) else column
    if pa.types.is_date32(plain.type):
        plain = plain.cast(pa.int32())
    if pa.types.is_integer(plain.type) or pa.types.is_timestamp(plain.type):
        return _mix(np.asarray(plain.cast(pa.int64())).astype(np.uint64))
    texts = plain if pa.types.is_binary(plain.type) else _bytes(plain)
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]].astype(np.uint64)
    starts = offsets - offsets[0]
    within = np.arange(len(data)) - np.repeat(starts[:-1], np.diff(starts))
    powers = np.cumprod(np.full(int(within.max(initial=0)) + 1, 0x100000001B3, np.uint64))
    sums = np.concatenate([[np.uint64(0)], np.cumsum((data + np.uint64(1)) * powers[within])])
    return _mix(sums[starts[1:]] - sums[starts[:-1]])


def _bytes(plain: pa.Array) -> pa.Array:
    if pa.types.is_fixed_size_binary(plain.type) or pa.types.is_string(plain.type):
        return plain.cast(pa.binary())
    return plain.cast(pa.string()).cast(pa.binary())


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
