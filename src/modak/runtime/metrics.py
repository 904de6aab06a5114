"""Numbers for Prometheus: what this process does is counted here, what the fleet looks like is read when asked.

Table gauges come only from the leader, so that a group of workers does not show each table several times. The journal
feeds the counters of operations: every flow writes it, whatever room it lives in. A reading of Postgres is kept for
some seconds, so that eager scrapers cost no more than lazy ones. Memory: a few numbers per table.
"""

from __future__ import annotations

import platform
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from modak import __version__
from modak.catalog.vitals import JournalTail, Vitals, begin_tail, read_vitals
from modak.core.clock import Clock
from modak.core.errors import ModakError
from modak.core.names import TableName
from modak.postgres.connect import connect
from modak.postgres.dsn import Dsn
from modak.runtime import storemetrics

if TYPE_CHECKING:
    from modak.runtime.pulse import Pulse
    from modak.runtime.schedule import Item

log = structlog.get_logger()

disable_created_metrics()  # type: ignore[no-untyped-call]

KEPT_SECONDS = 5.0
REGISTRY = CollectorRegistry(auto_describe=False)

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)
BUILD = Gauge("modak_build_info", "The version that runs.", ["version", "python"], registry=REGISTRY)
BUILD.labels(__version__, platform.python_version()).set(1)
CYCLE = Histogram("modak_cycle_duration_seconds", "A round over all tables.", registry=REGISTRY, buckets=_SECONDS)
WORK = Histogram(
    "modak_work_duration_seconds", "Work on one table, by kind.", ["kind"], registry=REGISTRY, buckets=_SECONDS
)
ERRORS = Counter("modak_errors_total", "Failures, by code.", ["code"], registry=REGISTRY)
EVENTS = Counter("modak_log_events_total", "Log events, by level.", ["level"], registry=REGISTRY)
COMMITS = Counter(
    "modak_lake_commits_total", "Lake commits that landed a snapshot.", ["table", "kind"], registry=REGISTRY
)
ROWS = Counter("modak_rows_total", "Rows that operations moved.", ["table", "kind"], registry=REGISTRY)
OPERATIONS = Counter("modak_operations_total", "Operations that ended.", ["table", "kind", "phase"], registry=REGISTRY)
OPERATION_SECONDS = Counter(
    "modak_operation_seconds_total", "Time that operations took.", ["table", "kind"], registry=REGISTRY
)
FLUSHES = Counter("modak_mirror_flushes_total", "Mirror commits that landed.", ["table"], registry=REGISTRY)
LOADS = Counter("modak_load_total", "Stream Load batches, by result.", ["table", "state"], registry=REGISTRY)
LOAD_ROWS = Counter("modak_load_rows_total", "Stream Load rows, by path.", ["table", "path"], registry=REGISTRY)
PINS = Counter("modak_expired_pins_deleted_total", "Lapsed pins that were removed.", registry=REGISTRY)
REQUESTS = Counter("modak_http_requests_total", "HTTP requests.", ["method", "route", "status"], registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "modak_http_request_duration_seconds", "HTTP requests.", ["route"], registry=REGISTRY, buckets=_SECONDS
)

_GAUGES = {
    "modak_cutline_tier_key": ("cutline_t", "The cut-line T, on the tier-key axis."),
    "modak_cutline_snapshot": ("cutline_s", "The published lake snapshot S."),
    "modak_cutline_age_seconds": ("cutline_age_seconds", "Since the lines of the table moved last."),
    "modak_delta_backlog_rows": ("delta_backlog", "Corrections that wait to be folded."),
    "modak_delta_oldest_seconds": ("delta_oldest_seconds", "Age of the oldest correction that waits."),
    "modak_mirror_lag_bytes": ("mirror_lag_bytes", "WAL between the frontier and now."),
    "modak_mirror_lag_seconds": ("mirror_lag_seconds", "Since the lake had everything, as the pump told last."),
    "modak_mirror_silent_seconds": ("mirror_silent_seconds", "Since the pump last told how it is doing."),
    "modak_maintenance_requests": ("requests", "Forced maintenance passes that wait or run."),
    "modak_read_pins": ("read_pins", "Readers that hold a pin."),
    "modak_load_staged_labels": ("staged_loads", "Staged loads that wait for adoption."),
    "modak_load_adoption_lag_seconds": ("oldest_staged_seconds", "Age of the oldest staged load."),
    "modak_operations_unfinished": ("unfinished_ops", "Operations under way or left over."),
    "modak_table_problems": ("problems", "Partitions that need attention."),
    "modak_table_frozen": ("frozen", "1: a foreign snapshot has frozen publication."),
    "modak_table_paused": ("paused", "1: an operator holds the table back."),
    "modak_lake_warnings": ("warnings", "Warnings of the last look at the lake's health."),
    "modak_lake_stats_age_seconds": ("stats_age_seconds", "Since the lake's health was looked at."),
}
LAKE_COUNTERS = {
    "files": "Data files.",
    "delete_files": "Delete files and deletion vectors.",
    "bytes": "Bytes of all files.",
    "records": "Rows, deleted ones included.",
    "snapshots": "Snapshots.",
    "manifests": "Manifests.",
    "delete_ratio": "Share of rows that are deleted.",
}
"""Counters of the lake's health that every table has; a format may report more."""


def worked(item: Item, seconds: float, _code: str) -> None:
    """One piece of work has ended."""
    WORK.labels(item.kind.value).observe(seconds)


def cycled(seconds: float) -> None:
    """One round is done."""
    CYCLE.observe(seconds)


