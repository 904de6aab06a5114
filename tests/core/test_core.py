"""The shared vocabulary: names, axis, widths, states, errors, fault points."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modak.core import faults
from modak.core.axis import Axis, Width
from modak.core.clock import FrozenClock
from modak.core.errors import Conflict, UsageError
from modak.core.ids import is_op_id, new_op_id
from modak.core.loopback import is_called_loopback, is_loopback
from modak.core.names import TableName
from modak.core.states import OP_STEPS, PARTITION_STEPS, OpPhase, PartitionState


@pytest.mark.parametrize(
    ("text", "schema", "name"),
    [
        ("public.events", "public", "events"),
        ("Events", "public", "events"),
        ('"Odd Schema"."Odd.Table"', "Odd Schema", "Odd.Table"),
        ('s."a""b"', "s", 'a"b'),
    ],
)
def test_a_table_name_is_read_as_sql_would(text: str, schema: str, name: str):
    assert TableName.parse(text) == TableName(schema, name)


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a.b.c", 'a."', "a b"])
def test_a_malformed_table_name_is_a_usage_error(text: str):
    with pytest.raises(UsageError):
        TableName.parse(text)


@given(st.text(min_size=1).filter(lambda s: "\x00" not in s), st.text(min_size=1))
def test_a_printed_table_name_reads_back(schema: str, name: str):
    assert TableName.parse(str(TableName(schema, name))) == TableName(schema, name)


@given(st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 1, 1)))  # noqa: DTZ001
def test_the_axis_keeps_order_and_reads_back(moment: datetime):
    for axis in (Axis.TIMESTAMP, Axis.TIMESTAMPTZ):
        assert axis.moment(axis.of(moment)) == moment.replace(tzinfo=UTC)
    day = moment.date()
    assert Axis.DATE.moment(Axis.DATE.of(day)).date() == day


def test_spans_know_the_unit_of_their_axis():
    assert Axis.INTEGER.span("100") == 100
    assert Axis.DATE.span("7d") == 7
    assert Axis.DATE.span("12h") == 1
    assert Axis.TIMESTAMPTZ.span("1h") == 3_600_000_000
    for bad in ("7d", "x", "-1", ""):
        with pytest.raises(UsageError):
            Axis.INTEGER.span(bad)


@given(axis=st.sampled_from(Axis), units=st.integers(0, 2**62))
def test_a_length_that_is_shown_can_be_given_back(axis: Axis, units: int):
    assert axis.span(axis.length(units)) == units


@pytest.mark.parametrize(
    ("axis", "units", "exactly", "about"),
    [
        (Axis.INTEGER, 1200, "1200", "1,200"),
        (Axis.DATE, 7, "7d", "7d 0h"),
        (Axis.TIMESTAMPTZ, 36 * 3_600_000_000, "36h", "1d 12h"),
        (Axis.TIMESTAMPTZ, 5_400_000_000, "90m", "1h 30m"),
        (Axis.TIMESTAMP, 61_500_000, "61500ms", "0h 1m"),
        (Axis.TIMESTAMP, 42_000_001, "42000001us", "42s"),
    ],
)
def test_lengths_are_told_in_the_words_of_their_axis(axis: Axis, units: int, exactly: str, about: str):
    assert axis.length(units) == exactly
    assert axis.roughly(units) == about


def test_first_of_month_bounds_mean_calendar_months():
    axis = Axis.DATE
    width = Width.between(axis.of(date(2024, 1, 1)), axis.of(date(2024, 2, 1)), axis)
    assert width == Width(1, months=True)
    march = width.after(axis.of(date(2024, 2, 1)), axis)
    assert axis.literal(march) == "2024-03-01"
    assert Width.between(axis.of(date(2024, 1, 1)), axis.of(date(2024, 1, 8)), axis) == Width(7)


def test_months_of_another_time_zone_are_recognised():
    axis, zone = Axis.TIMESTAMPTZ, "Europe/Berlin"
    low, high = axis.of(datetime(2026, 2, 28, 23, tzinfo=UTC)), axis.of(datetime(2026, 3, 31, 22, tzinfo=UTC))
    width = Width.between(low, high, axis, zone)
    assert width == Width(1, months=True, zone=zone)
    assert axis.moment(width.after(high, axis)) == datetime(2026, 4, 30, 22, tzinfo=UTC)


def test_every_state_has_its_steps():
    assert set(PARTITION_STEPS) == set(PartitionState)
    assert set(OP_STEPS) == set(OpPhase)


def test_an_error_survives_the_way_out_of_a_task():
    error = pickle.loads(pickle.dumps(Conflict("lake.moved", "moved", hint="again")))
    assert (type(error), error.code, error.hint, error.retryable) == (Conflict, "lake.moved", "again", True)


def test_op_ids_sort_by_time():
    clock = FrozenClock()
    first = new_op_id(clock)
    clock.sleep(1)
    assert first < new_op_id(clock)
    assert is_op_id(first)
    assert not is_op_id("../etc")


def test_an_armed_point_raises_once_it_is_reached_often_enough():
    faults.arm(faults.Fault("a.b", after=1))
    try:
        faults.reach("other")
        faults.reach("a.b")
        with pytest.raises(faults.InjectedFault):
            faults.reach("a.b")
    finally:
        faults.arm(None)


def test_one_rule_says_which_hosts_are_this_machine() -> None:
    assert all(map(is_loopback, ("localhost", "LOCALHOST", "127.0.0.1", "127.1.2.3", "::1", "[::1]")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "db", "127.0.0.1.evil.example", "localhost.evil.example")))
    assert all(map(is_called_loopback, ("localhost", "localhost:9090", "127.0.0.2:80", "[::1]", "[::1]:9090")))
    strangers = ("", ":80", "evil.example", "evil.example:80", "::1", "[::2]:80", "testserver", "[::1].evil.example")
    assert not any(map(is_called_loopback, strangers))
