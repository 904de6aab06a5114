"""The last hour of a few numbers per table and per store, for charts.

Sampled by whoever serves HTTP, and forgotten with the process.

Memory: 180 samples of eight bytes for each of a handful of numbers, so about ten kilobytes per table.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from modak.catalog.vitals import Vitals, read_vitals
from modak.core.clock import Clock
from modak.core.errors import UsageError
from modak.core.names import TableName
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime import storemetrics
from modak.runtime.pulse import Pulse

log = structlog.get_logger()

SAMPLES = 180
EVERY_SECONDS = 20.0
METRICS = (
    "cutline_t",
    "delta_backlog",
    "mirror_lag_bytes",
    "read_pins",
    "staged_loads",
    "lake_files",
    "lake_bytes",
    "lake_records",
    "slot_retained_wal_bytes",
    "entities_dirty",
    "entities_bytes",
    "measurements_candidates",
    "measurements_files",
)
"""By table; by slot; by entity schema; by database of the measurement store. Of stores only the leader knows."""


class Series:
    """Numbers over time."""

    def __init__(self, dsn: Dsn, pulse: Pulse, clock: Clock) -> None:
        self._dsn = dsn
        self._pulse = pulse
        self._clock = clock
        self._lock = threading.Lock()
        self._times = array("d")
        self._values: dict[tuple[str, str], array[float]] = {}
        self._ended = threading.Event()

    def points(self, metric: str, name: str | None = None, most: int | None = None) -> list[dict[str, Any]]:
        """`{"name", "points": [[seconds since 1970, value or null], …]}` for a table or slot, or for all.

        `most` leaves only so many: those whose last value is the largest.
        """
        if metric not in METRICS:
            raise UsageError("api.metric", f"There is no series {metric!r}.", hint=f"Known: {', '.join(METRICS)}.")
        with self._lock:
            times = list(self._times)
            found = {who: list(values) for (what, who), values in self._values.items() if what == metric}
        if most is not None:
            found = dict(sorted(found.items(), key=lambda pair: _last(pair[1]), reverse=True)[:most])
        return [
            {
                "name": who,
                "points": [[at, None if math.isnan(value) else value] for at, value in zip(times, values, strict=True)],
            }
            for who, values in sorted(found.items())
            if name in (None, who)
        ]

    def sample(self) -> None:
        """Take one sample of everything."""
        with connect(self._dsn, application="modak series") as conn:
            seen = read_vitals(conn)
        self.add(self._clock.now().timestamp(), seen)

    def add(self, at: float, seen: Vitals) -> None:
        """Write one sample down."""
        now = {**dict(_numbers(seen)), **storemetrics.numbers()}
        with self._lock:
            self._times.append(at)
            for key in now.keys() - self._values.keys():
                self._values[key] = array("d", [float("nan")] * (len(self._times) - 1))
            for key, values in list(self._values.items()):
                values.append(now.get(key, float("nan")))
                if len(values) > SAMPLES:
                    del values[0]
                if key not in now and all(map(math.isnan, values)):
                    del self._values[key]
            if len(self._times) > SAMPLES:
                del self._times[0]

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Take samples while the block runs."""
        thread = threading.Thread(target=self._loop, name="modak-series", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(timeout=10)

    def _loop(self) -> None:
        while not self._ended.is_set():
            try:
                self.sample()
            except Exception as error:
                log.debug("series.not_sampled", because=type(error).__name__)
            self._ended.wait(EVERY_SECONDS)


def _last(values: list[float]) -> float:
    """The last value, the smallest of all where it is not known."""
    return values[-1] if values and not math.isnan(values[-1]) else -math.inf


def _numbers(seen: Vitals) -> Iterator[tuple[tuple[str, str], float]]:
    for row in seen.tables:
        name = str(TableName(row["schema_name"], row["table_name"]))
        counters = row["counters"] or {}
        for metric in METRICS:
            value = counters.get(metric.removeprefix("lake_")) if metric.startswith("lake_") else row.get(metric)
            if isinstance(value, int | float):
                yield (metric, name), float(value)
    for slot in seen.slots:
        yield ("slot_retained_wal_bytes", slot["slot"]), float(slot["retained"])