def loaded(table: TableName, state: str, rows: Mapping[str, int] | None = None) -> None:
    """One batch of Stream Load was answered; `rows` by the path they took (hot, delta, spooled)."""
    LOADS.labels(str(table), state).inc()
    for path, count in (rows or {}).items():
        LOAD_ROWS.labels(str(table), path).inc(count)


def count_event(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: every event counts by its level, every failure by its code."""
    level = str(event.get("level", _method))
    EVENTS.labels(level).inc()
    if level in ("error", "critical"):
        ERRORS.labels(str(event.get("code", event.get("event", "unknown")))).inc()
    return event


def listen() -> None:
    """Count the log events of this process from now on."""
    current = structlog.get_config()["processors"]
    if count_event not in current:
        structlog.configure(processors=[*current[:-1], count_event, current[-1]])


class Fleet(Collector):
    """Gauges of this process and, while it leads, of every table."""

    def __init__(self, dsn: Dsn, pulse: Pulse, clock: Clock) -> None:
        self._dsn = dsn
        self._pulse = pulse
        self._clock = clock
        self._lock = threading.Lock()
        self._tail: JournalTail | None = None
        self._seen: Vitals | None = None
        self._at = float("-inf")

    def text(self) -> bytes:
        """The whole page, in Prometheus' text format."""
        with self._lock:
            # The counters of the journal must have moved before the registry is written out.
            self._refresh()
        return generate_latest(REGISTRY) + generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        yield from self._own()
        if self._seen is not None:
            yield from _tables(self._seen)
        yield from storemetrics.collect()

    def _own(self) -> Iterator[Metric]:
        pulse, shown = self._pulse, self._pulse.shown()
        yield _gauge("modak_leader", "1: this process leads.", float(pulse.role == "leading"))
        yield _gauge("modak_ready", "1: the readiness probe says yes.", float(pulse.ready().good))
        if pulse.last_cycle is not None:
            yield _gauge("modak_last_cycle_timestamp_seconds", "When the last round began.", pulse.last_cycle)
        yield _gauge("modak_schedule_waiting", "Pieces of work that are due.", float(shown.get("waiting", 0)))
        counts = shown["counts"]
        yield _gauge("modak_schedule_running", "Pieces of work that run.", float(counts["running"]))
        yield _gauge("modak_schedule_failing", "Pieces of work that wait after a failure.", float(counts["failing"]))

    def _refresh(self) -> None:
        now = self._clock.monotonic()
        if self._pulse.role != "leading":
            self._seen = self._tail = None
            return
        if self._seen is not None and now - self._at < KEPT_SECONDS:
            return
        try:
            with connect(self._dsn, application="modak metrics") as conn:
                self._seen = read_vitals(conn)
                self._tail = self._tail or begin_tail(conn)
                for op in self._tail.read(conn):
                    _count_operation(op)
            self._at = now
        except ModakError as error:
            # What is not known now is left out; the probe of readiness tells why.
            self._seen = None
            log.debug("metrics.unread", because=error.code)


def _count_operation(op: dict[str, Any]) -> None:
    table, kind, phase = op["table"], op["kind"], op["phase"]
    OPERATIONS.labels(table, kind, phase).inc()
    if phase != "done":
        return
    if op["landed"]:
        COMMITS.labels(table, kind).inc()
    OPERATION_SECONDS.labels(table, kind).inc(op["seconds"] or 0.0)
    rows = op["counters"].get("rows")
    if isinstance(rows, int | float):
        ROWS.labels(table, kind).inc(rows)
    if kind == "pump":
        FLUSHES.labels(table).inc()


def _tables(seen: Vitals) -> Iterator[Metric]:
    named = [(str(TableName(row["schema_name"], row["table_name"])), row) for row in seen.tables]
    counts: dict[str, int] = {}
    for _, row in named:
        counts[row["mode"]] = counts.get(row["mode"], 0) + 1
    yield _family("modak_tables", "Registered tables.", "mode", counts.items())
    for name, (column, text) in _GAUGES.items():
        yield _family(name, text, "table", ((table, row[column]) for table, row in named))
    counters: dict[str, list[tuple[str, Any]]] = {counter: [] for counter in LAKE_COUNTERS}
    for table, row in named:
        for counter, value in (row["counters"] or {}).items():
            counters.setdefault(counter, []).append((table, value))
    for counter, values in counters.items():
        text = LAKE_COUNTERS.get(counter, f"{counter} of the lake table.")
        yield _family("modak_lake_" + re.sub(r"[^a-z0-9_]", "_", counter.lower()), text, "table", values)
    yield _family(
        "modak_slot_active",
        "1: a connection streams from the slot; a pump that peeks holds none, and follows all the same.",
        "slot",
        ((s["slot"], s["active"]) for s in seen.slots),
    )
    yield _family(
        "modak_slot_retained_wal_bytes",
        "WAL that the slot keeps.",
        "slot",
        ((s["slot"], s["retained"]) for s in seen.slots),
    )
    for row in seen.withdrawals:
        yield _gauge(
            "modak_withdrawals_waiting",
            "Unregistered tables that must still leave a foreign catalog.",
            float(row["waiting"]),
        )
        yield _gauge("modak_withdrawals_oldest_seconds", "Age of the oldest of them.", row["oldest"])


def _family(name: str, text: str, label: str, values: Iterable[tuple[str, Any]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for who, value in values:
        if isinstance(value, int | float):
            family.add_metric([who], float(value))
    return family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
