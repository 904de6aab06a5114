"""Delete debt and bin-pack: read files, write them anew, swap them in one commit that loses no row and revives none.

Between reading and committing others commit too. A file that somebody else has replaced takes its bin out of this
commit; rows that were deleted in it meanwhile are found in the new file by their row ids and hidden there in the same
commit (`lake/iceberg/rewrite.py`). So a rewrite gets through whatever the rate of changes. The driver holds one
description per file of one commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import structlog

from modak.catalog.journal import Journal
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import Conflict, ModakError
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.states import OpPhase
from modak.core.underway import working
from modak.lake.changes import Change, Range, Rewrite
from modak.lake.model import LakeFile, LakeTable, Prepared, Vector, data_folder
from modak.lake.rewrite import Bin, DeletedKeys, Replacement, Rewriting, Rewritten
from modak.tables.landing import land
from modak.tables.maintenance.engine import TASK_BYTES, MaintenanceEngine, Progress
from modak.tables.maintenance.plan import MaintenancePlan, RewriteStep
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed

log = structlog.get_logger()

Counters = dict[str, int]
Carried = dict[int, tuple[tuple[tuple[str, ...], ...], tuple[Vector, ...]]]
"""By bin: which vectors its files had at the last attempt, and those of the new files for what they hide.

It takes long where many rows go; what stays the same between two attempts is not done again.
"""


def rewrite(
    site: Site,
    writer: CatalogWriter,
    engine: MaintenanceEngine,
    plan: MaintenancePlan,
    step: RewriteStep,
    progress: Progress,
) -> Counters:
    """Execute one step in one commit; returns what it did."""
    state = site.reader.state(plan.table)
    op_id = new_op_id(site.clock)
    with working(op_id):
        folder = data_folder(state.table.location, op_id)
        Journal(writer).begin(op_id, state.table.table_id, f"rewrite-{step.kind}", _journaled(plan, step), [folder])
        try:
            Journal(writer).phase(op_id, OpPhase.PLANNED, OpPhase.WRITING)
            done = _write(site, engine, plan, step, state, folder, progress)
            counters = _land(site, writer, state, plan, step, op_id, folder, done)
        except ModakError as error:
            give_up(site, writer, state.table.location, op_id, error)
            raise
        landed = site.reader.op(op_id)
        assert landed is not None
        tidy_landed(site, writer, site.reader.state(plan.table), landed)
    log.info(f"maintenance.{step.kind}", table=str(plan.table), **counters)
    return counters


def _journaled(plan: MaintenancePlan, step: RewriteStep) -> dict[str, object]:
    low, high = _range(step.bins)
    return {
        "table": [plan.table.schema, plan.table.name],
        "base": plan.base,
        "cut_from": low,
        "cut_to": high,
        "files": step.files,
        "bins": len(step.bins),
    }


def _range(bins: Sequence[Bin]) -> tuple[int | None, int | None]:
    """The tier keys that the bins' files hold, the end excluded; unknown where a file has no bounds."""
    files = [found for one in bins for found in one.files]
    lows, highs = [found.lower for found in files], [found.upper for found in files]
    low = min((each for each in lows if each is not None), default=None) if None not in lows else None
    high = max((each for each in highs if each is not None), default=None) if None not in highs else None
    return low, None if high is None else high + 1


def _write(
    site: Site,
    engine: MaintenanceEngine,
    plan: MaintenancePlan,
    step: RewriteStep,
    state: TableState,
    folder: str,
    progress: Progress,
) -> list[Rewritten]:
    if not step.bins or plan.base is None:
        return []
    lake = site.lake.load(state.table.lake)
    assert lake is not None
    deleted = _gather(site, engine, lake, plan.base, step, folder)
    target = int(plan.policy["rewrite_target_bytes"])
    sort, zorder = (
        tuple(name for name in str(plan.policy[key]).split(",") if name and lake.column(name) is not None)
        for key in ("rewrite_sort_columns", "rewrite_zorder_columns")
    )
    tasks = [
        Rewriting(
            bins=bins,
            columns=lake.schema,
            layout=lake.layout,
            spec_id=lake.spec_id,
            tier_key=state.table.tier_key,
            folder=folder,
            task=f"{number:05d}",
            # A bin is one file; only one that grew beyond reason is cut.
            target_bytes=max(site.settings.lake.target_file_bytes, 2 * target),
            cut=plan.cut,
            sort=sort,
            zorder=zorder,
            deleted=_of_bins(deleted, bins),
        )
        for number, bins in enumerate(shares(step.bins, engine.tasks()))
    ]
    reach("rewrite.before_tasks")
    written = engine.rewrite(tasks, progress)
    reach("rewrite.after_tasks")
    return [one for made in written for one in made]


