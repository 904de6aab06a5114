"""What a job that was interrupted left, brought to its end by whoever holds the claim on its window.

Before the commit, everything that carries the job's id goes and the inputs stay. After it, the outputs are checked
against the manifest; only when every one is right, the grace period has passed and nobody reads from before the commit,
the inputs go, each checked against the version that was merged. Files that an exported table shows stay until its
snapshot is expired. What cannot be told stays, and is reported.

Memory: the paths of the manifests that have something to be done about, and one manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum

import structlog

from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.measurements.claims import claim_path
from modak.measurements.discover import Source
from modak.measurements.layout import Place, parse_folder, parse_name
from modak.measurements.manifest import MANIFEST_MAX_AGE, TOMBSTONE_AGE, Held, Manifest, ManifestStatus
from modak.measurements.manifests import Unreadable
from modak.measurements.state import State
from modak.measurements.windows import Level

_log = structlog.get_logger()
SWEEP_AGE = timedelta(hours=1)


class Fate(Enum):
    """What became of a manifest."""

    ABORTED = "aborted"
    CLEANED = "cleaned"
    FORGOTTEN = "forgotten"
    WAITING = "waiting"
    BROKEN = "broken"
    HELD = "held"


_COUNTED = frozenset({Fate.ABORTED, Fate.CLEANED, Fate.FORGOTTEN})


@dataclass
class Recovered:
    """What a recovery did, for people: the fate of every manifest by its path."""

    fates: dict[str, Fate] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    """Windows that others work on, or have left so lately that nobody can tell yet."""
    swept: int = 0

    @property
    def recovered(self) -> int:
        """Manifests that are a step further now."""
        return sum(fate in _COUNTED for fate in self.fates.values())


class Recovery:
    """Recovery of one store."""

    def __init__(self, state: State, claim_level: Level = Level.DAY) -> None:
        self._state = state
        self._level = claim_level

    def recover(self, database: str | None = None) -> Recovered:
        """Every manifest whose window nobody works on, one window at a time."""
        report = Recovered(swept=self._state.objects.sweep(SWEEP_AGE))
        windows: dict[str, list[str]] = {}
        folders: dict[str, str] = {}
        for each in self._state.manifests.held(database):
            if isinstance(each, Unreadable):
                report.fates[each.path] = Fate.BROKEN
                report.problems.append(f"{each.path} cannot be read; its partition is left alone")
                continue
            place = self._claimed(each.manifest)
            if place is None:
                report.fates[each.meta.path] = Fate.BROKEN
                report.problems.append(
                    f"{each.meta.path} speaks of {each.manifest.partition_path!r}, which is no place"
                )
            elif self._only_waits(each.manifest):
                report.fates[each.meta.path] = self._checked(each.manifest, report)
            else:
                windows.setdefault(claim_path(place), []).append(each.meta.path)
                folders[claim_path(place)] = place.folder
        with self._state.claims.beating():
            held = [claim for claim, manifests in windows.items() if not self._window(claim, manifests, report)]
            for claim in self._state.claims.wait_for_dead(held):
                if self._window(claim, windows[claim], report):
                    held.remove(claim)
        report.held.update(folders[claim] for claim in held)
        return report

    def _claimed(self, manifest: Manifest) -> Place | None:
        place = parse_folder(manifest.partition_path)
        if place is None:
            return None
        return place.claimed(self._level)

    def _window(self, claim: str, paths: list[str], report: Recovered) -> bool:
        if not self._state.claims.acquire(claim):
            report.fates.update(dict.fromkeys(paths, Fate.HELD))
            return False
        try:
            for path in paths:
                # Read again: somebody may have worked here until a moment ago.
                held = self._state.manifests.hold(path)
                if isinstance(held, Held):
                    self.settle([held], report)
        finally:
            self._state.claims.release(claim)
        return True

    def _only_waits(self, manifest: Manifest) -> bool:
        """Whether nothing is to be done about a job before its grace period is over; nobody needs a claim for that."""
        waiting = manifest.status in (ManifestStatus.COMMITTED, ManifestStatus.CLEANED)
        return waiting and not self._grace_over(manifest)

    def _checked(self, manifest: Manifest, report: Recovered) -> Fate:
        """Whether the outputs of a committed job are as it committed them, as long as its inputs are there."""
        if manifest.status is not ManifestStatus.COMMITTED:
            return Fate.WAITING
        for output in manifest.outputs:
            found = self._state.objects.head(output.path)
            if found is None or found.size != output.size or (output.etag and found.etag != output.etag):
                report.problems.append(
                    f"{output.path} is {'missing' if found is None else 'not as it was written'}; "
                    f"job {manifest.job_id} had committed it, so nothing of the job is deleted"
                )
                _log.error("measurements.output_wrong", output=output.path, job=manifest.job_id)
                return Fate.BROKEN
        return Fate.WAITING

    def settle(self, manifests: list[Held], report: Recovered) -> None:
        """Take every manifest as far as it can go; the caller holds the claim on their window."""
        for held in manifests:
            try:
                report.fates[held.meta.path] = self._settle(held, report)
            except ModakError as error:
                # Storage that does not answer says nothing about what is there.
                report.fates[held.meta.path] = Fate.WAITING
                report.problems.append(f"{held.meta.path}: {error.message}")
                _log.warning("measurements.recovery_failed", manifest=held.meta.path, error=error.message)

    def _settle(self, held: Held, report: Recovered) -> Fate:
        manifest, now = held.manifest, self._state.clock.now()
        if now - manifest.created_at > MANIFEST_MAX_AGE:
            _log.warning("measurements.manifest_old", manifest=held.meta.path, created=str(manifest.created_at))
        if manifest.status is ManifestStatus.PENDING:
            return self._abort(held)
        if manifest.status is ManifestStatus.ABORTED:
            self._remove_outputs(manifest)
            return self._forget(held) if now - manifest.since >= TOMBSTONE_AGE else Fate.WAITING
        if manifest.status is ManifestStatus.CLEANED:
            return self._forget(held) if self._grace_over(manifest) else Fate.WAITING
        return self._clean(held, report)

    def _abort(self, held: Held) -> Fate:
        moved = self._state.manifests.move(held, ManifestStatus.ABORTED)
        if moved is None:
            return Fate.WAITING
        self._remove_outputs(moved.manifest)
        _log.warning("measurements.job_aborted", job=held.manifest.job_id, partition=held.manifest.partition_path)
        return Fate.ABORTED

    def _remove_outputs(self, manifest: Manifest) -> None:
        """Everything with the job's id that was not committed, listed anew: a job comes further than it can tell."""
        kept = {output.path for output in manifest.outputs if manifest.status is not ManifestStatus.ABORTED}
        prefix = f"{manifest.partition_path}/"
        found = [
            meta.path
            for meta in self._state.objects.list(manifest.partition_path)
            if "/" not in (name := meta.path.removeprefix(prefix))
            and (said := parse_name(name)) is not None
            and said.job == manifest.job_id
            and meta.path not in kept
        ]
        if found:
            reach("recovery.before_outputs")
            self._state.objects.delete(found)
            reach("recovery.outputs_removed")

    def _clean(self, held: Held, report: Recovered) -> Fate:
        manifest = held.manifest
        if self._checked(manifest, report) is Fate.BROKEN:
            return Fate.BROKEN
        if not self._grace_over(manifest) or self._state.readers.block(manifest.since):
            return Fate.WAITING
        # After the readers: whoever exports is one of them until the table shows what it found.
        if self._state.exports.hold_any(Source(manifest.database, manifest.measurement), manifest.input_files):
            return Fate.WAITING
        self._remove_outputs(manifest)
        self._delete_inputs(manifest, report)
        moved = self._state.manifests.move(held, ManifestStatus.CLEANED)
        if moved is None:
            return Fate.WAITING
        # Without a grace period the manifest has no more to tell; a reader that needs it keeps it.
        forgotten = self._grace_over(moved.manifest) and self._forget(moved) is Fate.FORGOTTEN
        return Fate.FORGOTTEN if forgotten else Fate.CLEANED

    def _delete_inputs(self, manifest: Manifest, report: Recovered) -> None:
        doomed: list[str] = []
        for path, (size, etag) in zip(manifest.input_files, manifest.all_pins, strict=True):
            found = self._state.objects.head(path)
            if found is None:
                continue
            if etag and (found.size, found.etag) != (size, etag):
                report.problems.append(f"{path} has changed since job {manifest.job_id} merged it, and stays")
                continue
            doomed.append(path)
        reach("recovery.before_inputs")
        self._state.objects.delete(doomed)
        reach("recovery.inputs_removed")

    def _grace_over(self, manifest: Manifest) -> bool:
        return self._state.clock.now() - manifest.since >= self._state.patience.grace

    def _forget(self, held: Held) -> Fate:
        if held.manifest.status is ManifestStatus.CLEANED and self._state.readers.block(held.manifest.since):
            return Fate.WAITING
        self._state.manifests.delete_manifest(held.meta.path)
        return Fate.FORGOTTEN
