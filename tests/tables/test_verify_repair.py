"""`verify --repair` makes the lake say what the heap says, whatever users write meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from modak.catalog.pk import encode
from modak.core import faults
from modak.core.faults import Fault, InjectedFault
from modak.core.names import TableName
from modak.postgres.dsn import Dsn
from modak.runtime.leader import Leader
from modak.runtime.opening import open_site
from modak.tables.registration.register import register
from modak.tables.registration.request import RegisterRequest
from modak.tables.site import Site
from modak.tables.tiering.run import tier
from modak.tables.verify.overlay import split_keys
from modak.tables.verify.repair import repair_differing
from modak.tables.verify.run import verify
from tests.lake.every_type import COLUMNS, TYPES_SQL, insert
from tests.tables.conftest import settings_for
from tests.tables.events import Events
from tests.tables.test_verify import LAKE, changed_by_hand

VISITED = {"verify.before_repair", "verify.after_repair"}
DAMAGE = (
    f"UPDATE {LAKE} SET body = 'forged' WHERE id = 3",
    f"DELETE FROM {LAKE} WHERE id = 40",
    f"INSERT INTO {LAKE} VALUES (7777, 50, 'from nowhere'), (120, 120, 'row 120')",
)


@pytest.fixture
def site(fresh_database: Dsn, warehouse: str, spark_home: Path, spark: object) -> Iterator[Site]:
    with open_site(settings_for(fresh_database, warehouse, spark_home, MODAK_RECLAIM_LAG=str(2**62))) as opened:
        _ = opened.spark
        yield opened


@pytest.fixture
def damaged(events: Events, leader: Leader) -> Events:
    events.register()
    events.tier(leader)
    changed_by_hand(events, *DAMAGE)
    return events


@pytest.mark.spark
def test_repair_writes_what_the_heap_has_at_that_moment(damaged: Events) -> None:
    def user_writes(point: str) -> None:
        if point == "verify.before_repair":
            faults.watch(None)
            damaged.sql("UPDATE public.events SET body = 'by a user' WHERE id = 3")
            damaged.sql("INSERT INTO public.events VALUES (7777, 50, 'now it exists')")

    faults.watch(user_writes)
    report = verify(damaged.site, damaged.name, on_differing=repair_differing)
    assert (report.differing_rows, report.repaired) == (4, 2)
    delta = {key: image and image["body"] for key, image in damaged.delta().items()}
    assert delta == {
        ("3", 3): "by a user",
        ("40", 40): "row 40",
        ("7777", 50): "now it exists",
        ("120", 120): "row 120",
    }
    assert verify(damaged.site, damaged.name).sound


@pytest.mark.spark
def test_a_repair_that_is_cut_short_is_finished_by_the_next(events: Events, leader: Leader) -> None:
    events.register()
    events.tier(leader)
    for at, point in enumerate(sorted(VISITED)):
        events.sql(
            'ALTER TABLE public.events_0 DISABLE TRIGGER "!modak_capture";'
            f" UPDATE public.events_0 SET body = 'unseen' WHERE id = {at};"
            f" DELETE FROM public.events_0 WHERE id = {50 + at};"
            ' ALTER TABLE public.events_0 ENABLE ALWAYS TRIGGER "!modak_capture"'
        )
        faults.arm(Fault(point))
        with pytest.raises(InjectedFault):
            verify(events.site, events.name, on_differing=repair_differing)
        faults.arm(None)
        verify(events.site, events.name, on_differing=repair_differing)
        assert verify(events.site, events.name).sound
        assert events.delta()[(str(50 + at), 50 + at)] is None
    assert events.site.reader.state(events.name).pins == ()


@pytest.mark.spark
@settings(
    max_examples=1,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    rows=st.lists(
        st.tuples(*(st.one_of(st.none(), values) for _, values in COLUMNS.values())), min_size=20, max_size=30
    )
)
def test_no_type_and_no_value_raises_a_false_alarm(site: Site, leader: Leader, rows: list[tuple[object, ...]]) -> None:
    """Half of the rows come from files, half of them through the text of the delta."""
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())
    with site.connect() as conn:
        conn.execute(TYPES_SQL)
        conn.execute(f"CREATE TABLE public.kinds (k bigint, {columns}, PRIMARY KEY (k)) PARTITION BY RANGE (k)")
        conn.execute("CREATE TABLE public.kinds_0 PARTITION OF public.kinds FOR VALUES FROM (0) TO (1000)")
        conn.execute("CREATE TABLE public.kinds_1 PARTITION OF public.kinds FOR VALUES FROM (1000) TO (2000)")
        insert(conn, "public.kinds", rows)
        conn.execute("INSERT INTO public.kinds (k) VALUES (1500)")
    name = TableName("public", "kinds")
    register(site, RegisterRequest(name, ("k",), "k"))
    assert tier(site, leader.epoch, name).rows == len(rows)
    with site.connect() as conn:
        conn.execute("UPDATE public.kinds SET k = k WHERE k % 2 = 0 AND k < 1000")
    report = verify(site, name)
    assert report.sound, (report.differences, report.findings)
    assert sum(band.delta_rows for band in report.bands) == len(rows) // 2


@pytest.mark.full
@pytest.mark.spark
def test_composite_keys_of_every_kind_are_repaired(site: Site, leader: Leader) -> None:
    with site.connect() as conn:
        conn.execute(
            "CREATE TABLE public.readings (device text, u uuid, day date, at timestamptz, value float8,"
            " PRIMARY KEY (device, u, day, at)) PARTITION BY RANGE (at)"
        )
        for at in range(3):
            low, high = (f"2024-01-0{at + 1}", f"2024-01-0{at + 2}")
            conn.execute(
                f"CREATE TABLE public.readings_{at} PARTITION OF public.readings"
                f" FOR VALUES FROM ('{low} 00:00+00') TO ('{high} 00:00+00')"
            )
        conn.execute(
            "INSERT INTO public.readings SELECT 'a' || chr(92) || chr(31) || i, md5(i::text)::uuid, '2024-02-01',"
            " timestamptz '2024-01-01 00:00+00' + i * interval '1 hour', i FROM generate_series(0, 60) i"
        )
    name = TableName("public", "readings")
    register(site, RegisterRequest(name, ("device", "u", "day"), "at"))
    assert tier(site, leader.epoch, name).rows == 48
    lake = "modak.modak.public.readings"
    with site.connect() as conn:
        conn.execute("UPDATE public.readings SET value = 100 WHERE value = 20")
    readings = Events(site, name)
    changed_by_hand(
        readings,
        f"UPDATE {lake} SET value = CAST('-0.0' AS DOUBLE) WHERE value = 0",
        f"UPDATE {lake} SET device = 'b' WHERE value = 30",
    )
    report = verify(site, name, on_differing=repair_differing)
    assert sorted((d.kind, d.column) for d in report.differences) == [
        ("changed", "value"),
        ("extra", None),
        ("missing", None),
    ]
    assert report.repaired == 3
    assert verify(site, name).sound


@given(st.lists(st.lists(st.text("ab\\\x1f\x01é", max_size=6), min_size=3, max_size=3), min_size=1, max_size=8))
def test_key_texts_come_apart_as_they_were_put_together(keys: list[list[str]]) -> None:
    import pyarrow as pa

    parts = split_keys(pa.array([encode(key) for key in keys]), 3)
    assert [list(key) for key in zip(*(part.to_pylist() for part in parts), strict=True)] == keys
