"""Small stores to try things on, and what can be seen of them from outside."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from modak.core.clock import Clock, FrozenClock
from modak.measurements.discover import Source, seen_files, sources
from modak.measurements.layout import Place, Stamp, raw_name
from modak.measurements.manager import Manager, ManagerConfig
from modak.measurements.runners import Runner
from modak.measurements.state import Patience, State
from modak.measurements.tiers import DailyTier, DailyTierConfig, HourlyTier, HourlyTierConfig, Tier
from modak.measurements.windows import Level, window_of
from modak.storage.objects import Objects

HOUR = datetime(2026, 11, 1, 9, tzinfo=UTC)
NOW = HOUR + timedelta(days=30)
AT_ONCE = Patience(timedelta(0), 0.4, timedelta(seconds=30), timedelta(0))
Rows = Counter[tuple[Any, ...]]
_serial = 0


def points(start: datetime, count: int, host: str = "a", step: int = 1) -> list[dict[str, Any]]:
    """Rows of a measurement, one a second."""
    return [
        {"time": start + timedelta(seconds=index * step), "host": host, "value": float(index)} for index in range(count)
    ]


def table(rows: list[dict[str, Any]], tags: str | None = "host") -> pa.Table:
    """Rows as a writer has them."""
    schema = pa.schema([("time", pa.timestamp("us", tz="UTC")), ("host", pa.string()), ("value", pa.float64())])
    built = pa.Table.from_pylist(rows, schema)
    return built.replace_schema_metadata({"arc:tags": tags} if tags else None)


def write(
    objects: Objects,
    data: pa.Table | bytes,
    *,
    database: str = "db",
    measurement: str = "cpu",
    hour: datetime = HOUR,
    stamp: datetime | None = None,
) -> str:
    """Flush a file as a writer does; its path."""
    global _serial
    _serial += 1
    place = Place(database, measurement, window_of(Level.HOUR, hour))
    path = f"{place.folder}/{raw_name(measurement, Stamp(stamp or hour, _serial))}"
    objects.put(path, data if isinstance(data, bytes) else parquet(data))
    return path


def parquet(data: pa.Table) -> bytes:
    """A table as a file."""
    sink = io.BytesIO()
    pq.write_table(data, sink)
    return sink.getvalue()


def fill(objects: Objects, files: int = 4, rows: int = 5, hour: datetime = HOUR, **more: Any) -> Rows:
    """Some files in one hour; their rows."""
    expected: Rows = Counter()
    for index in range(files):
        some = points(hour + timedelta(minutes=index), rows, host=f"h{index}")
        write(objects, table(some), hour=hour, **more)
        expected.update(as_tuples(some))
    return expected


def as_tuples(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Rows without order."""
    return Counter(tuple(sorted((name, _plain(value)) for name, value in row.items())) for row in rows)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def visible_rows(state: State, source: Source) -> Rows:
    """What a reader counts now."""
    listed = list(seen_files(state.objects, source))
    found: Rows = Counter()
    for file in state.account(source).visible(listed, source.folder):
        data = pq.read_table(io.BytesIO(state.objects.get(file.meta.path).data))
        found.update(as_tuples(data.to_pylist()))
    return found


def all_rows(state: State) -> Rows:
    """What readers of all measurements count now."""
    total: Rows = Counter()
    for source in sources(state.objects):
        total.update(visible_rows(state, source))
    return total


def tiers(objects: Objects, clock: Clock, **more: Any) -> tuple[Tier, ...]:
    """Hourly and daily, eager ones."""
    return (
        HourlyTier(HourlyTierConfig(objects, **{"min_files": 2, "clock": clock, **more})),
        DailyTier(DailyTierConfig(objects, **{"min_files": 2, "clock": clock, **more})),
    )


def manager(
    objects: Objects, temp: Path, *, clock: Clock | None = None, patience: Patience = AT_ONCE, **more: Any
) -> Manager:
    """A manager whose jobs run in this process, which is faster than children and crashes where tests want it."""
    clock = clock or FrozenClock(NOW)
    given: dict[str, Any] = {
        "runner": Inside(),
        "tiers": tiers(objects, clock),
        "memory_limit": 1 << 30,
        "state": State(objects, clock, patience),
        **more,
    }
    return Manager(
        ManagerConfig(
            storage_backend=objects,
            temp_directory=temp,
            **given,
        )
    )


class Inside:
    """Runs jobs in this process, one after the other."""

    slots = 2

    def threads(self, jobs: int) -> int:
        return 1

    def run(self, orders: Any) -> Any:
        import json
        import os

        from modak.core.faults import InjectedFault
        from modak.measurements.child import run_subprocess_job
        from modak.measurements.isolation import SECRETS_VARIABLE, SubprocessJobResult

        answers = []
        for order in orders:
            os.environ[SECRETS_VARIABLE] = order.extra_env.get(SECRETS_VARIABLE, json.dumps({}))
            try:
                answers.append(run_subprocess_job(type(order).from_json(order.to_json())))
            except InjectedFault:
                raise
            except Exception as error:
                answers.append(SubprocessJobResult.failed(f"{type(error).__name__}: {error}"))
            finally:
                del os.environ[SECRETS_VARIABLE]
        return answers


def data_files(objects: Objects) -> list[str]:
    """Every Parquet file, whether it counts or not."""
    return [meta.path for meta in objects.list() if meta.path.endswith(".parquet")]


_: Runner = Inside()
