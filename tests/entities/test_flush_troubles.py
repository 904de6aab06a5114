"""Flushes that meet trouble: what fails leaves rows dirty, and the next run loses and doubles nothing."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from modak.core import faults
from modak.core.errors import ModakError, Refused
from modak.entities.clients import ObjectsClient
from modak.entities.compaction import compact
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.lock import schema_lock
from modak.entities.reconciling import reconcile
from tests.entities.test_flush import at
from tests.entities.world import SCHEMA, World, changed, registry


class Failing(ObjectsClient):
    """A store that fails at the n-th call of one kind."""

    def __init__(self, world: World, what: str, number: int) -> None:
        super().__init__(world.objects)
        self.what, self.left = what, number

    def _count(self, what: str) -> None:
        if what == self.what:
            self.left -= 1
            if self.left == 0:
                raise ModakError("storage.failed", "The store is away.", retryable=True)

    def copy_object(self, bucket: str, source: str, target: str) -> None:
        self._count("copy")
        super().copy_object(bucket, source, target)

    def delete_object(self, bucket: str, key: str) -> None:
        self._count("delete")
        super().delete_object(bucket, key)

    def get_object(self, bucket: str, key: str) -> Any:
        self._count("get")
        return super().get_object(bucket, key)

    def put_object(self, bucket: str, key: str, data: bytes, expected: Any) -> Any:
        self._count("put")
        return super().put_object(bucket, key, data, expected)


def test_when_the_second_copy_fails_the_first_chunk_counts_and_the_rest_stays_dirty(either: World) -> None:
    world = either
    world.configure(max_batch_bytes=3 * 1024)
    world.many(0, 9)
    world.client = Failing(world, "copy", 2)
    (report,) = flush(world.store)
    assert report.error is not None
    assert (len(world.manifest.delta), world.dirty()) == (1, 6)
    assert not [path for path in world.paths() if "_tmp" in path]
    assert len(world.read()) == 9
    world.client = None
    flush(world.store)
    assert (len(world.manifest.delta), world.dirty()) == (3, 0)
    assert len(world.read()) == 9


@pytest.mark.parametrize("what", ["get", "put"])
def test_when_the_manifest_fails_rows_stay_dirty_and_the_error_names_the_key(world: World, what: str) -> None:
    world.many(0, 3)
    world.client = Failing(world, what, 1)
    (report,) = flush(world.store)
    assert report.error is not None
    assert (world.dirty(), world.manifest.version) == (3, 0)
    assert "entities/manifest/7.json" in report.error.message
    if what == "put":
        (orphan,) = world.paths()
        assert orphan in report.error.message
    world.client = None
    assert flush(world.store)[0].rows == 3
    assert len(world.read()) == 3


def test_a_temporary_file_that_cannot_be_deleted_does_not_stop_a_flush(world: World) -> None:
    world.many(0, 3)
    world.client = Failing(world, "delete", 1)
    (report,) = flush(world.store)
    assert (report.error, report.marked) == (None, 3)
    assert len(world.paths()) == 2


def test_when_marking_fails_the_rows_are_listed_twice_and_read_once(world: World) -> None:
    world.many(0, 3)
    world.sql("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$")
    world.sql("CREATE TRIGGER no BEFORE UPDATE ON change_log FOR EACH ROW EXECUTE FUNCTION no()")
    (report,) = flush(world.store)
    assert report.error is not None
    assert (len(world.manifest.delta), world.dirty()) == (1, 3)
    world.sql("DROP TRIGGER no ON change_log")
    flush(world.store)
    assert (len(world.manifest.delta), world.dirty()) == (2, 0)
    assert len(world.read()) == 3


def test_one_schema_that_fails_does_not_stop_the_others(world: World) -> None:
    other = {**changed(), "schema_id": 8, "name": "other"}
    world.registry = registry(changed(), other)
    world.many(0, 2)
    world.put(0, schema_id=8, title="other")
    world.objects.put("entities/manifest/7.json", b"not a manifest")
    first, second = flush(world.store)
    assert first.error is not None
    assert first.error.code == "entities.manifest_damaged"
    assert (second.error, second.rows) == (None, 1)


def test_a_flusher_that_was_overtaken_discards_what_it_exported(world: World) -> None:
    world.many(0, 2)

    def overtake() -> None:
        faults.watch(None)
        world.put(0, title="newer")
        from modak.entities.flushing import _try_batch
        from modak.entities.tables import check

        class Held:
            def check(self) -> None: ...

        with world.connect() as conn:
            _try_batch(world.store, check(conn, world.store.tables), world.schema, Held(), 10)  # type: ignore[arg-type]

    at("flush.before_publish", overtake)
    (report,) = flush(world.store)
    assert report.error is None
    assert world.titles() == {0: "newer", 1: "row 1"}
    world.check_objects()
    assert sorted(world.paths()) == sorted(world.manifest.paths)


def test_when_a_part_cannot_be_exported_no_temporary_file_stays(world: World) -> None:
    world.configure(max_batch_bytes=2 * 1024)
    world.many(0, 4)
    started: list[str] = []

    def fail(point: str) -> None:
        if point == "entities.share_started":
            started.append(point)
            if len(started) == 2:
                raise ModakError("postgres.connection_lost", "The connection was lost.", retryable=True)

    faults.watch(fail)
    (report,) = flush(world.store)
    faults.watch(None)
    assert report.error is not None
    assert (world.paths(), world.dirty(), world.manifest.version) == ([], 4, 0)
    assert flush(world.store)[0].rows == 4


def test_a_flusher_that_lost_its_lock_publishes_nothing(world: World) -> None:
    world.many(0, 3)
    at(
        "flush.after_export",
        lambda: world.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'modak entities lock'"
        ),
    )
    (report,) = flush(world.store)
    faults.watch(None)
    assert report.error is not None
    assert report.error.code == "entities.lock_lost"
    assert (world.manifest.version, world.dirty(), world.paths()) == (0, 3, [])
    assert flush(world.store)[0].rows == 3


def test_a_flush_that_is_cancelled_gives_its_lock_back(world: World) -> None:
    world.many(0, 3)

    def cancel() -> None:
        raise KeyboardInterrupt

    at("flush.before_export", cancel)
    with pytest.raises(KeyboardInterrupt):
        flush(world.store)
    faults.watch(None)
    with schema_lock(world.store.address, SCHEMA, "change_log") as lock:
        assert lock is not None
    assert (world.dirty(), world.paths()) == (3, [])


def test_a_file_that_vanished_before_it_was_listed_is_exported_again(world: World) -> None:
    world.many(0, 3)

    def vanish() -> None:
        world.objects.delete([path for path in world.paths() if "_tmp" not in path])

    at("entities.tmp_deleted", vanish)
    (report,) = flush(world.store)
    assert (report.error, report.rows) == (None, 3)
    world.check_objects()
    assert len(world.read()) == 3


def test_a_store_whose_manifest_is_gone_is_not_taken_for_an_empty_one(world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    before = world.titles()
    world.put(4, title="dirty")
    world.objects.delete(["entities/manifest/7.json"])
    (report,) = flush(world.store)
    assert report.error is not None
    assert report.error.code == "entities.no_manifest"
    assert "entities init --schema 7" in report.error.hint
    with pytest.raises(Refused, match=r"manifest entities/manifest/7\.json is not there"):
        world.read()
    found = reconcile(world.store, SCHEMA, repair=True).found
    assert found.lost_manifest == "entities/manifest/7.json"
    assert world.titles() == {**before, 4: "dirty"}
    flush(world.store)
    assert (world.dirty(), world.titles()) == (0, {**before, 4: "dirty"})
    assert not reconcile(world.store, SCHEMA).found.any
    world.objects.delete(["entities/manifest/7.json"])
    init(world.store, SCHEMA)
    assert world.titles() == {**before, 4: "dirty"}


def test_rows_from_before_the_log_need_an_init_and_its_manifest(world: World) -> None:
    world.many(0, 3)
    # As if they had been there before the triggers.
    world.sql("DELETE FROM change_log")
    world.put(4, title="dirty")

    def refused() -> None:
        (report,) = flush(world.store)
        assert report.error is not None
        assert (report.error.code, world.paths(), world.dirty()) == ("entities.no_manifest", before, 1)
        assert "entities init --schema 7" in report.error.hint
        with pytest.raises(Refused, match=r"manifest entities/manifest/7\.json is not there"):
            world.read()
        assert reconcile(world.store, SCHEMA).found.lost_manifest == "entities/manifest/7.json"

    before: list[str] = []
    refused()
    init(world.store, SCHEMA)
    expected = {0: "row 0", 1: "row 1", 2: "row 2", 4: "dirty"}
    assert world.titles() == expected
    # Row 4 alone was ever flushed, and nothing of it is left; the others never were.
    world.delete(4)
    world.sql("DELETE FROM change_log")
    world.put(4, title="dirty")
    before = world.paths()
    world.objects.delete(["entities/manifest/7.json"])
    refused()
    reconcile(world.store, SCHEMA, repair=True)
    assert world.titles() == expected
    flush(world.store)
    assert (world.dirty(), world.titles()) == (0, expected)


def test_rows_that_were_deleted_before_the_log_need_no_init(world: World) -> None:
    world.put(1, title="buried")
    world.bury(1)
    world.sql("DELETE FROM change_log")
    assert world.read() == {}
    world.put(2, title="new")
    assert flush(world.store)[0].rows == 1
    assert world.titles() == {2: "new"}


@pytest.mark.parametrize("error", [OSError("No space left on device"), MemoryError(), pa.ArrowInvalid("odd")])
def test_an_error_of_any_kind_in_one_schema_does_not_stop_the_others(world: World, error: Exception) -> None:
    other = {**changed(), "schema_id": 8, "name": "other"}
    world.registry = registry(changed(), other)
    world.configure(max_batch_bytes=2 * 1024)
    world.many(0, 4)
    world.put(0, schema_id=8, title="other")
    written: list[str] = []

    def fail(point: str) -> None:
        if point == "entities.share_written":
            written.append(point)
            if len(written) == 2:
                raise error

    faults.watch(fail)
    first, second = flush(world.store)
    faults.watch(None)
    assert first.error is not None
    assert type(error).__name__ in first.error.message
    assert (second.error, second.rows) == (None, 1)
    assert world.dirty() == 4
    assert not [path for path in world.paths() if "_tmp" in path]
    assert flush(world.store)[0].rows == 4


def test_an_error_of_any_kind_in_one_compaction_does_not_stop_the_others(world: World) -> None:
    other = {**changed(), "schema_id": 8, "name": "other"}
    world.registry = registry(changed(), other)
    world.put(0, title="one")
    world.put(0, schema_id=8, title="other")
    flush(world.store)

    def fail() -> None:
        raise OSError("No space left on device")

    at("compaction.share_started", fail)
    first, second = compact(world.store)
    faults.watch(None)
    assert first.error is not None
    assert "No space left" in first.error.message
    assert second.merged == 1
