"""How a table's lake is doing: counters, warnings with thresholds and what to do, the policy in force.

Collected by the leader on its interval whether or not maintenance is on, into `modak.lake_stats`, which the console,
`/metrics` and `modak-worker health` read. The files are streamed and only counted. One query over all tables tells
which have not changed since they were looked at; those are not opened again, so a thousand still tables cost little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString

import structlog
from psycopg.rows import dict_row

from modak.catalog.records import TableRecord, TableState
from modak.catalog.write import CatalogWriter
from modak.core.errors import ModakError, NotLeader
from modak.core.faults import InjectedFault, reach
from modak.core.names import TableName
from modak.lake.model import CATALOG, LakeFile, LakeTable, Snapshot
from modak.tables.maintenance.policy import Policy, of
from modak.tables.site import Site

log = structlog.get_logger()

SIZE_CLASSES = (("under_1mb", 1 << 20), ("under_16mb", 16 << 20), ("under_128mb", 128 << 20), ("under_1gb", 1 << 30))
LARGEST = "from_1gb"
WARN_DELETE_RATIO = 0.1
WARN_FILES_UNDER_DELETES = 100
SMALL_FILES_FACTOR = 4
WARN_PIN_SECONDS = 6 * 3600
WARN_EQUALITY_DELETES = 1
_MANY_SNAPSHOTS = 0.9

_WRITE: LiteralString = """
    INSERT INTO modak.lake_stats AS s (table_id, counters, warnings, policy, collected_at)
    SELECT t.table_id, %(counters)s, %(warnings)s, %(policy)s, clock_timestamp() FROM modak.tables t
    WHERE t.table_id = %(table)s
    ON CONFLICT (table_id) DO UPDATE
    SET counters = excluded.counters, warnings = excluded.warnings, policy = excluded.policy,
        collected_at = excluded.collected_at
"""
_KNOWN: LiteralString = "SELECT counters, warnings FROM modak.lake_stats WHERE table_id = %s"
_LOOKED_AT: LiteralString = """
    SELECT t.table_id, s.counters, s.policy, i.metadata_location,
        EXISTS (SELECT FROM modak.read_pins p
            WHERE p.table_id = t.table_id AND p.expires_at > clock_timestamp()) AS pins
    FROM modak.tables t
    JOIN modak_iceberg.iceberg_tables i
        ON i.catalog_name = %s AND i.table_namespace = t.lake_namespace AND i.table_name = t.lake_name
    LEFT JOIN modak.lake_stats s USING (table_id)
