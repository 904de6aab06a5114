"""Which files are merged, and in what portions."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.measurements.candidates import (
    Candidate,
    Seen,
    TierPolicy,
    choose,
    fill_batches,
    halves,
    split_candidate_into_batches,
)
from modak.measurements.layout import Place, Stamp, output_name, raw_name
from modak.measurements.windows import Level, Window
from modak.storage.objects import Meta

HOUR = Window(Level.HOUR, datetime(2026, 11, 1, 9, tzinfo=UTC))
DAY = HOUR.widened(Level.DAY)
NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
HOURLY = TierPolicy("hourly", Level.HOUR, timedelta(hours=1), 3, 1000)
DAILY = TierPolicy("daily", Level.DAY, timedelta(hours=24), 3, 1000, skip_age_after=timedelta(days=7))
JOB = "20261101t100000000-0123abcd"


def raw(
    stamp: datetime = HOUR.start, *, window: Window = HOUR, size: int = 10, modified: datetime | None = None
) -> Seen:
    global _serial
    _serial += 1
    path = f"{Place('db', 'cpu', window).folder}/{raw_name('cpu', Stamp(stamp, _serial))}"
    found = Seen.of(Meta(path, size, "e", modified or stamp))
    assert found is not None
    return found


def output(word: str = "compacted", *, window: Window = HOUR, size: int = 10) -> Seen:
    name = output_name("cpu", Stamp(HOUR.start), JOB, 0, word)
    found = Seen.of(Meta(f"{Place('db', 'cpu', window).folder}/{name}", size, "e", NOW))
    assert found is not None
    return found


_serial = 0


def test_enough_old_files_are_taken_oldest_first() -> None:
    files = [raw(HOUR.start + timedelta(minutes=minute)) for minute in (5, 1, 3)]
    assert choose(HOURLY, HOUR, files, NOW) == (files[1], files[2], files[0])


def test_too_few_files_wait() -> None:
    assert choose(HOURLY, HOUR, [raw(), raw()], NOW) == ()


def test_a_disabled_tier_takes_nothing() -> None:
    assert choose(replace(HOURLY, enabled=False), HOUR, [raw() for _ in range(5)], NOW) == ()


def test_an_age_equal_to_the_limit_is_old_enough() -> None:
    files = [raw(NOW - timedelta(hours=1)) for _ in range(3)]
    assert len(choose(HOURLY, HOUR, files, NOW)) == 3
    assert choose(HOURLY, HOUR, files, NOW - timedelta(microseconds=1)) == ()


def test_a_trickle_of_new_files_does_not_hold_back_the_old_ones() -> None:
    old, new = [raw() for _ in range(3)], [raw(NOW) for _ in range(3)]
    assert set(choose(HOURLY, HOUR, old + new, NOW)) == set(old)


def test_a_stamp_in_the_future_counts_by_when_the_store_saw_the_file() -> None:
    files = [raw(NOW + timedelta(days=400), modified=HOUR.start) for _ in range(3)]
    assert len(choose(HOURLY, HOUR, files, NOW)) == 3


def test_a_file_whose_stamp_cannot_be_read_counts_by_when_the_store_saw_it() -> None:
    files = [
        Seen.of(Meta(f"{Place('db', 'cpu', HOUR).folder}/odd-{index}.parquet", 1, "e", HOUR.start))
        for index in range(3)
    ]
    assert len(choose(HOURLY, HOUR, [file for file in files if file], NOW)) == 3


def test_an_earlier_small_output_is_merged_again_with_new_files() -> None:
    files = [*(raw() for _ in range(3)), output(size=499)]
    assert set(choose(HOURLY, HOUR, files, NOW)) == set(files)


def test_an_output_of_half_the_target_is_never_rewritten() -> None:
    files = [*(raw() for _ in range(3)), output(size=500)]
    assert set(choose(HOURLY, HOUR, files, NOW)) == set(files[:3])


def test_outputs_alone_are_no_reason_to_merge() -> None:
    assert choose(HOURLY, HOUR, [output(size=1) for _ in range(9)], NOW) == ()


def test_the_daily_tier_takes_hour_files_raw_and_compacted_and_its_own_small_outputs() -> None:
    now = NOW + timedelta(days=2)
    files = [raw(), output(), raw(), output("daily", window=DAY, size=3)]
    assert set(choose(DAILY, DAY, files, now)) == set(files)


def test_files_of_a_wider_window_or_of_another_hour_are_left_alone() -> None:
    other = Window(Level.HOUR, HOUR.end)
    files = [*(raw() for _ in range(3)), output("daily", window=DAY), raw(window=other)]
    assert set(choose(HOURLY, HOUR, files, NOW)) == set(files[:3])


def test_a_day_that_is_filled_in_late_is_taken_at_any_age() -> None:
    long_after = DAY.end + timedelta(days=7)
    files = [raw(long_after) for _ in range(3)]
    assert len(choose(DAILY, DAY, files, long_after)) == 3
    assert choose(DAILY, DAY, files, long_after - timedelta(seconds=1)) == ()
    assert choose(HOURLY, HOUR, files, long_after) == ()


def some(count: int, sizes: list[int] | None = None) -> Candidate:
    pins = tuple(Meta(f"f{index:05d}", (sizes or [1] * count)[index], "e", NOW) for index in range(count))
    return Candidate("db", "cpu", "p", tuple(pin.path for pin in pins), "hourly", HOUR.start, pins=pins)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (12, 30, [12]),
        (12, 5, [5, 5, 2]),
        (31, 30, [31]),
        (32, 30, [30, 2]),
        (0, 30, [0]),
        (1, 30, [1]),
        (40, -1, [30, 10]),
        (40, 0, [30, 10]),
        (40, 1, [30, 10]),
        (600, 10_000, [500, 100]),
        (6, 2, [2, 2, 2]),
        (7, 2, [2, 2, 3]),
    ],
)
def test_portions_by_number_of_files(count: int, size: int, expected: list[int]) -> None:
    batches = split_candidate_into_batches(some(count), size)
    assert [batch.file_count for batch in batches] == expected
    assert [batch.batch_number for batch in batches] == list(range(len(expected)))
    assert {batch.total_batches for batch in batches} == {len(expected) if len(expected) > 1 else 0}


@given(st.integers(0, 2000), st.integers(-5, 2000))
def test_every_file_is_in_exactly_one_portion_in_order_and_none_is_alone(count: int, size: int) -> None:
    batches = split_candidate_into_batches(some(count), size)
    assert [file for batch in batches for file in batch.files] == list(some(count).files)
    assert all(batch.file_count >= 2 for batch in batches) or len(batches) == 1
    assert all(batch.file_count == len(batch.pins) for batch in batches)


@given(st.lists(st.integers(0, 600), max_size=200), st.integers(1, 1000), st.integers(2, 40))
def test_portions_by_size_hold_every_file_once_and_are_full(sizes: list[int], target: int, least: int) -> None:
    whole = some(len(sizes), sizes)
    batches = fill_batches(whole, target, least)
    assert [file for batch in batches for file in batch.files] == list(whole.files)
    assert all(batch.file_count >= 2 for batch in batches) or len(batches) == 1
    for batch in batches[:-1]:
        assert batch.bytes >= target
        assert batch.file_count >= least or batch.bytes >= 4 * target


def test_a_thousand_tiny_files_are_one_portion() -> None:
    assert len(fill_batches(some(1000), 512 << 20, 30)) == 1


def test_halving_stops_at_two_files() -> None:
    first, second = halves(some(5)) or (None, None)
    assert (first and first.file_count, second and second.file_count) == (2, 3)
    assert halves(some(3)) is None