def _of_bins(deleted: tuple[DeletedKeys, ...], bins: Sequence[Bin]) -> tuple[DeletedKeys, ...]:
    if not deleted:
        return ()
    from modak.lake.iceberg.equality import applicable

    return applicable(deleted, (found for one in bins for found in one.files))


def shares(bins: Sequence[Bin], tasks: int) -> list[tuple[Bin, ...]]:
    """Bins in their order, in tasks of about the same number of bytes."""
    total = sum(one.bytes for one in bins)
    size = max(1, min(TASK_BYTES, -(-total // max(tasks, 1))))
    found: list[list[Bin]] = []
    room = 0
    for one in bins:
        if not found or room <= 0:
            found.append([])
            room = size
        found[-1].append(one)
        room -= max(one.bytes, 1)
    return [tuple(each) for each in found]


def _gather(
    site: Site, engine: MaintenanceEngine, lake: LakeTable, base: int, step: RewriteStep, folder: str
) -> tuple[DeletedKeys, ...]:
    """Foreign equality deletes of the base, as keys that tasks can ask for."""
    if not any(found.foreign_deletes for one in step.bins for found in one.files):
        return ()
    from modak.lake.iceberg.equality import plan_gathering

    tasks = plan_gathering(site.lake.equality_deletes(lake.identifier, base), lake.schema, folder)
    counts = engine.gather([task for _, task in tasks])
    groups: dict[Any, list[tuple[str, int]]] = defaultdict(list)
    columns = {key: task.columns for key, task in tasks}
    for (key, task), rows in zip(tasks, counts, strict=True):
        groups[key].append((task.uri, rows))
    return tuple(
        DeletedKeys(
            spec_id=key[0],
            partition=key[1],
            everywhere=not key[1],
            columns=columns[key],
            uris=tuple(uri for uri, _ in made),
            rows=sum(rows for _, rows in made),
        )
        for key, made in groups.items()
    )


def _land(
    site: Site,
    writer: CatalogWriter,
    state: TableState,
    plan: MaintenancePlan,
    step: RewriteStep,
    op_id: OpId,
    folder: str,
    done: Sequence[Rewritten],
) -> Counters:
    known: dict[int | None, Replacement] = {}
    carried: Carried = {}

    def changes(lake: LakeTable, _: TableState) -> Sequence[Change]:
        if lake.snapshot_id not in known:
            known.clear()
            known[lake.snapshot_id] = _replacement(site, lake, plan, step, folder, done, carried)
        now = known[lake.snapshot_id]
        if lake.snapshot_id is None or not (now.done or now.removed_deletes):
            raise Conflict("maintenance.overtaken", "Somebody else has replaced every file of this rewrite.")
        return [
            Rewrite(
                removed=tuple(found.file for one in now.done for found in one.bin.files),
                added=tuple(file for one in now.done for file in one.files),
                validate_from=lake.snapshot_id,
                vectors=now.vectors,
                removed_deletes=now.removed_deletes,
            )
        ]

    def within(tx: CommitTransaction, prepared: Prepared, now: TableState) -> None:
        becomes = replace(now.cutline, snapshot_id=prepared.snapshot_id, metadata_location=prepared.new_location)
        tx.move(now.cutline, becomes)
        tx.count(**_counters(next(iter(known.values()))))

    land(site, writer, plan.table, op_id, OpPhase.WRITING, changes, within, "maintenance")
    return _counters(next(iter(known.values())))


def _counters(made: Replacement) -> Counters:
    bins = [one.bin for one in made.done]
    return {
        "files_before": sum(len(one.files) for one in bins),
        "files_after": sum(len(one.files) for one in made.done),
        "bytes_before": sum(one.bytes for one in bins),
        "bytes_after": sum(one.bytes for one in made.done),
        "rows_before": sum(one.rows for one in bins),
        "rows_after": sum(one.rows for one in made.done),
        "deletes_before": sum(one.deletes for one in bins),
        "deletes_after": len(made.vectors),
        "delete_files_dropped": len(made.removed_deletes),
        "bins_overtaken": made.overtaken,
    }


def _replacement(
    site: Site,
    lake: LakeTable,
    plan: MaintenancePlan,
    step: RewriteStep,
    folder: str,
    done: Sequence[Rewritten],
    carried: Carried,
) -> Replacement:
    """What of the rewrite can still be committed on the table as it is now."""
    if lake.snapshot_id is None:
        return Replacement((), len(done))
    kept = list(done)
    vectors: list[Vector] = []
    removed: list[Vector] = []
    if lake.snapshot_id != plan.base:
        kept, vectors, removed = _against(site, lake, lake.snapshot_id, step, folder, done, carried)
    unneeded = []
    if step.dangling or any(found.foreign_deletes for one in kept for found in one.bin.files):
        gone = [found.file.path for one in kept for found in one.bin.files]
        needed = site.lake.needed_deletes(lake.identifier, lake.snapshot_id, gone)
        every = site.lake.equality_deletes(lake.identifier, lake.snapshot_id)
        unneeded = [each for each in every if each.path not in needed]
    return Replacement(tuple(kept), len(done) - len(kept), tuple(vectors), (*removed, *unneeded))


def _against(
    site: Site,
    lake: LakeTable,
    snapshot_id: int,
    step: RewriteStep,
    folder: str,
    done: Sequence[Rewritten],
    carried: Carried,
) -> tuple[list[Rewritten], list[Vector], list[Vector]]:
    """The bins that survived what others committed since, with the deletes that have to come along."""
    from modak.lake.iceberg.rewrite import first_row_id

    wanted = {found.file.path for one in done for found in one.bin.files}
    tier_key = lake.layout.column
    rows = None if tier_key is None else Range(tier_key, *_range(step.bins))
    listed = site.lake.files(lake.identifier, snapshot_id, rows=rows)
    current = {found.file.path: found for found in listed if found.file.path in wanted}
    kept: list[Rewritten] = []
    vectors: list[Vector] = []
    removed: list[Vector] = []
    for number, one in enumerate(done):
        now = [current.get(found.file.path) for found in one.bin.files]
        pairs = [(then, is_now) for then, is_now in zip(one.bin.files, now, strict=True) if is_now is not None]
        if len(pairs) < len(now) or any(a.foreign_deletes != b.foreign_deletes for a, b in pairs):
            continue
        changed = [(then, is_now) for then, is_now in pairs if _vectors(then) != _vectors(is_now)]
        if any(first_row_id(then) is None for then, _ in changed):
            continue
        seen = tuple(_vectors(is_now) for _, is_now in pairs)
        if carried.get(number, (None, ()))[0] != seen:
            carried[number] = seen, tuple(_hidden(one, changed, folder))
        vectors += carried[number][1]
        removed += [vector for _, is_now in changed for vector in is_now.vectors]
        kept.append(one)
    return kept, vectors, removed if vectors else []


def _hidden(one: Rewritten, changed: Sequence[tuple[LakeFile, LakeFile]], folder: str) -> list[Vector]:
    from modak.lake.iceberg.rewrite import carried_over, hide

    if not changed:
        return []
    import numpy as np

    reach("rewrite.before_carry")
    late = np.sort(np.concatenate([carried_over(then, now) for then, now in changed]))
    found = list(hide(one.files, late, folder, "late"))
    reach("rewrite.after_carry")
    return found


def _vectors(found: LakeFile) -> tuple[str, ...]:
    return tuple(vector.json for vector in found.vectors)
