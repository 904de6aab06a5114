"""Avro container files, as far as Iceberg's manifests need them: records in, one file out.

Values are written by their schema; a missing value of an optional field is `None`. Records gather into blocks of a few
thousand, each compressed by itself.

Memory: the whole file in its compressed form, and one block.
"""

from __future__ import annotations

import io
import json
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

_MAGIC = b"Obj\x01"
_SYNC = 16
_BLOCK = 4_000
_RAW_DEFLATE = -15


class _Sink(Protocol):
    def write(self, data: bytes, /) -> Any:
        """Take some bytes."""


def container(schema: Mapping[str, Any], records: Iterable[Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
    """A file of records under a schema; `metadata` stands beside the schema in its head."""
    sink = io.BytesIO()
    sync = secrets.token_bytes(_SYNC)
    head = {"avro.schema": json.dumps(schema), "avro.codec": "deflate", **metadata}
    sink.write(_MAGIC)
    encode({"type": "map", "values": "bytes"}, {key: text.encode() for key, text in head.items()}, sink)
    sink.write(sync)
    block, count = io.BytesIO(), 0
    for record in records:
        encode(schema, record, block)
        count += 1
        if count == _BLOCK:
            _put_block(sink, block, count, sync)
            block, count = io.BytesIO(), 0
    if count:
        _put_block(sink, block, count, sync)
    return sink.getvalue()


def encode(schema: Any, value: Any, sink: _Sink) -> None:
    """Write a value in Avro's binary form."""
    if isinstance(schema, list):
        # Optional is the only union that there is, and null comes first in it.
        _put_long(0 if value is None else 1, sink)
        if value is not None:
            encode(schema[1], value, sink)
        return
    kind = schema["type"] if isinstance(schema, dict) else schema
    match kind:
        case "record":
            for field in schema["fields"]:
                encode(field["type"], value.get(field["name"]), sink)
        case "array":
            _put_items(value, lambda item: encode(schema["items"], item, sink), sink)
        case "map":
            _put_items(list(value.items()), lambda item: _put_pair(schema["values"], item, sink), sink)
        case "int" | "long":
            _put_long(value, sink)
        case "boolean":
            sink.write(b"\x01" if value else b"\x00")
        case "string":
            _put_bytes(value.encode(), sink)
        case "bytes":
            _put_bytes(value, sink)
        case _:
            raise ValueError(f"{kind!r} is no type that manifests have")


def _put_block(sink: _Sink, block: io.BytesIO, count: int, sync: bytes) -> None:
    packer = zlib.compressobj(wbits=_RAW_DEFLATE)
    packed = packer.compress(block.getvalue()) + packer.flush()
    _put_long(count, sink)
    _put_bytes(packed, sink)
    sink.write(sync)


def _put_items(items: Sequence[Any], put: Any, sink: _Sink) -> None:
    if items:
        _put_long(len(items), sink)
        for item in items:
            put(item)
    _put_long(0, sink)


def _put_pair(kind: Any, pair: tuple[str, Any], sink: _Sink) -> None:
    _put_bytes(pair[0].encode(), sink)
    encode(kind, pair[1], sink)


def _put_bytes(value: bytes, sink: _Sink) -> None:
    _put_long(len(value), sink)
    sink.write(value)


def _put_long(value: int, sink: _Sink) -> None:
    rest = (value << 1) ^ (value >> 63)
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    sink.write(bytes(out))
