"""A data file against its manifest entry: each thing that can be wrong is named, on a file of our own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.vectors import vector_uri, write_vector
from modak.lake.model import LakeColumn, LakeFile, Layout, Vector
from modak.tables.verify.files import live_batches
from modak.tables.verify.report import Finding
from modak.tables.verify.shape import Shape

COLUMNS = (LakeColumn("id", "long", field_id=1), LakeColumn("ts", "long", field_id=2))
SHAPE = Shape((), COLUMNS, ("id", "ts"), (0,), 1)


@pytest.fixture
def sound(tmp_path: Path) -> LakeFile:
    """Ten rows with tier keys 100 to 109, of which position 3 is deleted."""
    folder = f"file://{tmp_path}/data"
    writer = FileWriter(folder, COLUMNS, Layout(None, None, "ts"), task="0", tier_key="ts")
    writer.write(pa.RecordBatch.from_arrays([pa.array(range(10)), pa.array(range(100, 110))], schema=writer.schema))
    (file,) = writer.close()
    vector = write_vector(vector_uri(folder, "0"), [3], file)
    return LakeFile(file, 100, 109, 1, (vector,))


def look(file: LakeFile) -> tuple[int, list[str]]:
    findings: list[Finding] = []
    rows = sum(len(batch) for batch in live_batches(file, SHAPE, findings))
    return rows, [finding.code for finding in findings]


def claims(file: LakeFile, rows: int) -> Vector:
    """The vector with another number of rows in its manifest."""
    (vector,) = file.vectors
    return replace(vector, rows=rows)


def test_a_sound_file_gives_its_live_rows(sound: LakeFile) -> None:
    assert look(sound) == (9, [])


def test_what_the_manifest_says_otherwise_is_named(sound: LakeFile) -> None:
    file = sound.file
    assert look(replace(sound, file=replace(file, bytes=file.bytes + 1))) == (9, ["file.size"])
    assert look(replace(sound, file=replace(file, rows=11))) == (9, ["file.rows"])
    assert look(replace(sound, lower=101)) == (9, ["file.bounds"])
    assert look(replace(sound, upper=108)) == (9, ["file.bounds"])
    assert look(replace(sound, lower=0, upper=None)) == (9, [])
    assert look(replace(sound, foreign_deletes=2)) == (9, ["file.foreign_deletes"])
    assert look(replace(sound, vectors=(claims(sound, 5),))) == (9, ["vector.rows"])


def test_a_vector_that_points_outside_of_its_file_is_named(sound: LakeFile, tmp_path: Path) -> None:
    larger = replace(sound.file, rows=100)
    far = write_vector(vector_uri(f"file://{tmp_path}/data", "1"), [3, 50], larger)
    assert look(replace(sound, vectors=(far,))) == (9, ["vector.range"])
    assert look(replace(sound, vectors=(*sound.vectors, far))) == (9, ["file.vectors", "vector.range"])


def test_a_file_or_vector_that_cannot_be_read_is_named(sound: LakeFile) -> None:
    (vector,) = sound.vectors
    puffin = Path(vector.path.removeprefix("file://"))
    blob = bytearray(puffin.read_bytes())
    blob[json.loads(vector.json)["content-offset"] + 12] ^= 0xFF
    puffin.write_bytes(blob)
    assert look(sound) == (0, ["file.unreadable"])
    data = Path(sound.file.path.removeprefix("file://"))
    data.write_bytes(b"not parquet at all")
    assert look(replace(sound, vectors=()))[1] == ["file.unreadable"]
    data.unlink()
    assert look(replace(sound, vectors=())) == (0, ["file.unreadable"])
