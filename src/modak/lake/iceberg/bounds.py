"""What Iceberg must know about a data file: counts, sizes and bounds, read off the Parquet footer.

Readers skip files by these numbers, so a bound that is too narrow loses rows and one that is too wide only costs time:
where in doubt a column has no bound. Values are Iceberg's single-value binary form, written as hex in the JSON that
`ContentFileParser` reads. Memory is bounded by the footer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from modak.lake.model import DataFile, LakeColumn

PREFIX = 16
"""Code points of a string, or bytes of a binary, that a bound keeps."""

_HALF = 1 << 64
_PACKED = {
    "int": "<i",
    "date": "<i",
    "long": "<q",
    "timestamp": "<q",
    "timestamptz": "<q",
    "float": "<f",
    "double": "<d",
}

Bounds = tuple[bytes | None, bytes | None]


def data_file(
    path: str,
    size: int,
    metadata: Any,
    columns: Sequence[LakeColumn],
    *,
    spec_id: int,
    partition: list[object],
    nan_counts: Mapping[str, int],
) -> DataFile:
    """Describe a finished Parquet file by its footer. `columns` stand in the order of the file, one leaf each."""
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    sizes: dict[int, int] = {}
    values: dict[int, int] = {}
    nulls: dict[int, int] = {}
    lower: dict[int, str] = {}
    upper: dict[int, str] = {}
    for at, column in enumerate(columns):
        chunks = [group.column(at) for group in groups]
        leaf = column.element_id if column.element is not None else column.field_id
        if leaf is None or column.field_id is None:
            raise ValueError(f"column {column.name} has no field id")
        sizes[leaf] = sum(chunk.total_compressed_size for chunk in chunks)
        if column.element is not None:
            continue
        values[column.field_id] = metadata.num_rows
        statistics = [chunk.statistics for chunk in chunks]
        if all(one is not None and one.has_null_count for one in statistics):
            nulls[column.field_id] = sum(one.null_count for one in statistics)
        low, high = column_bounds(column.type, statistics)
        if low is not None:
            lower[column.field_id] = low.hex().upper()
        if high is not None:
            upper[column.field_id] = high.hex().upper()
    by_name = {column.name: column.field_id for column in columns}
    content = {
        "spec-id": spec_id,
        "content": "data",
        "file-path": path,
        "file-format": "parquet",
        "partition": partition,
        "file-size-in-bytes": size,
        "record-count": metadata.num_rows,
        "column-sizes": _map(sizes),
        "value-counts": _map(values),
        "null-value-counts": _map(nulls),
        "nan-value-counts": _map({by_name[name]: count for name, count in nan_counts.items()}),
        "lower-bounds": _map(lower),
        "upper-bounds": _map(upper),
        "split-offsets": [_start(group.column(0)) for group in groups],
        "sort-order-id": 0,
    }
    return DataFile(json.dumps(content, ensure_ascii=False), metadata.num_rows, size, path)


def column_bounds(lake_type: str, statistics: Sequence[Any]) -> Bounds:
    """The bounds of a column over all row groups, or none where a row group does not tell."""
    lows: list[Any] = []
    highs: list[Any] = []
    for one in statistics:
        if one is not None and one.has_min_max:
            lows.append(_value(lake_type, one.min_raw))
            highs.append(_value(lake_type, one.max_raw))
        elif one is None or (one.num_values and lake_type not in {"float", "double"}):
            # Values without statistics (very long texts). Floats without them are all NaN, which bounds leave out.
            return None, None
    if not lows:
        return None, None
    return _encoded(lake_type, min(lows), max(highs))


def _value(lake_type: str, raw: Any) -> Any:
    if lake_type.startswith("decimal") and isinstance(raw, bytes):
        return int.from_bytes(raw, "big", signed=True)
    return raw


def _encoded(lake_type: str, low: Any, high: Any) -> Bounds:
    if lake_type in _PACKED:
        shape = _PACKED[lake_type]
        return struct.pack(shape, low), struct.pack(shape, high)
    match lake_type:
        case "boolean":
            return bytes([low]), bytes([high])
        case "string":
            return low.decode()[:PREFIX].encode(), _upper_text(high.decode())
        case "binary":
            return low[:PREFIX], _upper_bytes(high)
        case "uuid":
            return _uuid_bounds(low, high)
        case _:
            return unscaled(low), unscaled(high)


def unscaled(value: int) -> bytes:
    """An integer as the shortest big-endian two's complement."""
    return value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "big", signed=True)


def _upper_text(text: str) -> bytes | None:
    if len(text) <= PREFIX:
        return text.encode()
    prefix = text[:PREFIX]
    for at in range(PREFIX - 1, -1, -1):
        point = ord(prefix[at]) + 1
        if point == 0xD800:
            point = 0xE000
        if point <= 0x10FFFF:
            return (prefix[:at] + chr(point)).encode()
    return None


def _upper_bytes(value: bytes) -> bytes | None:
    if len(value) <= PREFIX:
        return value
    prefix = value[:PREFIX]
    for at in range(PREFIX - 1, -1, -1):
        if prefix[at] < 0xFF:
            return prefix[:at] + bytes([prefix[at] + 1])
    return None


def _uuid_bounds(low: bytes, high: bytes) -> Bounds:
    """Bounds that hold in both orders of uuid: readers differ in whether they compare its halves as signed numbers.

    Within one sign of the upper half both orders agree on it, and one step outwards there settles the lower half too.
    """
    first, last = (int.from_bytes(value[:8], "big") for value in (low, high))
    first, last = first - 1, last + 1
    if first < 0 or last >= _HALF or first >> 63 != last >> 63:
        return None, None
    return first.to_bytes(8, "big") + bytes(8), last.to_bytes(8, "big") + bytes(8)


def _start(chunk: Any) -> int:
    dictionary = chunk.dictionary_page_offset
    data: int = chunk.data_page_offset
    return data if dictionary is None else min(dictionary, data)


def _map(values: Mapping[Any, Any]) -> dict[str, list[Any]]:
    return {"keys": list(values), "values": list(values.values())}
