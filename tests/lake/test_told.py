"""A listing of an object store that breaks off begins anew: it tells every file once, in little memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any, cast

import pytest

from modak.core.errors import ModakError
from modak.lake.iceberg.catalog import IcebergLake
from modak.lake.iceberg.told import Told
from modak.lake.model import LakeName
from modak.postgres.dsn import Dsn

FILES = 100_000
NAME = LakeName(("modak", "public"), "events")


def path(number: int) -> str:
    folder = f"s3://bucket/warehouse/modak/public/events/data/ts_trunc=20240{number % 9}"
    return f"{folder}/op-0190c2f4-{number:012d}-0001.parquet"


@pytest.fixture
def lake(monkeypatch: pytest.MonkeyPatch) -> IcebergLake:
    """A lake on an object store; nobody waits before trying again."""
    monkeypatch.setattr(IcebergLake, "_is_remote", property(lambda _: True))
    monkeypatch.setattr("modak.lake.iceberg.catalog.pause", lambda _: 0.0)
    return IcebergLake(cast("Any", None), Dsn.parse("postgresql://nobody@nowhere/nothing"), "s3://bucket/warehouse")


def listing(broken_after: list[int]) -> Iterator[str]:
    """Another order each time, as with manifests that are read side by side."""
    times, end = len(broken_after), broken_after.pop() if broken_after else None
    for place in range(FILES):
        if place == end:
            raise ModakError("lake.storage", "the answer broke off")
        yield path((place * 7919 + times * 31) % FILES)


def test_a_listing_that_breaks_off_tells_every_file_once(lake: IcebergLake) -> None:
    broken = [FILES // 3, FILES // 2, 0]
    found = list(lake._streamed(lambda: listing(broken), str, NAME))
    assert broken == []
    assert len(found) == FILES
    assert set(found) == set(map(path, range(FILES)))


def test_a_listing_remembers_few_bytes_of_a_file(lake: IcebergLake) -> None:
    broken = [FILES - 1]
    tracemalloc.start()
    try:
        for _ in lake._streamed(lambda: listing(broken), str, NAME):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80 * FILES


def test_a_name_is_told_again_within_an_attempt_and_not_in_the_next() -> None:
    told = Told()
    assert told.is_new("a")
    assert told.is_new("a")
    told.begin_again()
    assert not told.is_new("a")
    assert told.is_new("b")
    told.begin_again()
    assert not told.is_new("a")
    assert not told.is_new("b")
