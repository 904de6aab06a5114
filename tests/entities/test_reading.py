"""Reading through Spark: one frame, newest versions only, whatever filter is put on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import modak.entities
from modak.core import faults
from modak.core.errors import ModakError, UsageError
from modak.entities.compaction import compact
from modak.entities.flushing import flush
from modak.entities.initial import init
from modak.entities.store import Crew
from modak.entities.verifying import verify
from tests.entities.test_flush import at
from tests.entities.world import SCHEMA, World, key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_a_frame_has_every_row_in_its_newest_version(spark: SparkSession, world: World) -> None:
    # Everything by Spark tasks, however few rows there are.
    world.crew = Crew(lambda: spark, driver_rows=0)
    world.configure(target_file_size_mb=0, batch_size=8)
    world.many(0, 20)
    assert init(world.store, SCHEMA).files == 3
    world.put(0, title="newer", tags=["x", "y"], amount="1.5", due=5, paid="true")
    world.delete(1)
    flush(world.store)
    world.put(2, title="unflushed")
    world.delete(3)
    world.put(30, title="new")
    frame = modak.entities.read(spark, world.store, "invoice")
    expected = world.read()
    assert {row["row_id"]: row.asDict() for row in frame.collect()} == expected
    assert frame.count() == 19
    # A newer version that does not match never lets an older one through.
    assert frame.where("title = 'row 0'").count() == 0
    assert modak.entities.read(spark, world.store, SCHEMA, where="title = 'row 2'").isEmpty()
    assert modak.entities.read(spark, world.store, SCHEMA, where="title in ('newer', 'unflushed')").count() == 2
    # A filter may use attributes that are not shown; what it pushes down changes no answer.
    shown = modak.entities.read(spark, world.store, SCHEMA, ["title"], where="amount = 1.5 and tags is not null")
    assert [row["title"] for row in shown.collect()] == ["newer"]
    assert shown.columns[-1] == "title"
    found = modak.entities.read(spark, world.store, SCHEMA, ["title"], where=f"row_id in ('{key(2)}', '{key(5)}')")
    assert {row["title"] for row in found.collect()} == {"unflushed", "row 5"}
    few = modak.entities.read(spark, world.store, SCHEMA, ["title"], row_ids=[key(0).upper(), key(2), key(3), key(5)])
    assert {row["title"] for row in few.collect()} == {"newer", "unflushed", "row 5"}
    assert few.columns[-1] == "title"
    assert verify(world.store, SCHEMA).sound
    (report,) = compact(world.store)
    assert report.error is None
    assert {row["row_id"]: row.asDict() for row in modak.entities.read(spark, world.store, 7).collect()} == expected
    with pytest.raises(UsageError, match="no attribute 'colour'"):
        modak.entities.read(spark, world.store, SCHEMA, ["colour"])
    with pytest.raises(UsageError, match="no schema 'order'"):
        modak.entities.read(spark, world.store, "order")


def test_a_store_without_files_is_read_from_postgres(spark: SparkSession, world: World) -> None:
    assert modak.entities.read(spark, world.store, SCHEMA).isEmpty()
    world.many(0, 3)
    assert modak.entities.read(spark, world.store, SCHEMA).count() == 3


def test_a_flush_in_the_middle_of_a_read_hides_nothing(spark: SparkSession, world: World) -> None:
    world.many(0, 3)
    at("read.manifest_read", lambda: flush(world.store))
    frame = modak.entities.read(spark, world.store, SCHEMA)
    faults.watch(None)
    assert frame.count() == 3


def test_a_file_that_is_gone_is_an_error_and_never_fewer_rows(spark: SparkSession, world: World) -> None:
    world.many(0, 3)
    flush(world.store)
    world.objects.delete(world.paths())
    frame = modak.entities.read(spark, world.store, SCHEMA)
    with pytest.raises(ModakError, match="does not exist") as caught:
        frame.count()
    assert caught.value.retryable
