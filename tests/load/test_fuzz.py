"""Whatever is sent, the answer is a sentence: no body and no header gives a 500."""

from __future__ import annotations

import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq

from tests.load.conftest import Api
from tests.tables.events import Events

TYPES = (
    "application/x-ndjson",
    "text/csv",
    "application/vnd.apache.parquet",
    "application/vnd.apache.arrow.stream",
    "application/vnd.apache.arrow.file",
)


def _seeds() -> list[bytes]:
    table = pa.table({"id": [1, 2], "ts": [201, 202], "body": ["x", None]})
    parquet, stream, file = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    rows = [{"id": 1, "ts": 201, "body": "x"}, {"id": 2, "ts": 5, "body": None}, {"id": 2**70, "ts": 1e300}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return [
        lines,
        b"id,ts,body\n1,201,x\n2,202,\n",
        parquet.getvalue(),
        stream.getvalue(),
        file.getvalue(),
        b"",
        b"\n\n",
        b"\xff\xfe\x00",
        b'{"id": 1, "ts": 201, "body": "\\u0000"}\n',
        b'{"id": {"a": 1}, "ts": [1], "body": {}}\n',
        b'{"id": 1, "id": 2, "ts": 201}\n',
        b'{"id": 1.5, "ts": 201}\n',
        b'{"id": -9223372036854775809, "ts": 201}\n',
        b'"just a text"\n[1,2]\n3\nnull\n',
        b"[" * 20_000,
        b'{"a":' * 5_000,
        b"id,id\n1,2\n",
        b'id,ts\n"1,2\n',
    ]


def _mutated(chance: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(chance.randint(0, 6)):
        if not data:
            break
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.randint(1, 40)]
            case 2:
                data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 20)))
            case _:
                data = data[:at]
    return bytes(data)


def test_no_body_gives_a_500(api: Api, events: Events) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    seeds = _seeds()
    for number in range(150):
        body = chance.choice(seeds) if number >= len(seeds) * len(TYPES) else seeds[number // len(TYPES)]
        kind = TYPES[number % len(TYPES)] if number < len(seeds) * len(TYPES) else chance.choice(TYPES)
        sent = body if number < len(seeds) * len(TYPES) else _mutated(chance, body)
        headers = {"Content-Type": kind}
        if chance.random() < 0.1:
            headers["Content-Encoding"] = chance.choice(["gzip", "zstd"])
        answer = api.post(sent, f"fuzz-{number}", headers=headers)
        assert answer.status_code in (200, 400), (seed, number, kind, sent[:200], answer.status_code, answer.text)