"""
_STILL: LiteralString = "UPDATE modak.lake_stats SET collected_at = clock_timestamp() WHERE table_id = ANY (%s)"
_ALL: LiteralString = """
    SELECT t.schema_name, t.table_name, s.counters, s.warnings, s.policy, s.collected_at, s.maintained_at
    FROM modak.tables t LEFT JOIN modak.lake_stats s USING (table_id) ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to look at: what it is called, what is seen, from where on it is told, and what to do."""

    name: str
    message: str
    threshold: float
    value: float
    hint: str

    def plain(self) -> dict[str, Any]:
        """As the catalog keeps it."""
        return {
            "name": self.name,
            "message": self.message,
            "threshold": self.threshold,
            "value": self.value,
            "hint": self.hint,
        }


@dataclass(frozen=True, slots=True)
class Health:
    """A row of `modak.lake_stats`."""

    table: TableName
    counters: Mapping[str, Any]
    warnings: Sequence[Mapping[str, Any]]
    policy: Mapping[str, Any]
    collected_at: datetime | None
    maintained_at: datetime | None


def read(site: Site) -> list[Health]:
    """What was collected last, table by table."""
    with site.connect(autocommit=True) as conn:
        rows = conn.execute(_ALL).fetchall()
    return [
        Health(TableName(schema, name), counters or {}, warnings or [], policy or {}, collected, maintained)
        for schema, name, counters, warnings, policy, collected, maintained in rows
    ]


def collect_all(site: Site, writer: CatalogWriter) -> int:
    """Look at every table; one that fails does not hold up the others. How many were collected."""
    with site.connect(autocommit=True) as conn:
        seen = {row["table_id"]: row for row in conn.cursor(row_factory=dict_row).execute(_LOOKED_AT, (CATALOG,))}
    tables = site.reader.tables()
    still = [record.table_id for record in tables if _is_still(site, record, seen.get(record.table_id))]
    if still:
        with writer.step() as tx:
            tx.conn.execute(_STILL, (still,))
    done = len(still)
    for record in tables:
        if record.table_id in still:
            continue
        try:
            collect(site, writer, record.name)
            done += 1
        except (NotLeader, InjectedFault):
            raise
        except ModakError as error:
            if error.code == "spark.gateway_lost":
                raise
            log.warning("health.failed", table=str(record.name), code=error.code, error=error.message)
        except Exception:
            log.exception("health.crashed", table=str(record.name))
    return done


def _is_still(site: Site, record: TableRecord, seen: Mapping[str, Any] | None) -> bool:
    """Whether a look at the table would find what the last one found."""
    if seen is None or seen["counters"] is None or seen["pins"] or seen["counters"].get("pins"):
        return False
    try:
        policy = of(site, record)
    except ModakError:
        return False
    return bool(
        seen["counters"].get("seen") == _mark(seen["metadata_location"], policy)
        and seen["counters"].get("frozen") == (record.frozen is not None)
        and seen["policy"] == policy.plain()
    )


def _mark(metadata_location: str, policy: Mapping[str, Any]) -> str:
    """What the counters of files depend on."""
    return f"{metadata_location} {policy['rewrite_target_bytes']}"


def collect(site: Site, writer: CatalogWriter, name: TableName) -> None:
    """Look at one table and write down what is seen; new warnings are logged once."""
    from psycopg.types.json import Jsonb

    state = site.reader.state(name)
    policy = of(site, state.table)
    with site.connect(autocommit=True) as conn:
        row = conn.execute(_KNOWN, (state.table.table_id,)).fetchone()
    before, told = (row[0], row[1]) if row else ({}, [])
    counters = count(site, state, policy, before)
    warnings = warn(counters, policy)
    reach("health.before_write")
    with writer.step() as tx:
        tx.conn.execute(
            _WRITE,
            {
                "table": state.table.table_id,
                "counters": Jsonb(counters),
                "warnings": Jsonb([one.plain() for one in warnings]),
                "policy": Jsonb(policy.plain()),
            },
        )
    reach("health.after_write")
    known = {one["name"] for one in told}
    for one in warnings:
        if one.name not in known:
            log.warning("lake.health", table=str(name), warning=one.name, message=one.message, hint=one.hint)
    for gone in known - {one.name for one in warnings}:
        log.info("lake.health_better", table=str(name), warning=gone)


def count(site: Site, state: TableState, policy: Policy, before: Mapping[str, Any]) -> dict[str, Any]:
    """The counters of a table's lake; files are counted anew only when the table has changed."""
    lake = site.lake.load(state.table.lake)
    now = site.clock.now()
    pins = [(now - pin.created_at).total_seconds() for pin in state.pins]
    moving = {
        "pins": len(pins),
        "oldest_pin_seconds": round(max(pins, default=0.0)),
        "oldest_pinned_snapshot": _oldest_pinned(site, state, lake),
        "frozen": state.table.frozen is not None,
    }
    if lake is None:
        return {**moving, "missing": True}
    seen = _mark(lake.metadata_location, policy)
    if before.get("seen") == seen:
        return {**before, **moving}
    return {**_counted(site, lake, policy), **moving, "seen": seen}


def _oldest_pinned(site: Site, state: TableState, lake: LakeTable | None) -> int | None:
    pinned = {pin.snapshot_id for pin in state.pins if pin.snapshot_id is not None}
    if not pinned or lake is None:
        return None
    listed = [each for each in site.lake.snapshots(lake) if each.id in pinned]
    return min(listed, key=lambda each: each.sequence_number).id if listed else None


def _counted(site: Site, lake: LakeTable, policy: Policy) -> dict[str, Any]:
    snapshots = site.lake.snapshots(lake)
    empty: dict[str, Any] = {"files": 0, "bytes": 0, "records": 0, "delete_files": 0, "deleted_rows": 0}
    if lake.snapshot_id is None:
        return {**empty, "snapshots": 0, "manifests": 0, "delete_ratio": 0.0}
    files = site.lake.files(lake.identifier, lake.snapshot_id)
    counted = count_files(files, policy["rewrite_target_bytes"])
    data, deletes = site.lake.manifests(lake.identifier, lake.snapshot_id)
    current = next(each for each in snapshots if each.id == lake.snapshot_id)
    equality = int(current.summary.get("total-equality-deletes", "0"))
    delete_files = int(current.summary.get("total-delete-files", "0"))
    hidden = counted["deleted_rows"]
    return {
        **counted,
        "delete_files": delete_files,
        "equality_deletes": equality,
        "delete_ratio": round(hidden / counted["records"], 4) if counted["records"] else 0.0,
        "manifests": len(data) + len(deletes),
        "data_manifests": len(data),
        "delete_manifests": len(deletes),
        "manifest_bytes": sum(data) + sum(deletes),
        "snapshots": len(snapshots),
        "tags": len(lake.tags),
        "bytes_live": counted["bytes"],
        "bytes_reclaimable": reclaimable(snapshots),
        "oldest_snapshot_millis": min(each.at_millis for each in snapshots),
    }


