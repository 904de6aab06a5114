"""What is tidied on the compactor's own disk: folders of jobs that died, and completions whose time has come."""

from __future__ import annotations

import fcntl
import shutil
from datetime import datetime
from pathlib import Path

from modak.measurements.child import JOB_LOCK
from modak.measurements.completion import (
    COMPLETION_FOLDER,
    CompactedOutput,
    CompletionState,
    whole_completions,
    write_completion,
)
from modak.measurements.layout import parse_folder
from modak.measurements.manifest import Manifest, ManifestStatus
from modak.measurements.manifests import ManifestManager, Unreadable


def remove_dead_workplaces(temp: Path) -> int:
    """Take away the folders of jobs whose process has died; how many there were."""
    removed = 0
    for folder in temp.iterdir() if temp.is_dir() else ():
        lock = folder / JOB_LOCK
        if folder.name == COMPLETION_FOLDER.parts[0] or not lock.is_file():
            continue
        with lock.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    return removed


def catch_up(folder: Path, manifests: ManifestManager, now: datetime) -> int:
    """Bring completions to where their jobs are: a compactor may have died between the two; how many moved on."""
    moved = 0
    for path, told in whole_completions(folder):
        if told.state is CompletionState.SOURCES_DELETED:
            continue
        where = manifests.generate_manifest_path(told.tier, told.database, told.partition_path, told.job_id)
        held = manifests.hold(where)
        if isinstance(held, Unreadable):
            continue
        if told.state is CompletionState.OUTPUT_WRITTEN:
            done = held is None or held.manifest.status is ManifestStatus.CLEANED
            following = told.with_sources_deleted(now) if done else None
        elif held is not None and held.manifest.status in (ManifestStatus.COMMITTED, ManifestStatus.CLEANED):
            following = told.with_outputs(_outputs(held.manifest), held.manifest.input_files, now)
        else:
            following = None
            if held is not None and held.manifest.status is ManifestStatus.ABORTED:
                path.unlink(missing_ok=True)
        if following is not None:
            write_completion(folder, following)
            moved += 1
    return moved


def _outputs(manifest: Manifest) -> tuple[CompactedOutput, ...]:
    place = parse_folder(manifest.partition_path)
    return tuple(
        CompactedOutput(
            path=output.path,
            sha256=output.sha256,
            size_bytes=output.size,
            database=manifest.database,
            measurement=manifest.measurement,
            partition_time=place.window.start if place else manifest.created_at,
            tier=manifest.tier,
            created_at=manifest.since,
        )
        for output in manifest.outputs
    )
