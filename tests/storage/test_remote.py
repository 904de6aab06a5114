"""One suite for single files by URI, as the writers and readers of the lake use them: a folder and buckets."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modak.core.errors import Conflict, ModakError
from modak.lake.iceberg.output import mapped, open_output, parquet_file, read_range, remove, size_of
from modak.storage import access, remote
from modak.storage.access import Key
from tests.cloud_fixtures import CLOUDS, Cloud, abfs_server, gs_server
from tests.s3_fixtures import S3Server, s3_server

__all__ = ["abfs_server", "gs_server", "s3_server"]


@pytest.fixture(params=["folder", "bucket", *CLOUDS])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/root"
    if request.param in CLOUDS:
        cloud: Cloud = request.getfixturevalue(f"{request.param}_server")
        lies = f"{cloud.new_root()}/some/root"
        access.use([Key(lies, cloud.props)])
        return lies
    server: S3Server = request.getfixturevalue("s3_server")
    made = f"s3://{server.new_bucket()}/some/root"
    access.use([Key(made, server.props)])
    return made


def _write(uri: str, data: bytes) -> int:
    output = open_output(uri)
    output.stream.write(data)
    return output.commit()


def test_a_file_is_there_whole_once_it_is_committed(root: str) -> None:
    uri = f"{root}/data/a b.bin"
    assert _write(uri, b"0123456789") == 10
    assert (size_of(uri), read_range(uri, 3, 4)) == (10, b"3456")
    with mapped(uri) as source:
        assert source.read() == b"0123456789"


def test_a_discarded_file_leaves_nothing(root: str) -> None:
    output = open_output(f"{root}/x")
    output.stream.write(b"half")
    output.discard()
    with pytest.raises(ModakError) as gone:
        remote.size(f"{root}/x")
    assert gone.value.code == "storage.missing"
    remove(f"{root}/x")


def test_parquet_is_read_by_ranges(root: str) -> None:
    table = pa.table({"id": list(range(10_000)), "body": ["x" * 100] * 10_000})
    output = open_output(f"{root}/a.parquet")
    pq.write_table(table, output.stream, row_group_size=1_000)
    output.commit()
    with parquet_file(f"{root}/a.parquet") as file:
        assert file.metadata.num_rows == 10_000
        assert file.read_row_group(7, columns=["id"]).column("id").to_pylist() == list(range(7_000, 8_000))


def test_a_copy_is_of_the_version_that_was_seen(root: str) -> None:
    _write(f"{root}/a", b"one")
    seen = remote.identity(f"{root}/a")[1]
    remote.copy(f"{root}/a", f"{root}/sub/b", seen)
    assert read_range(f"{root}/sub/b", 0, 3) == b"one"
    _write(f"{root}/a", b"two!")
    with pytest.raises(Conflict, match="written to while it was copied"):
        remote.copy(f"{root}/a", f"{root}/c", seen)


def test_files_cross_between_a_folder_and_a_bucket(root: str, tmp_path: Path, s3_server: S3Server) -> None:
    other = f"s3://{s3_server.new_bucket()}/elsewhere"
    access.use([Key(other, s3_server.props)])
    _write(f"{root}/a", b"data" * 1000)
    remote.copy(f"{root}/a", f"{other}/a", remote.identity(f"{root}/a")[1])
    remote.copy(f"{other}/a", f"file://{tmp_path}/back", remote.identity(f"{other}/a")[1])
    assert (tmp_path / "back").read_bytes() == b"data" * 1000


def test_what_is_too_large_for_one_copy_is_carried(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"s3://{s3_server.new_bucket()}/r"
    access.use([Key(root, s3_server.props)])
    monkeypatch.setattr(remote, "_COPY_LIMIT", 1 << 20)
    monkeypatch.setattr(remote, "_PART", 5 << 20)
    data = bytes(range(256)) * (11 << 12)
    _write(f"{root}/a", data)
    remote.copy(f"{root}/a", f"{root}/b", remote.identity(f"{root}/a")[1])
    assert read_range(f"{root}/b", 0, len(data)) == data
