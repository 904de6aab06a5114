"""Numbers of the entity and measurement stores for `/metrics`: rates, lags, sizes and queues, from the leader only.

What is done is counted as it is done; what lies in a store is looked at now and then by threads that serve it, never by
a scrape. When the lead ends, the gauges go. Memory: a few numbers per schema and per database.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from modak.entities.compaction import CompactionReport
    from modak.entities.flushing import FlushReport
    from modak.entities.health import SchemaStatus
    from modak.measurements.survey import StoreStatus
    from modak.runtime.stores import Compacting

Labels = tuple[str, ...]
Values = Iterable[tuple[Labels, float]]


@dataclass(frozen=True, slots=True)
class _Name:
    text: str
    labels: tuple[str, ...] = ()


_COUNTERS = {
    "modak_entities_flushed_rows": _Name("Entity rows that flushes exported.", ("schema",)),
    "modak_entities_flushed_bytes": _Name("Bytes that flushes wrote.", ("schema",)),
    "modak_entities_compacted_rows": _Name("Entity rows that compactions wrote.", ("schema",)),
    "modak_entities_written_files": _Name("Files that flushes and compactions wrote.", ("schema", "step")),
    "modak_entities_deleted_files": _Name("Files deleted after their grace."),
    "modak_measurements_cycles": _Name("Compaction cycles that ended."),
    "modak_measurements_cycle_seconds": _Name("Time that compaction cycles took."),
    "modak_measurements_jobs": _Name("Compaction jobs that ended.", ("result",)),
    "modak_measurements_compacted_files": _Name("Files that were merged into larger ones."),
    "modak_measurements_compacted_rows": _Name("Rows that merges wrote."),
    "modak_measurements_read_bytes": _Name("Bytes of files that were merged."),
    "modak_measurements_written_bytes": _Name("Bytes that merges wrote."),
    "modak_measurements_expired_files": _Name("Files that retention dropped."),
    "modak_measurements_recovered_jobs": _Name("Jobs of others that were finished or undone."),
}
_GAUGES = {
    "modak_entities_dirty_rows": _Name("Changes that wait for a flush.", ("schema",)),
    "modak_entities_oldest_dirty_seconds": _Name("Age of the oldest change that waits.", ("schema",)),
    "modak_entities_quarantined_rows": _Name("Rows whose values do not fit the registry.", ("schema",)),
    "modak_entities_files": _Name("Files of the store.", ("schema", "part")),
    "modak_entities_rows": _Name("Row versions in the files.", ("schema", "part")),
    "modak_entities_bytes": _Name("Bytes of the files.", ("schema", "part")),
    "modak_entities_garbage_files": _Name("Files out of the store that wait for their grace to end.", ("schema",)),
    "modak_measurements_cycle_running": _Name("1: a compaction cycle runs."),
    "modak_measurements_next_cycle_timestamp_seconds": _Name("When the next cycle begins.", ("tier",)),
    "modak_measurements_handover_pending": _Name("Finished jobs that the catalog does not know yet."),
    "modak_measurements_files": _Name("Files that count.", ("database", "tier")),
    "modak_measurements_bytes": _Name("Bytes of files that count.", ("database",)),
    "modak_measurements_candidates": _Name("Windows that are worth a merge.", ("database", "tier")),
    "modak_measurements_oldest_candidate_seconds": _Name("Age of the oldest such window.", ("database",)),
    "modak_measurements_set_aside_files": _Name("Files that cannot be merged.", ("database",)),
    "modak_measurements_open_jobs": _Name("Jobs under way or left over.", ("status",)),
    "modak_measurements_readers": _Name("Readers that hold a lease on files."),
    "modak_measurements_problems": _Name("Names and manifests that are left alone because they are wrong."),
}

_lock = threading.Lock()
_counts: dict[tuple[str, Labels], float] = {}
_entities: tuple[SchemaStatus, ...] = ()
_store: StoreStatus | None = None
_looked_at: datetime | None = None
_compacting: Compacting | None = None


def flushed(reports: Iterable[FlushReport]) -> None:
    """Flushes have ended."""
    for each in reports:
        schema = str(each.schema_id)
        _count("modak_entities_flushed_rows", each.rows, schema)
        _count("modak_entities_flushed_bytes", each.bytes, schema)
        _count("modak_entities_written_files", each.files, schema, "flush")


def compacted(reports: Iterable[CompactionReport]) -> None:
    """Compactions of entities have ended."""
    for each in reports:
        schema = str(each.schema_id)
        _count("modak_entities_compacted_rows", each.rows, schema)
        _count("modak_entities_written_files", each.files, schema, "compact")


def collected(files: int) -> None:
    """So many files have gone."""
    _count("modak_entities_deleted_files", files)


def entities_are(seen: tuple[SchemaStatus, ...]) -> None:
    """What the entity store looks like now."""
    global _entities
    with _lock:
        _entities = seen


def measurements_are(seen: StoreStatus, now: datetime) -> None:
    """What the measurement store looks like now."""
    global _store, _looked_at
    with _lock:
        _store, _looked_at = seen, now


def compacting(serving: Compacting | None) -> None:
    """Who compacts measurements in this process, or nobody any more; what was done by then stays counted."""
    global _compacting
    with _lock:
        if serving is None and _compacting is not None:
            for name, labels, value in _done(_compacting):
                _counts[name, labels] = _counts.get((name, labels), 0.0) + value
        _compacting = serving


def forget() -> None:
    """Nobody looks at the stores here any more."""
    global _entities, _store
    with _lock:
        _entities, _store = (), None


def numbers() -> dict[tuple[str, str], float]:
    """A few of the gauges for charts: (which, of which schema or database) to its value."""
    with _lock:
        entities, store = _entities, _store
    found: dict[tuple[str, str], float] = {}
    for each in entities:
        found["entities_dirty", each.name] = each.dirty
        found["entities_bytes", each.name] = each.base_bytes + each.delta_bytes
    for one in store.measurements if store is not None else ():
        for which, value in (("candidates", sum(one.candidates.values())), ("files", one.total_files)):
            key = (f"measurements_{which}", one.database)
            found[key] = found.get(key, 0.0) + value
    return found


def collect() -> Iterator[Metric]:
    """Every family, whether or not a store is served."""
    with _lock:
        counts = dict(_counts)
        entities, store, looked_at, serving = _entities, _store, _looked_at, _compacting
    if serving is not None:
        for name, labels, value in _done(serving):
            counts[name, labels] = counts.get((name, labels), 0.0) + value
    for name, described in _COUNTERS.items():
        counter = CounterMetricFamily(name, described.text, labels=described.labels)
        for (which, labels), value in counts.items():
            if which == name:
                counter.add_metric(labels, value)
        yield counter
    gauges: dict[str, list[tuple[Labels, float]]] = {name: [] for name in _GAUGES}
    _show_entities(entities, gauges)
    if store is not None and looked_at is not None:
        _show_measurements(store, looked_at, gauges)
    if serving is not None:
        _show_compacting(serving, gauges)
    for name, described in _GAUGES.items():
        gauge = GaugeMetricFamily(name, described.text, labels=described.labels)
        for labels, value in gauges[name]:
            gauge.add_metric(labels, value)
        yield gauge


def _count(name: str, value: float, *labels: str) -> None:
    with _lock:
        _counts[name, labels] = _counts.get((name, labels), 0.0) + value


def _done(serving: Compacting) -> Iterator[tuple[str, Labels, float]]:
    """A manager counts from the beginning of its lead."""
    did = serving.manager.stats()
    yield "modak_measurements_cycles", (), did["total_cycles"]
    yield "modak_measurements_cycle_seconds", (), did["total_cycle_seconds"]
    yield "modak_measurements_jobs", ("completed",), did["total_jobs_completed"]
    yield "modak_measurements_jobs", ("failed",), did["total_jobs_failed"]
    yield "modak_measurements_compacted_files", (), did["total_files_compacted"]
    yield "modak_measurements_compacted_rows", (), did["total_rows_compacted"]
    yield "modak_measurements_read_bytes", (), did["total_bytes_read"]
    yield "modak_measurements_written_bytes", (), did["total_bytes_read"] - did["total_bytes_saved"]
    yield "modak_measurements_expired_files", (), did["total_files_expired"]
    yield "modak_measurements_recovered_jobs", (), did["total_manifests_recovered"]


def _show_entities(seen: Iterable[SchemaStatus], into: Mapping[str, list[tuple[Labels, float]]]) -> None:
    for each in seen:
        schema = (str(each.schema_id),)
        into["modak_entities_dirty_rows"].append((schema, each.dirty))
        into["modak_entities_oldest_dirty_seconds"].append((schema, each.oldest_seconds or 0.0))
        into["modak_entities_quarantined_rows"].append((schema, each.quarantined))
        into["modak_entities_garbage_files"].append((schema, each.waiting_for_gc))
        for part in ("base", "delta"):
            for what in ("files", "rows", "bytes"):
                into[f"modak_entities_{what}"].append(((*schema, part), getattr(each, f"{part}_{what}")))


def _show_measurements(store: StoreStatus, looked_at: datetime, into: Mapping[str, list[tuple[Labels, float]]]) -> None:
    sums: dict[tuple[str, Labels], float] = {}

    def add(name: str, value: float, *labels: str) -> None:
        sums[name, labels] = sums.get((name, labels), 0.0) + value

    for each in store.measurements:
        for tier, files in each.files.items():
            add("modak_measurements_files", files, each.database, tier)
        for tier, windows in each.candidates.items():
            add("modak_measurements_candidates", windows, each.database, tier)
        add("modak_measurements_bytes", each.bytes, each.database)
        add("modak_measurements_set_aside_files", each.set_aside, each.database)
        if each.oldest_candidate is not None:
            age = (looked_at - each.oldest_candidate).total_seconds()
            key = ("modak_measurements_oldest_candidate_seconds", (each.database,))
            sums[key] = max(sums.get(key, 0.0), age)
    for status, jobs in store.jobs.items():
        add("modak_measurements_open_jobs", jobs, status)
    add("modak_measurements_readers", store.readers)
    add("modak_measurements_problems", len(store.problems))
    for (name, labels), value in sums.items():
        into[name].append((labels, value))


def _show_compacting(serving: Compacting, into: Mapping[str, list[tuple[Labels, Any]]]) -> None:
    into["modak_measurements_cycle_running"].append(((), float(serving.manager.is_cycle_running())))
    into["modak_measurements_handover_pending"].append(((), float(serving.watcher.stats()["pending"])))
    for tier, due in serving.scheduler.status()["next_runs"].items():
        moment = datetime.fromisoformat(due).timestamp()
        into["modak_measurements_next_cycle_timestamp_seconds"].append(((tier,), moment))
