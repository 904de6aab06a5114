"""One suite for the files of the lake by URI: a folder and the buckets of all clouds make the same promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from modak.core.errors import ModakError, Refused, UsageError
from modak.storage import Store, local_path, normal
from tests.cloud_fixtures import CLOUDS, Cloud, abfs_server, gs_server
from tests.s3_fixtures import S3Server, s3_server

__all__ = ["abfs_server", "gs_server", "s3_server"]


@dataclass(frozen=True)
class Place:
    """Where a store and its neighbours lie."""

    uri: str
    opened: Callable[[str], Store]

    def put(self, name: str, content: str = "x") -> str:
        """A file that lies there, whoever wrote it."""
        self.opened(self.uri).write(f"{self.uri}/{name}", content.encode())
        return f"{self.uri}/{name}"

    def has(self, uri: str) -> bool:
        return self.opened(self.uri).exists(uri)


@pytest.fixture(params=["folder", "bucket", *CLOUDS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place(f"file://{tmp_path}/place", Store.of)
    if request.param in CLOUDS:
        cloud: Cloud = request.getfixturevalue(f"{request.param}_server")
        return Place(f"{cloud.new_root()}/place", partial(Store.of, props=cloud.props))
    server: S3Server = request.getfixturevalue("s3_server")
    return Place(f"s3://{server.new_bucket()}/place", partial(Store.of, props=server.props))


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


def test_listing_shows_uri_size_and_time_of_every_file_below_a_folder(place: Place) -> None:
    names = ["data/op-1/a b.parquet", "data/op-1/ts_day=2020-01-01/ü%20#?.parquet", "data/op-10/c.parquet"]
    files = [place.put(name, "12345") for name in names]
    store = place.opened(place.uri)
    found = {entry.uri: entry for entry in store.list(f"{place.uri}/data/op-1")}
    assert set(found) == set(files[:2])
    assert {entry.size for entry in found.values()} == {5}
    assert all(abs(entry.modified - datetime.now(UTC)) < timedelta(hours=1) for entry in found.values())
    assert {entry.uri for entry in store.list()} == set(files)
    assert list(store.list(f"{place.uri}/nothing")) == []


def test_folders_right_below_a_folder_hold_all_of_it(place: Place) -> None:
    place.put("data/op-1/sub/a.parquet")
    place.put("data/op-2/b.parquet")
    store = place.opened(place.uri)
    assert sorted(store.folders(f"{place.uri}/data")) == [f"{place.uri}/data/op-1", f"{place.uri}/data/op-2"]
    assert list(store.folders(f"{place.uri}/nothing")) == []
    place.put("data/loose.parquet")
    assert list(store.folders(f"{place.uri}/data")) == [f"{place.uri}/data"]


def test_deleting_takes_the_named_files_and_forgives_missing_ones(place: Place) -> None:
    kept, gone = place.put("a.parquet"), place.put("b.parquet")
    store = place.opened(place.uri)
    # A bucket does not say whether there was something to delete.
    assert store.delete([gone, f"{place.uri}/never-there"]) == (1 if local_path(place.uri) else 2)
    assert store.delete([]) == 0
    assert (place.has(kept), place.has(gone)) == (True, False)


def test_more_files_than_fit_into_one_request_are_listed_and_deleted(place: Place) -> None:
    store = place.opened(place.uri)
    uris = [f"{place.uri}/many/{number:05d}" for number in range(1_100)]
    for uri in uris:
        store.write(uri, b"")
    assert sorted(entry.uri for entry in store.list()) == uris
    assert store.delete(iter(uris)) == 1_100
    assert list(store.list()) == []


def test_deleting_a_folder_leaves_its_neighbour_with_the_same_beginning(place: Place) -> None:
    for index in range(3):
        place.put(f"metadata/op-1/{index}/m.avro")
    neighbour = place.put("metadata/op-12/m.avro")
    store = place.opened(place.uri)
    assert store.delete_prefix(f"{place.uri}/metadata/op-1") == 3
    assert store.delete_prefix(f"{place.uri}/metadata/op-1") == 0
    assert [entry.uri for entry in store.list()] == [neighbour]
    folder = local_path(f"{place.uri}/metadata/op-1")
    assert folder is None or not Path(folder).exists()


@pytest.mark.parametrize("outside", ["/etc", "", "/", "{root}", "{root}/", "{root}x", "{root}/../x", "s3://bucket/x"])
def test_a_folder_outside_the_store_or_its_whole_root_is_never_deleted(place: Place, outside: str) -> None:
    kept, neighbour = place.put("w/a.parquet"), place.put("wx/a.parquet")
    root = f"{place.uri}/w"
    with pytest.raises(ModakError):
        place.opened(root).delete_prefix(outside.replace("{root}", root))
    assert place.has(kept)
    assert place.has(neighbour)


def test_no_call_reaches_beyond_the_root(place: Place) -> None:
    neighbour = place.put("wx/a.parquet")
    store = place.opened(f"{place.uri}/w")
    acts: tuple[Callable[[], object], ...] = (
        lambda: list(store.list(f"{place.uri}/wx")),
        lambda: store.folders(f"{place.uri}/wx"),
        lambda: store.delete([neighbour]),
        lambda: store.exists(neighbour),
        lambda: store.size(neighbour),
        lambda: store.read(neighbour),
        lambda: store.write(f"{place.uri}/wx/b.parquet", b""),
    )
    for act in acts:
        with pytest.raises(Refused, match="lies outside"):
            act()
    assert place.has(neighbour)


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


def test_a_file_can_be_read_measured_and_created_only_once(place: Place) -> None:
    store = place.opened(place.uri)
    uri = f"{place.uri}/metadata/v1.json"
    assert not store.exists(uri)
    store.write(uri, b"one")
    assert store.exists(uri)
    assert store.size(uri) == 3
    with pytest.raises(ModakError, match="exists already"):
        store.write(uri, b"two")
    assert store.read(uri) == b"one"
    with pytest.raises(ModakError, match="does not exist"):
        store.read(f"{place.uri}/none")
    with pytest.raises(ModakError, match="does not exist"):
        store.size(f"{place.uri}/none")


def test_the_file_system_itself_is_no_store() -> None:
    with pytest.raises(Refused):
        Store.of("/")
