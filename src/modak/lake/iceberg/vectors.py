"""Deletion vectors: which rows of one data file are gone, as a roaring bitmap in a Puffin file.

Fold, pump and maintenance find the positions; this module writes them. One Puffin file per data file, because DuckDB
1.5 applies the first blob of a shared file to every data file. A data file has at most one vector, so an older one is
read back, united with the new positions and removed in the same row delta. Memory is bounded by one bitmap.
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Iterable
from typing import Any

from pyroaring import BitMap64

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.lake.iceberg.output import open_output, read_range, storage_errors
from modak.lake.model import DataFile, Vector

_PUFFIN = b"PFA1"
_VECTOR = bytes.fromhex("D1D33964")
_ROW_POSITION = 2_147_483_645
"""The field id of Iceberg's row position column."""


def vector_uri(folder: str, task: str) -> str:
    """A fresh name for a vector in an operation's folder."""
    return f"{folder.rstrip('/')}/{task}-{uuid.uuid4()}-deletes.puffin"


def write_vector(
    uri: str, positions: BitMap64 | Iterable[int], data_file: DataFile, existing: Vector | None = None
) -> Vector:
    """Write the deleted positions of a data file, with those of its existing vector."""
    merged = BitMap64(positions)
    if existing is not None:
        if existing.data_file != data_file.path:
            raise ValueError(f"{existing.path} is the vector of another data file")
        merged |= read_vector(existing)
    if not merged:
        raise ValueError("a vector without positions")
    if merged.max() >= data_file.rows:
        raise ModakError(
            "lake.position",
            f"Position {merged.max()} is outside {data_file.path}, which has {data_file.rows} rows.",
            hint="The lake changed under the operation; plan again.",
        )
    merged.run_optimize()
    blob = encode(merged)
    reach("vectors.before_write")
    output = open_output(uri)
    try:
        with storage_errors(uri):
            output.stream.write(_puffin(blob, len(merged), data_file.path))
        size = output.commit()
    except BaseException:
        output.discard()
        raise
    reach("vectors.durable")
    described: dict[str, Any] = json.loads(data_file.json)
    content = {
        "spec-id": described["spec-id"],
        "content": "position-deletes",
        "file-path": uri,
        "file-format": "puffin",
        "partition": described["partition"],
        "file-size-in-bytes": size,
        "record-count": len(merged),
        "referenced-data-file": data_file.path,
        "content-offset": len(_PUFFIN),
        "content-size-in-bytes": len(blob),
    }
    return Vector(json.dumps(content, ensure_ascii=False), len(merged), size, uri, data_file.path)


def read_vector(vector: Vector) -> BitMap64:
    """The positions that a vector holds."""
    described: dict[str, Any] = json.loads(vector.json)
    return decode(read_range(vector.path, described["content-offset"], described["content-size-in-bytes"]), vector.path)


def encode(positions: BitMap64) -> bytes:
    """The blob `deletion-vector-v1`: length, magic, portable bitmap, checksum."""
    body = _VECTOR + positions.serialize()
    return struct.pack(">I", len(body)) + body + struct.pack(">I", zlib.crc32(body))


def decode(blob: bytes, where: str) -> BitMap64:
    """The positions in a blob; raises when length, magic or checksum are wrong."""
    body = blob[4:-4]
    sound = (
        len(blob) >= 12
        and blob[:4] == struct.pack(">I", len(body))
        and body[:4] == _VECTOR
        and blob[-4:] == struct.pack(">I", zlib.crc32(body))
    )
    if not sound:
        raise ModakError(
            "lake.vector_damaged", f"The deletion vector in {where} is damaged.", hint="Restore the file from a backup."
        )
    return BitMap64.deserialize(body[4:])


def _puffin(blob: bytes, cardinality: int, data_file: str) -> bytes:
    footer = {
        "blobs": [
            {
                "type": "deletion-vector-v1",
                "fields": [_ROW_POSITION],
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": len(_PUFFIN),
                "length": len(blob),
                "properties": {"cardinality": str(cardinality), "referenced-data-file": data_file},
            }
        ],
        "properties": {"created-by": "modak"},
    }
    payload = json.dumps(footer, ensure_ascii=False).encode()
    return _PUFFIN + blob + _PUFFIN + payload + struct.pack("<i", len(payload)) + bytes(4) + _PUFFIN
