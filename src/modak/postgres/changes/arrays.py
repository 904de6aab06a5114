"""Postgres arrays, binary or text, as the elements of a list column and the borders between its lists.

Binary arrays of one width are cut by arithmetic; others are walked one element a step for all arrays at once. Text
arrays are cut by looking at all their bytes together: what stands in quotes, what is escaped, which comma separates.
Memory: a few integers per element, for text a few per byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from modak.postgres.changes.cells import Cells, Form
from modak.postgres.changes.wire import Mask, Places, Wire, gathered, malformed

_HEADER, _DIMENSION = 12, 8


class Multidimensional(Exception):
    """An array has more than one dimension."""


@dataclass(frozen=True, slots=True)
class Elements:
    """All elements of all arrays as cells of a buffer; `edges[i]:edges[i+1]` are those of array i."""

    wire: Wire
    cells: Cells
    edges: Places


def binary_elements(wire: Wire, cells: Cells) -> Elements:
    """The elements of arrays in binary form; NULL arrays have none."""
    present = np.ones(len(cells), bool) if cells.valid is None else cells.valid
    counts = np.zeros(len(cells), np.int64)
    at = cells.starts[present]
    dimensions = wire.i4(at)
    if np.any(dimensions > 1):
        raise Multidimensional
    filled = np.zeros(len(cells), bool)
    filled[present] = dimensions == 1
    counts[filled] = wire.u4(cells.starts[filled] + _HEADER)
    edges = _edges(counts)
    first = cells.starts + _HEADER + _DIMENSION
    starts, lengths = _located(wire, first, counts, edges, cells.starts + cells.lengths)
    valid = lengths >= 0
    lengths[~valid] = 0
    return Elements(wire, _cells(starts, lengths, "binary", valid), edges)


def _located(wire: Wire, first: Places, counts: Places, edges: Places, ends: Places) -> tuple[Places, Places]:
    filled = counts > 0
    starts, lengths = np.zeros(edges[-1], np.int64), np.zeros(edges[-1], np.int64)
    if not np.any(filled):
        return starts, lengths
    # If the bytes are exactly those of so many elements of one width, every element is where it would be then.
    width = int(wire.i4(first[filled][:1])[0])
    if width >= 0 and np.all(((ends - first) == counts * (4 + width))[filled]):
        within = np.arange(edges[-1]) - np.repeat(edges[:-1], counts)
        starts = np.repeat(first, counts) + within * (4 + width) + 4
        lengths = wire.i4(starts - 4).astype(np.int64)
        if np.all(lengths == width):
            return starts, lengths
    at = first.copy()
    for index in range(int(counts.max())):
        rows = np.flatnonzero(counts > index)
        length = wire.i4(at[rows]).astype(np.int64)
        starts[edges[rows] + index] = at[rows] + 4
        lengths[edges[rows] + index] = length
        at[rows] += 4 + np.maximum(length, 0)
    if np.any(at[filled] != ends[filled]):
        raise malformed("an array is longer than its value")
    return starts, lengths


def text_elements(wire: Wire, cells: Cells) -> Elements:
    """The elements of arrays in text form, without quotes and escapes."""
    packed = gathered(wire, cells.starts, cells.lengths, cells.valid)
    text = Wire(packed.buffers()[2] or pa.py_buffer(b""))
    ends = np.frombuffer(packed.buffers()[1], np.int32).astype(np.int64)[: len(cells) + 1]
    begins, stops = ends[:-1], ends[1:]
    filled = np.flatnonzero(stops > begins)
    if not len(filled):
        nothing = np.zeros(0, np.int64)
        return Elements(text, Cells(nothing, nothing, "text"), np.zeros(len(cells) + 1, np.int64))
    plain = _unquoted(text.bytes)
    opening = np.flatnonzero(plain & (text.bytes == ord("{")))
    # The first brace of each array; what stands before it are lower bounds, which are not kept.
    first = np.searchsorted(opening, begins[filled])
    if len(opening) != len(filled) or np.any(opening[first] >= stops[filled]):
        raise Multidimensional
    inner_begin, inner_stop = opening[first] + 1, stops[filled] - 1
    commas = np.flatnonzero(plain & (text.bytes == ord(",")))
    per_array = np.searchsorted(commas, inner_stop) - np.searchsorted(commas, inner_begin) + (inner_stop > inner_begin)
    counts = np.zeros(len(cells), np.int64)
    counts[filled] = per_array
    some = inner_stop > inner_begin
    starts = np.sort(np.concatenate([inner_begin[some], commas + 1]))
    stops_at = np.sort(np.concatenate([inner_stop[some], commas]))
    return Elements(*_bare(text, starts, stops_at), _edges(counts))


def _unquoted(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Mask:
    """Which bytes stand outside quotes."""
    quotes = (data == ord('"')) & ~_escaped(data)
    return np.asarray((np.cumsum(quotes) % 2 == 0) & ~quotes)


def _escaped(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Mask:
    """Which bytes are escaped: those behind an odd number of backslashes in a row."""
    slash = data == ord("\\")
    place = np.arange(len(data))
    last_other = np.maximum.accumulate(np.where(slash, -1, place))
    run = place - last_other
    escaped = np.zeros(len(data), bool)
    escaped[1:] = (run[:-1] % 2 == 1) & slash[:-1]
    return escaped


def _bare(text: Wire, starts: Places, stops: Places) -> tuple[Wire, Cells]:
    """The elements without quotes and escapes; the word NULL, unquoted, is none."""
    quoted = text.u1(starts) == ord('"')
    null = ~quoted & (stops - starts == 4)
    null[null] = np.all(text.block(starts[null], 4) == np.frombuffer(b"NULL", np.uint8), axis=1)
    starts, stops = starts + quoted, stops - quoted
    escapes = (text.bytes == ord("\\")) & ~_escaped(text.bytes)
    if np.any(escapes):
        # Only quoted elements have backslashes, and there each that is not escaped itself is an escape.
        shift = np.concatenate([[0], np.cumsum(escapes)])
        text = Wire(pa.py_buffer(text.bytes[~escapes].tobytes()))
        starts, stops = starts - shift[starts], stops - shift[stops]
    lengths = np.where(null, 0, stops - starts)
    return text, _cells(starts, lengths, "text", ~null)


def _cells(starts: Places, lengths: Places, form: Form, valid: Mask) -> Cells:
    if np.all(valid):
        return Cells(starts, lengths, form)
    return Cells(starts, lengths, form if np.any(valid) else None, valid)


def _edges(counts: Places) -> Places:
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges
