"""Finding rows by their keys: only files that can hold them, key columns out of the cache, deleted rows left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from modak.lake.iceberg import keycache
from modak.lake.iceberg.files import FileWriter
from modak.lake.iceberg.keycache import KeyCache
from modak.lake.iceberg.vectors import vector_uri, write_vector
from modak.lake.model import LakeColumn, LakeFile, Layout
from modak.tables.mirror.pump.find import Look, Wanted, candidates, look, with_bounds

ID = LakeColumn("id", "long", required=True, field_id=1)
TS = LakeColumn("ts", "long", required=True, field_id=2)
NAME = LakeColumn("name", "string", field_id=3)


def written(folder: Path, first: int, count: int) -> LakeFile:
    """A data file with rows first… (id = ts)."""
    writer = FileWriter(f"file://{folder}", [ID, TS, NAME], Layout(None, None, "ts"), task=f"t{first}", tier_key="ts")
    ids = pa.array(np.arange(first, first + count))
    names = pa.array([f"n{number}" for number in range(first, first + count)])
    with writer:
        writer.write(pa.RecordBatch.from_arrays([ids, ids, names], schema=writer.schema))
        (file,) = writer.close()
    return with_bounds(file, TS.field_id)


def wanted(keys: list[int], placed: bool = True) -> Wanted:
    ids = np.array(keys, np.int64)
    return Wanted((pa.array(ids),), ids, np.full(len(ids), placed))


@pytest.fixture
def files(tmp_path: Path) -> list[LakeFile]:
    return [written(tmp_path, first, 100) for first in (0, 100, 200)]


def test_a_written_file_knows_its_bounds(files: list[LakeFile]) -> None:
    assert [(each.lower, each.upper) for each in files] == [(0, 99), (100, 199), (200, 299)]


def test_keys_of_known_place_are_looked_for_only_where_they_can_be(files: list[LakeFile]) -> None:
    assert candidates(files, wanted([5, 250])) == [files[0], files[2]]
    assert candidates(files, wanted([5], placed=False)) == files
    assert candidates(files, wanted([])) == []


def test_rows_are_found_by_position_and_key(files: list[LakeFile], tmp_path: Path) -> None:
    for cache in (None, KeyCache(tmp_path / "cache")):
        hits = look(Look(tuple(files), (ID,), wanted([150, 7, 9999, 8], placed=False)), cache)
        found = {
            (hit.path, *pair) for hit in hits for pair in zip(hit.positions.tolist(), hit.keys.tolist(), strict=True)
        }
        assert found == {(files[1].file.path, 50, 0), (files[0].file.path, 7, 1), (files[0].file.path, 8, 3)}


def test_text_keys_are_found_too(files: list[LakeFile]) -> None:
    keys = Wanted((pa.array(["n5", "n250", "none"]),), np.zeros(3, np.int64), np.zeros(3, bool))
    hits = look(Look(tuple(files), (NAME,), keys))
    assert [(hit.positions.tolist(), hit.keys.tolist()) for hit in hits] == [([5], [0]), ([50], [1])]


def test_deleted_rows_are_not_found(files: list[LakeFile], tmp_path: Path) -> None:
    vector = write_vector(vector_uri(f"file://{tmp_path}", "v"), [7, 9], files[0].file)
    file = replace(files[0], vectors=(vector,))
    (hit,) = look(Look((file,), (ID,), wanted([7, 8, 9])))
    assert hit.positions.tolist() == [8]
    assert look(Look((file,), (ID,), wanted([7, 9]))) == []


def test_the_lake_is_read_once(files: list[LakeFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KeyCache(tmp_path / "cache")
    look(Look(tuple(files), (ID,), wanted([1, 150], placed=False)), cache)
    monkeypatch.setattr(keycache, "scan_file", _nobody_reads)
    for again in (cache, KeyCache(tmp_path / "cache")):
        (hit,) = look(Look(tuple(files), (ID,), wanted([42])), again)
        assert hit.positions.tolist() == [42]


def _nobody_reads(*_: object, **__: object) -> None:
    raise AssertionError("the lake was read")


def test_the_cache_keeps_to_its_limit_and_survives_damage(files: list[LakeFile], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = KeyCache(folder, limit_bytes=3000)
    for _ in range(2):
        for number, each in enumerate(files):
            (hit,) = look(Look((each,), (ID,), wanted([number * 100 + 3])), cache)
            assert hit.positions.tolist() == [3]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3000
    for path in folder.iterdir():
        path.write_bytes(b"not arrow")
    (folder / "left.123.part").write_bytes(b"of a crash")
    (hit,) = look(Look((files[2],), (ID,), wanted([203])), KeyCache(folder))
    assert hit.positions.tolist() == [3]
    assert not (folder / "left.123.part").exists()
