"""Names and paths: what is written is what is read back, whatever the names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.core.clock import FrozenClock
from modak.core.errors import Refused
from modak.core.ids import new_op_id
from modak.measurements.layout import (
    TIER_WORDS,
    FileName,
    Place,
    Stamp,
    check_name,
    name_problem,
    output_name,
    parse_folder,
    parse_name,
    parse_path,
    raw_name,
)
from modak.measurements.windows import Level, Window, window_at, window_of

SEGMENT = st.text(
    st.characters(codec="utf-8", exclude_characters="/*?[]{}:=\\", exclude_categories=("Cc", "Cs")),
    min_size=1,
    max_size=12,
).filter(lambda name: name_problem(name) is None)
DATABASE = st.lists(SEGMENT, min_size=1, max_size=3).map("/".join)
MOMENT = st.integers(0, 7_000_000_000_000_000).map(
    lambda us: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)
)
WINDOW = st.builds(window_of, st.sampled_from(Level), MOMENT)
NEW_YEAR = Stamp(datetime(2026, 1, 1, tzinfo=UTC), 1)
STAMP = st.builds(Stamp, MOMENT.map(lambda moment: moment.replace(microsecond=0)), st.integers(0, 999_999_999))


@given(STAMP)
def test_a_stamp_is_read_back_as_it_was_written(stamp: Stamp) -> None:
    assert Stamp.parse(str(stamp)) == stamp


@given(st.lists(STAMP, min_size=2, max_size=20))
def test_stamps_sort_as_their_text_does(stamps: list[Stamp]) -> None:
    assert [str(stamp) for stamp in sorted(stamps)] == sorted(map(str, stamps))


@pytest.mark.parametrize("text", ["", "20261301_000000_1", "20260101_240000_1", "2026_01_01", "20260101_000000_"])
def test_what_is_no_stamp_is_none(text: str) -> None:
    assert Stamp.parse(text) is None


def test_nanoseconds_since_1970_are_taken_for_those_within_the_second() -> None:
    assert Stamp.parse("20260411_140000_1775916000000000123") == Stamp(datetime(2026, 4, 11, 14, tzinfo=UTC), 123)


@given(DATABASE, SEGMENT, WINDOW, STAMP)
def test_a_raw_path_is_read_back_from_the_right(database: str, measurement: str, window: Window, stamp: Stamp) -> None:
    place = Place(database, measurement, window)
    assert parse_path(f"{place.folder}/{raw_name(measurement, stamp)}") == (place, FileName(stamp))
    assert parse_folder(place.folder) == place


@given(SEGMENT, STAMP, st.integers(0, 20_000), st.sampled_from(sorted(TIER_WORDS.values())))
def test_the_name_of_an_output_is_read_back(measurement: str, stamp: Stamp, part: int, word: str) -> None:
    job = new_op_id(FrozenClock())
    assert parse_name(output_name(measurement, stamp, job, part, word)) == FileName(stamp, job, part, word)


def test_two_jobs_of_one_moment_never_share_a_name() -> None:
    clock = FrozenClock()
    names = {output_name("cpu", Stamp.of(clock.now()), new_op_id(clock), 0, "compacted") for _ in range(100)}
    assert len(names) == 100


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cpu_compacted.parquet", FileName(None, tier="compacted")),
        (
            "cpu_20260101_000000_1_compacted.parquet",
            FileName(NEW_YEAR, tier="compacted"),
        ),
        ("cpu_usage.parquet", FileName(None)),
        ("cpu_20269999_000000_1.parquet", FileName(None)),
        ("cpu_daily_20260101_000000_1.parquet", FileName(NEW_YEAR)),
        (".cpu.parquet", None),
        ("_cpu.parquet", None),
        ("cpu.csv", None),
        ("cpu.parquet.tmp", None),
    ],
)
def test_names_that_others_wrote_say_what_they_can(name: str, said: FileName | None) -> None:
    assert parse_name(name) == said


@pytest.mark.parametrize(
    "folder", ["cpu/2026/01/01/00", "db/cpu/2026/13/01/00", "db/cpu/2026/01/32", "db/cpu/2026", "db/cpu/w1", "", "x"]
)
def test_a_folder_that_is_no_window_of_a_measurement_is_none(folder: str) -> None:
    assert parse_folder(folder) is None


@pytest.mark.parametrize(
    "name",
    [
        "_x",
        ".x",
        "a/_x",
        "a*",
        "a?",
        "a[1]",
        "a{b}",
        "a:b",
        "a=b",
        "a\\b",
        "a\nb",
        "..",
        "a/../b",
        "",
        "a//b",
        "e\u0301",
    ],
)
def test_names_that_readers_would_take_for_something_else_are_refused(name: str) -> None:
    with pytest.raises(Refused, match="cannot be the name"):
        check_name("database", name)


def test_a_database_may_have_slashes_and_a_measurement_may_not() -> None:
    assert check_name("database", "team/eu/prod") == "team/eu/prod"
    with pytest.raises(Refused):
        check_name("measurement", "a/b")


@given(MOMENT)
def test_every_window_lies_inside_the_wider_one(moment: datetime) -> None:
    windows = [window_of(level, moment) for level in Level]
    for narrow, wide in pairwise(windows):
        assert narrow in wide
        assert narrow.widened(wide.level) == wide
    for window in windows:
        assert window.start <= moment < window.end
        assert window_at(window.folder) == window
        assert window_of(window.level, window.end).start == window.end


@given(MOMENT)
def test_weeks_fill_their_month_without_gap_or_overlap(moment: datetime) -> None:
    month = window_of(Level.MONTH, moment)
    at, weeks = month.start, 0
    while at < month.end:
        week = window_of(Level.WEEK, at)
        assert week.start == at
        assert timedelta(days=7) <= week.end - week.start <= timedelta(days=10)
        at, weeks = week.end, weeks + 1
    assert (at, weeks) == (month.end, 4)
