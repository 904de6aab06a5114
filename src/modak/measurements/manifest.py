"""The record of one job: what goes in, what came out, and how far it is. Its status is the commit point.

    pending ──► committed ──► cleaned ──► (deleted)
       └──────► aborted ────► (deleted)

A manifest is written before any output gets its final name. Until it says `committed`, the inputs are the truth; from
then on the outputs are. Every step is a compare-and-swap, so a job that was given up by somebody else can never commit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from modak.core.errors import ModakError
from modak.storage.objects import Meta

MANIFEST_BASE_PATH = "_compaction_state"
"""The folder of everything that compaction has to remember."""
MANIFEST_MAX_AGE = timedelta(days=7)
"""A manifest that is still there after so long points to a deeper problem; recovery warns and goes on as ever."""
TOMBSTONE_AGE = timedelta(hours=24)
"""How long an aborted manifest stays, so that a compactor that slept cannot bring outputs of the job back."""


class ManifestStatus(Enum):
    """How far a job is."""

    PENDING = "pending"
    COMMITTED = "committed"
    CLEANED = "cleaned"
    ABORTED = "aborted"


NEXT: dict[ManifestStatus, frozenset[ManifestStatus]] = {
    ManifestStatus.PENDING: frozenset({ManifestStatus.COMMITTED, ManifestStatus.ABORTED}),
    ManifestStatus.COMMITTED: frozenset({ManifestStatus.CLEANED}),
    ManifestStatus.CLEANED: frozenset(),
    ManifestStatus.ABORTED: frozenset(),
}
"""The steps that there are."""


@dataclass(frozen=True, slots=True)
class ManifestOutput:
    """An output: where it lies and what it must look like."""

    path: str
    size: int
    sha256: str = ""
    etag: str = ""
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one job does; `pins` are size and etag of every input."""

    database: str
    measurement: str
    partition_path: str
    tier: str
    job_id: str
    created_at: datetime
    input_files: tuple[str, ...] = ()
    pins: tuple[tuple[int, str], ...] = ()
    outputs: tuple[ManifestOutput, ...] = ()
    status: ManifestStatus = ManifestStatus.PENDING
    updated_at: datetime | None = None
    owner: str = ""

    @property
    def output_path(self) -> str:
        """The first output."""
        return self.outputs[0].path if self.outputs else ""

    @property
    def output_size(self) -> int:
        """The size of the first output."""
        return self.outputs[0].size if self.outputs else 0

    @property
    def all_pins(self) -> tuple[tuple[int, str], ...]:
        """Size and etag of every input; a manifest that names none leaves both open."""
        return self.pins or ((-1, ""),) * len(self.input_files)

    @property
    def since(self) -> datetime:
        """When the status was reached."""
        return self.updated_at or self.created_at

    @property
    def files(self) -> frozenset[str]:
        """Inputs and outputs: what nobody else may take."""
        return frozenset((*self.input_files, *(output.path for output in self.outputs)))

    def moved(self, status: ManifestStatus, at: datetime, **changes: Any) -> Manifest:
        """The manifest one step further; a step that does not exist is refused."""
        if status not in NEXT[self.status]:
            raise ModakError(
                "measurements.manifest_step", f"Job {self.job_id} is {self.status.value} and cannot be {status.value}."
            )
        return replace(self, status=status, updated_at=at, **changes)

    def told(self) -> dict[str, Any]:
        """The job, as people are told of it."""
        return {
            "job": self.job_id,
            "status": self.status.value,
            "tier": self.tier,
            "partition": self.partition_path,
            "inputs": len(self.input_files),
            "outputs": len(self.outputs),
            "since": self.since,
            "owner": self.owner,
        }

    def to_json(self) -> bytes:
        """As it is stored."""
        plain = {
            "output_path": self.output_path,
            "output_size": self.output_size,
            "input_files": list(self.input_files),
            "database": self.database,
            "measurement": self.measurement,
            "partition_path": self.partition_path,
            "tier": self.tier,
            "status": self.status.value,
            "created_at": self.created_at.isoformat(),
            "job_id": self.job_id,
            "updated_at": self.updated_at.isoformat() if self.updated_at else None,
            "owner": self.owner,
            "pins": [list(pin) for pin in self.pins],
            "outputs": [
                {"path": each.path, "size": each.size, "sha256": each.sha256, "etag": each.etag, "rows": each.rows}
                for each in self.outputs
            ],
        }
        return json.dumps(plain).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """As it was stored; `measurements.manifest_unreadable` where that cannot be told."""
        try:
            given = json.loads(data)
            outputs = given.get("outputs")
            if outputs is None and given.get("output_path"):
                outputs = [{"path": given["output_path"], "size": given["output_size"]}]
            updated = given.get("updated_at")
            return cls(
                database=_text(given["database"]),
                measurement=_text(given["measurement"]),
                partition_path=_text(given["partition_path"]),
                tier=_text(given["tier"]),
                job_id=_text(given["job_id"]),
                created_at=datetime.fromisoformat(given["created_at"]),
                input_files=tuple(map(_text, given["input_files"])),
                pins=tuple((int(size), _text(etag)) for size, etag in given.get("pins", ())),
                outputs=tuple(ManifestOutput(**each) for each in outputs or ()),
                status=ManifestStatus(given["status"]),
                updated_at=datetime.fromisoformat(updated) if updated else None,
                owner=given.get("owner", ""),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModakError("measurements.manifest_unreadable", "The manifest cannot be read.") from error


@dataclass(frozen=True, slots=True)
class Held:
    """A manifest and the version of it that was read."""

    manifest: Manifest
    meta: Meta


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
