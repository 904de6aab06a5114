"""One suite for every kind of store: a folder and the buckets of all clouds make the same promises."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from modak.core import faults
from modak.core.errors import ModakError, Refused
from modak.core.faults import Fault, InjectedFault
from modak.storage.objects import Meta, Objects, Stored
from tests.cloud_fixtures import CLOUDS, Cloud, abfs_server, gs_server
from tests.s3_fixtures import S3Server, s3_server

__all__ = ["abfs_server", "gs_server", "s3_server"]

HOSTILE = ("../x", "a/../b", "/abs", "a//b", "a/", "", ".", "a/./b", "a\\b", "a\0b", "a\nb", "e\u0301")


@pytest.fixture(params=["folder", "bucket", *CLOUDS])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "folder":
        return Objects.of(str(tmp_path / "root"))
    if request.param in CLOUDS:
        cloud: Cloud = request.getfixturevalue(f"{request.param}_server")
        return Objects.of(f"{cloud.new_root()}/some/root", cloud.props)
    server: S3Server = request.getfixturevalue("s3_server")
    return Objects.of(f"s3://{server.new_bucket()}/some/root", server.props)


@pytest.fixture
def folder(tmp_path: Path) -> Objects:
    return Objects.of(str(tmp_path / "root"))


def _paths(found: object) -> list[str]:
    return [meta.path for meta in found]  # type: ignore[attr-defined]


def test_what_was_put_is_read_back_with_its_version(objects: Objects) -> None:
    written = objects.put("db/cpu/1.parquet", b"one")
    assert objects.get("db/cpu/1.parquet") == Stored(b"one", objects.head("db/cpu/1.parquet"))  # type: ignore[arg-type]
    found = objects.head("db/cpu/1.parquet")
    assert found is not None
    assert (found.path, found.size, found.etag) == ("db/cpu/1.parquet", 3, written.etag)
    assert abs(found.modified - datetime.now(UTC)) < timedelta(hours=1)


def test_an_object_that_is_not_there_is_none_or_an_error_that_says_so(objects: Objects, tmp_path: Path) -> None:
    assert objects.head("nothing") is None
    assert objects.find("nothing") is None
    for ask in (lambda: objects.get("nothing"), lambda: objects.fetch("nothing", tmp_path / "f")):
        with pytest.raises(ModakError) as caught:
            ask()
        assert caught.value.code == "storage.not_found"


def test_the_end_of_an_object_is_read_alone(objects: Objects) -> None:
    objects.put("a", b"0123456789")
    objects.put("empty", b"")
    for size, expected in ((1, b"9"), (4, b"6789"), (10, b"0123456789"), (100, b"0123456789")):
        assert objects.tail("a", size) == Stored(expected, objects.head("a"))  # type: ignore[arg-type]
    assert objects.tail("empty", 5).data == b""
    with pytest.raises(ModakError, match="does not exist"):
        objects.tail("nothing", 5)


def test_every_version_has_another_etag(objects: Objects) -> None:
    etags = [objects.put("a", f"{index:04d}".encode()).etag for index in range(40)]
    assert len(set(etags)) == len(etags)
    assert objects.head("a").etag == etags[-1]  # type: ignore[union-attr]
    assert next(objects.list()).etag == etags[-1]


def test_listings_are_sorted_by_the_whole_path_and_can_start_anywhere(objects: Objects) -> None:
    paths = ["a", "a-b/c", "a.x", "a/b", "a/b-1", "a/b/c", "a/b0", "b/ü d%20#?.parquet", "b/z", "ab/c"]
    for path in reversed(paths):
        if path not in ("a", "a/b"):
            objects.put(path, b"x")
    expected = sorted(set(paths) - {"a", "a/b"})
    assert _paths(objects.list()) == expected
    for after in [*expected, "a/", "a/b/", "zz", "0"]:
        assert _paths(objects.list(after=after)) == [path for path in expected if path > after], after
    assert _paths(objects.list("a")) == [path for path in expected if path.startswith("a/")]
    assert _paths(objects.list("a/b")) == ["a/b/c"]
    assert _paths(objects.list("nowhere")) == []


def test_listings_go_over_many_pages(objects: Objects) -> None:
    objects.put("m/start", b"")
    for index in range(1_100):
        objects.create(f"m/{index:05d}", b"x")
    assert len(_paths(objects.list("m"))) == 1_101
    assert objects.delete(_paths(objects.list("m"))) == 1_101
    assert _paths(objects.list("m")) == []


def test_folders_are_those_directly_inside(objects: Objects) -> None:
    for path in ("db/cpu/2026/a", "db/mem/2026/b", "other/x", "top"):
        objects.put(path, b"x")
    assert objects.folders() == ("db", "other")
    assert objects.folders("db") == ("db/cpu", "db/mem")
    assert objects.folders("nowhere") == ()


def test_of_two_creators_one_wins(objects: Objects) -> None:
    assert objects.create("claim", b"mine") is not None
    assert objects.create("claim", b"yours") is None
    assert objects.get("claim").data == b"mine"


def test_a_swap_needs_the_version_that_was_seen(objects: Objects) -> None:
    first = objects.put("state", b"1")
    second = objects.swap("state", b"2", first)
    assert second is not None
    assert objects.swap("state", b"3", first) is None
    assert objects.get("state").data == b"2"
    assert objects.swap("state", b"3", objects.get("state").meta) is not None
    objects.delete(["state"])
    assert objects.swap("state", b"4", second) is None
    assert objects.head("state") is None


def test_a_counter_raised_by_many_threads_loses_no_step(objects: Objects) -> None:
    objects.put("counter", b"0")
    lost = []

    def raise_it() -> None:
        for _ in range(5):
            while True:
                seen = objects.get("counter")
                if objects.swap("counter", str(int(seen.data) + 1).encode(), seen.meta) is not None:
                    break
                lost.append(1)

    _together(4, raise_it)
    assert objects.get("counter").data == b"20"


def test_of_many_threads_that_create_one_wins(objects: Objects) -> None:
    won: list[str] = []

    def create() -> None:
        name = threading.current_thread().name
        if objects.create("claim", name.encode()) is not None:
            won.append(name)

    _together(8, create)
    assert [name.encode() for name in won] == [objects.get("claim").data]


def test_files_go_up_and_come_down_whole(objects: Objects, tmp_path: Path) -> None:
    source, target = tmp_path / "up", tmp_path / "down"
    source.write_bytes(os.urandom(1 << 20) * 20)
    meta = objects.upload("big/file", source)
    assert meta.size == 20 << 20
    assert objects.fetch("big/file", target) == objects.head("big/file")
    assert target.read_bytes() == source.read_bytes()


def test_deleting_forgives_what_is_gone(objects: Objects) -> None:
    objects.put("a", b"x")
    objects.delete(["a", "never-there"])
    objects.delete([])
    assert objects.head("a") is None


@pytest.mark.parametrize("path", HOSTILE)
def test_paths_that_lead_elsewhere_are_refused(objects: Objects, path: str, tmp_path: Path) -> None:
    seen = Meta(path, 0, "", datetime.now(UTC))
    calls: list[Callable[[], object]] = [
        lambda: objects.head(path),
        lambda: objects.get(path),
        lambda: objects.put(path, b""),
        lambda: objects.create(path, b""),
        lambda: objects.swap(path, b"", seen),
        lambda: objects.fetch(path, tmp_path / "f"),
        lambda: objects.delete([path]),
    ]
    if path:
        calls.append(lambda: list(objects.list(path)))
    for call in calls:
        with pytest.raises(Refused):
            call()


def test_objects_travel_by_where_they_are_and_never_show_their_keys(objects: Objects) -> None:
    objects.put("a", b"x")
    assert pickle.loads(pickle.dumps(objects)).get("a").data == b"x"
    assert "modak-secret" not in repr(objects)


def test_trouble_with_a_bucket_is_told_in_a_sentence_without_the_keys(s3_server: S3Server) -> None:
    missing = Objects.of("s3://no-such-bucket-here", s3_server.props)
    with pytest.raises(ModakError) as caught:
        list(missing.list())
    assert caught.value.code.startswith("storage.")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("point", ["objects.writing", "objects.written", "objects.draft_written", "objects.named"])
def test_a_write_that_is_interrupted_is_all_or_nothing(folder: Objects, point: str) -> None:
    for write, before in ((folder.put, b"old"), (folder.create, None)):
        if before is not None:
            folder.put("x", before)
        faults.arm(Fault(point))
        with pytest.raises(InjectedFault):
            write("x", b"new")
        faults.arm(None)
        found = folder.find("x")
        assert (found.data if found else None) in (before, b"new")
        folder.delete(["x"])


@pytest.mark.parametrize("point", ["objects.deleting", "objects.deleted"])
def test_a_delete_that_is_interrupted_can_be_done_again(folder: Objects, point: str) -> None:
    folder.put("x", b"old")
    faults.arm(Fault(point))
    with pytest.raises(InjectedFault):
        folder.delete(["x"])
    faults.arm(None)
    folder.delete(["x"])
    assert folder.head("x") is None


def test_what_a_killed_writer_left_is_swept_and_never_listed(folder: Objects, tmp_path: Path) -> None:
    folder.put("x", b"kept")
    child = os.fork()
    if child == 0:
        faults.arm(Fault("objects.draft_written", "kill"))
        folder.put("x", b"never")
        os._exit(0)
    os.waitpid(child, 0)
    drafts = tmp_path / "root" / ".modak" / "drafts"
    assert len(list(drafts.iterdir())) == 1
    assert _paths(folder.list()) == ["x"]
    assert folder.folders() == ()
    assert folder.sweep(timedelta(hours=1)) == 0
    time.sleep(0.01)
    assert folder.sweep(timedelta(0)) == 1
    assert list(drafts.iterdir()) == []
    assert folder.get("x").data == b"kept"


def test_links_out_of_the_folder_are_neither_listed_nor_followed(folder: Objects, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "treasure").write_bytes(b"x")
    (tmp_path / "root" / "link").symlink_to(outside, target_is_directory=True)
    (tmp_path / "root" / "file").symlink_to(outside / "treasure")
    assert _paths(folder.list()) == []
    assert _paths(folder.list("link")) == []
    assert folder.folders() == ()
    assert folder.head("file") is None
    for act in (lambda: folder.delete(["link/treasure"]), lambda: folder.put("link/treasure", b"")):
        with pytest.raises(Refused):
            act()
    assert (outside / "treasure").read_bytes() == b"x"


def test_the_private_folder_is_out_of_reach(folder: Objects) -> None:
    with pytest.raises(Refused):
        folder.put(".modak/drafts/x", b"")
    with pytest.raises(Refused):
        Objects.of("/")


def _together(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_objects_are_copied_inside_the_store(objects: Objects) -> None:
    objects.put("a/tmp", b"data")
    objects.put("b/final", b"older")
    objects.copy("a/tmp", "b/final")
    assert objects.get("b/final").data == objects.get("a/tmp").data == b"data"
    objects.delete(["a/tmp"])
    assert objects.get("b/final").data == b"data"
    with pytest.raises(ModakError, match="a/tmp does not exist") as caught:
        objects.copy("a/tmp", "b/other")
    assert caught.value.code == "storage.not_found"
    assert objects.head("b/other") is None
