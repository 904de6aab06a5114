"""The hand-over from jobs to the cluster: one small file per job on the compactor's own disk.

    writing_output ──► output_written ──► sources_deleted

Files are written to a temporary name, synced and renamed: a reader sees the old state or the new one, never a torn one.
The driver alone writes them; the watcher (`watcher.py`) alone acts on them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from secrets import token_hex

import structlog

from modak.core.errors import ModakError, Refused
from modak.core.faults import reach

COMPLETION_FOLDER = Path(".completion") / "pending"
"""Below the temporary folder."""
ORPHAN_AGE = timedelta(minutes=10)
_log = structlog.get_logger()
_BAD_ID = re.compile(r"[/\\\0]|\.\.|^\.|^$")


class CompletionState(Enum):
    """How far a job is, for the cluster."""

    WRITING_OUTPUT = "writing_output"
    OUTPUT_WRITTEN = "output_written"
    SOURCES_DELETED = "sources_deleted"


@dataclass(frozen=True)
class CompactedOutput:
    """A file that a job has made."""

    path: str
    sha256: str
    size_bytes: int
    database: str
    measurement: str
    partition_time: datetime
    tier: str
    created_at: datetime


@dataclass(frozen=True)
class CompletionManifest:
    """What the cluster must learn about a job. `deleted_sources` counts from `sources_deleted` on."""

    job_id: str
    database: str
    measurement: str
    partition_path: str
    tier: str
    state: CompletionState
    outputs: tuple[CompactedOutput, ...]
    deleted_sources: tuple[str, ...]
    created_at: datetime
    updated_at: datetime

    def to_json(self) -> str:
        """As it lies on disk."""
        return json.dumps(asdict(self), default=_plain)

    @classmethod
    def from_json(cls, text: str) -> CompletionManifest:
        """As it lay on disk; `measurements.completion_unreadable` where that cannot be told."""
        try:
            given = json.loads(text)
            outputs = tuple(
                CompactedOutput(
                    **{
                        **each,
                        "partition_time": datetime.fromisoformat(each["partition_time"]),
                        "created_at": datetime.fromisoformat(each["created_at"]),
                    }
                )
                for each in given["outputs"] or ()
            )
            return cls(
                job_id=given["job_id"],
                database=given["database"],
                measurement=given["measurement"],
                partition_path=given["partition_path"],
                tier=given["tier"],
                state=CompletionState(given["state"]),
                outputs=outputs,
                deleted_sources=tuple(given["deleted_sources"] or ()),
                created_at=datetime.fromisoformat(given["created_at"]),
                updated_at=datetime.fromisoformat(given["updated_at"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ModakError("measurements.completion_unreadable", "A completion manifest cannot be read.") from error

    def with_outputs(
        self, outputs: tuple[CompactedOutput, ...], sources: tuple[str, ...], at: datetime
    ) -> CompletionManifest:
        """The state in which the outputs are written; `sources` are what will be deleted."""
        return replace(
            self, state=CompletionState.OUTPUT_WRITTEN, outputs=outputs, deleted_sources=sources, updated_at=at
        )

    def with_sources_deleted(self, at: datetime) -> CompletionManifest:
        """The last state."""
        return replace(self, state=CompletionState.SOURCES_DELETED, updated_at=at)


def completion_path(folder: Path, job_id: str) -> Path:
    """The file of a job; an id that could lead elsewhere is refused."""
    if _BAD_ID.search(job_id):
        raise Refused("measurements.job_id", f"{job_id!r} cannot be the id of a job.")
    return folder / f"{job_id}.json"


def write_completion(folder: Path, manifest: CompletionManifest) -> Path:
    """Write or replace the file of a job, whole or not at all."""
    path = completion_path(folder, manifest.job_id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f"{manifest.job_id}.{token_hex(4)}.tmp"
    reach("completion.before_write")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, manifest.to_json().encode())
        os.fsync(handle)
    finally:
        os.close(handle)
    reach("completion.draft_written")
    draft.replace(path)
    folder_handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_handle)
    finally:
        os.close(folder_handle)
    reach("completion.written")
    return path


def pending_completions(folder: Path) -> Iterator[Path]:
    """The files that are whole, in the order of their names."""
    if folder.is_dir():
        yield from sorted(
            path for path in folder.iterdir() if path.suffix == ".json" and path.is_file() and path.name[0] != "."
        )


def read_completion(path: Path) -> CompletionManifest | None:
    """What a file says; `None` if it has gone meanwhile."""
    try:
        return CompletionManifest.from_json(path.read_text())
    except FileNotFoundError:
        return None


def whole_completions(folder: Path) -> Iterator[tuple[Path, CompletionManifest]]:
    """What the files say that can be read; the others are told of and stay for somebody to look at."""
    for path in pending_completions(folder):
        try:
            told = read_completion(path)
        except ModakError:
            _log.warning("measurements.completion_unreadable", file=str(path))
            continue
        if told is not None:
            yield path, told


def remove_orphans(folder: Path, now: datetime, timeout: timedelta) -> int:
    """Take away files of jobs that never wrote an output, and drafts; later states are never too old."""
    limit = now - (timeout if timeout > timedelta(0) else ORPHAN_AGE)
    removed = 0
    for path, manifest in whole_completions(folder):
        if manifest.state is CompletionState.WRITING_OUTPUT and manifest.updated_at <= limit:
            path.unlink(missing_ok=True)
            removed += 1
    for draft in folder.glob("*.tmp") if folder.is_dir() else ():
        if draft.stat().st_mtime <= limit.timestamp():
            draft.unlink(missing_ok=True)
            removed += 1
    return removed


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Enum):
        return str(value.value)
    raise TypeError
