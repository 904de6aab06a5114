from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from modak.core.errors import ModakError, Refused, UsageError
from modak.storage import Store, local_path, normal


def _put(folder: Path, name: str, content: str = "x") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    "spelling", ["/w/t/a b%20.parquet", "file:/w/t/a b%20.parquet", "file:///w//t/./a b%20.parquet"]
)
def test_every_spelling_of_a_local_path_is_one_uri(spelling: str) -> None:
    assert normal(spelling) == "file:///w/t/a b%20.parquet"
    assert local_path(spelling) == "/w/t/a b%20.parquet"


def test_s3_dialects_are_one_scheme_and_keys_stay_as_they_are() -> None:
    assert normal("s3a://bucket/a//b/") == "s3://bucket/a//b"
    assert local_path("s3://bucket/a") is None


@pytest.mark.parametrize(
    "uri", ["relative/path", "/a/../b", "s3://bucket/../x", "file://other/x", "s3:///x", "s3:bucket"]
)
def test_an_address_that_could_mean_something_else_is_refused(uri: str) -> None:
    with pytest.raises(UsageError):
        normal(uri)


def test_listing_shows_uri_size_and_time_of_every_file_below_a_folder(tmp_path: Path) -> None:
    names = ["data/op-1/a b.parquet", "data/op-1/ts_day=2020-01-01/ü%20#?.parquet", "data/op-10/c.parquet"]
    for name in names:
        _put(tmp_path, name, "12345")
    store = Store.of(str(tmp_path))
    found = {entry.uri: entry for entry in store.list(f"{tmp_path}/data/op-1")}
    assert set(found) == {f"file://{tmp_path}/{name}" for name in names[:2]}
    assert {entry.size for entry in found.values()} == {5}
    assert all(abs(entry.modified - datetime.now(UTC)) < timedelta(hours=1) for entry in found.values())
    assert len(list(store.list())) == 3
    assert list(store.list(f"{tmp_path}/nothing")) == []


def test_deleting_takes_the_named_files_and_forgives_missing_ones(tmp_path: Path) -> None:
    kept, gone = _put(tmp_path, "a.parquet"), _put(tmp_path, "b.parquet")
    store = Store.of(f"file:{tmp_path}")
    assert store.delete([str(gone), f"file:{tmp_path}/never-there"]) == 1
    assert kept.exists()
    assert not gone.exists()


def test_deleting_a_folder_leaves_its_neighbour_with_the_same_beginning(tmp_path: Path) -> None:
    for index in range(3):
        _put(tmp_path, f"metadata/op-1/{index}/m.avro")
    neighbour = _put(tmp_path, "metadata/op-12/m.avro")
    store = Store.of(str(tmp_path))
    assert store.delete_prefix(f"{tmp_path}/metadata/op-1") == 3
    assert not (tmp_path / "metadata/op-1").exists()
    assert neighbour.exists()


@pytest.mark.parametrize("outside", ["/etc", "", "/", "{root}", "{root}/", "{root}x", "{root}/../x", "s3://bucket/x"])
def test_a_folder_outside_the_store_or_its_whole_root_is_never_deleted(tmp_path: Path, outside: str) -> None:
    root = tmp_path / "w"
    kept = _put(root, "a.parquet")
    neighbour = _put(tmp_path, "wx/a.parquet")
    with pytest.raises(ModakError):
        Store.of(str(root)).delete_prefix(outside.replace("{root}", str(root)))
    assert kept.exists()
    assert neighbour.exists()


def test_a_link_out_of_the_store_is_neither_listed_nor_followed_by_a_delete(tmp_path: Path) -> None:
    treasure = _put(tmp_path, "elsewhere/treasure.parquet")
    root = tmp_path / "w"
    _put(root, "t/a.parquet")
    (root / "t" / "link").symlink_to(treasure.parent, target_is_directory=True)
    store = Store.of(str(root))
    assert [entry.uri for entry in store.list()] == [f"file://{root}/t/a.parquet"]
    with pytest.raises(Refused):
        store.delete([f"{root}/t/link/treasure.parquet"])
    store.delete_prefix(f"{root}/t")
    assert treasure.exists()


def test_a_store_reached_through_a_link_works_like_any_other(tmp_path: Path) -> None:
    _put(tmp_path, "real/t/a.parquet")
    (tmp_path / "alias").symlink_to(tmp_path / "real", target_is_directory=True)
    store = Store.of(str(tmp_path / "alias"))
    assert store.delete_prefix(f"{tmp_path}/alias/t") == 1


def test_a_file_can_be_read_measured_and_created_only_once(tmp_path: Path) -> None:
    store = Store.of(str(tmp_path))
    uri = f"file://{tmp_path}/metadata/v1.json"
    assert not store.exists(uri)
    store.write(uri, b"one")
    assert store.exists(uri)
    assert store.size(uri) == 3
    with pytest.raises(ModakError, match="exists already"):
        store.write(uri, b"two")
    assert store.read(uri) == b"one"
    with pytest.raises(ModakError, match="does not exist"):
        store.read(f"{tmp_path}/none")
    with pytest.raises(ModakError, match="does not exist"):
        store.size(f"{tmp_path}/none")


def test_the_file_system_itself_is_no_store() -> None:
    with pytest.raises(Refused):
        Store.of("/")