def count_files(files: Iterable[LakeFile], target: int) -> dict[str, Any]:
    """Files by size class, rows, bytes, and what is under deletes."""
    classes = dict.fromkeys([*(name for name, _ in SIZE_CLASSES), LARGEST], 0)
    found = {"files": 0, "bytes": 0, "records": 0, "small_files": 0, "files_under_deletes": 0, "deleted_rows": 0}
    for each in files:
        size = each.file.bytes
        classes[next((name for name, below in SIZE_CLASSES if size < below), LARGEST)] += 1
        found["files"] += 1
        found["bytes"] += size
        found["records"] += each.file.rows
        found["small_files"] += size < target
        found["files_under_deletes"] += each.deletes > 0
        found["deleted_rows"] += each.deleted_rows
    return {**found, "files_by_size": classes}


def reclaimable(snapshots: Sequence[Snapshot]) -> int:
    """Bytes that retained snapshots have removed and that only older ones still show."""
    ordered = sorted(snapshots, key=lambda each: each.sequence_number)
    return sum(int(each.summary.get("removed-files-size", "0")) for each in ordered[1:])


def warn(counters: Mapping[str, Any], policy: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What is worth a person's attention. Pure."""
    return tuple(one for one in judged(counters, policy) if one.value >= one.threshold)


def judged(counters: Mapping[str, Any], policy: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Everything that is looked at, with its value and from where on it is told. Pure."""
    found: list[Finding] = []

    def add(name: str, value: float, threshold: float, message: str, hint: str) -> None:
        found.append(Finding(name, message, threshold, value, hint))

    if counters.get("missing"):
        add("missing", 1, 1, "The lake table is gone from the catalog.", "Restore its row in iceberg_tables.")
        return tuple(found)
    add(
        "frozen",
        int(bool(counters.get("frozen"))),
        1,
        "A foreign snapshot has frozen publication.",
        "Look at it, then: modak-worker accept",
    )
    debt = _hint(policy, "delete_compaction_enabled", "Run a pass: modak-worker maintain --table …")
    ratio, under = counters.get("delete_ratio", 0.0), counters.get("files_under_deletes", 0)
    add("delete_debt", ratio, WARN_DELETE_RATIO, f"{ratio:.0%} of the lake's rows are deleted but still stored.", debt)
    add(
        "delete_files",
        under,
        WARN_FILES_UNDER_DELETES,
        f"{under:,} data files carry deletes, which slow every scan.",
        debt,
    )
    equality = counters.get("equality_deletes", 0)
    add(
        "equality_deletes",
        equality,
        WARN_EQUALITY_DELETES,
        f"A foreign writer has left {equality:,} equality deletes, which some readers cannot read.",
        debt,
    )
    manifests, most = counters.get("data_manifests", 0), policy["manifest_rewrite_min_manifests"]
    add(
        "manifest_sprawl",
        manifests,
        most,
        f"{manifests:,} manifests must be read to plan a scan.",
        _hint(policy, "manifest_rewrite_enabled", "Run a pass: modak-worker maintain --table …"),
    )
    small, least = counters.get("small_files", 0), SMALL_FILES_FACTOR * policy["rewrite_min_input_files"]
    # One small file per partition is what a partitioned table has anyway; most of them being small is not.
    add(
        "small_files",
        small if small > counters.get("files", 0) / 2 else 0,
        least,
        f"{small:,} of {counters.get('files', 0):,} data files are small.",
        _hint(policy, "rewrite_enabled", "Run a pass, or widen the partitions: modak-worker maintain --table …"),
    )
    snapshots, limit = counters.get("snapshots", 0), max(2, int(policy["snapshot_max_count"] * _MANY_SNAPSHOTS))
    add(
        "snapshots",
        snapshots,
        limit,
        f"{snapshots:,} snapshots are listed in every metadata file.",
        _hint(policy, "snapshot_expiry_enabled", "Look for pins that hold them: modak-worker health --table …"),
    )
    pin = counters.get("oldest_pin_seconds", 0)
    add(
        "old_pin",
        pin,
        WARN_PIN_SECONDS,
        f"A reader has held a pin for {pin // 3600} hours; nothing newer can expire.",
        "Find its holder in modak.read_pins and end it with modak_read_end.",
    )
    return tuple(found)


def _hint(policy: Mapping[str, Any], switch: str, otherwise: str) -> str:
    if policy["maintenance_enabled"] and policy[switch]:
        return otherwise
    off = switch if policy["maintenance_enabled"] else "maintenance_enabled"
    return f"{off} is false for this table: whoever maintains it instead does not keep up."


def maintained(writer: CatalogWriter, table_id: int) -> None:
    """Remember that a pass has ended."""
    with writer.step() as tx:
        tx.conn.execute(
            "INSERT INTO modak.lake_stats AS s (table_id, maintained_at)"
            " SELECT table_id, clock_timestamp() FROM modak.tables WHERE table_id = %s"
            " ON CONFLICT (table_id) DO UPDATE SET maintained_at = excluded.maintained_at",
            (table_id,),
        )
