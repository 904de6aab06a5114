"""Which files a reader counts, so that every row is there exactly once at every moment of a job.

Files are listed first, manifests afterwards; any other order shows rows twice or not at all at some interleaving. Then
visible = (listed and committed outputs) − inputs of committed jobs − outputs of jobs that have not committed. An output
is known by the job id in its name, so it is told apart from the first moment it can be listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from modak.core.errors import ModakError
from modak.measurements.candidates import Seen
from modak.measurements.layout import parse_path
from modak.measurements.manifest import Manifest, ManifestStatus
from modak.storage.objects import Meta

_DONE = frozenset({ManifestStatus.COMMITTED, ManifestStatus.CLEANED})
_OPEN = frozenset({ManifestStatus.PENDING, ManifestStatus.COMMITTED})


@dataclass(frozen=True, slots=True)
class Account:
    """What the manifests say about files; `replaced` and `taken` hold the version that is meant ("" for any)."""

    replaced: Mapping[str, str]
    outputs: tuple[Meta, ...]
    unfinished: frozenset[str]
    taken: Mapping[str, str]
    named: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The outputs of every job that has committed; what else carries its id is the leftover of a task run twice."""
    unreadable: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifests: Iterable[Manifest], unreadable: tuple[str, ...] = ()) -> Account:
        """The account of some manifests."""
        known = list(manifests)
        done = [manifest for manifest in known if manifest.status in _DONE]
        open_ = [manifest for manifest in known if manifest.status in _OPEN]
        outputs = [
            Meta(output.path, output.size, output.etag, datetime.fromtimestamp(0, UTC))
            for manifest in known
            # Outputs of a job that is cleaned up have long been listed, and a later job may have merged them on.
            if manifest.status is ManifestStatus.COMMITTED
            for output in manifest.outputs
        ]
        return cls(
            replaced=_inputs(done),
            outputs=tuple(outputs),
            unfinished=frozenset(manifest.job_id for manifest in known if manifest.status not in _DONE),
            taken={**_inputs([*open_, *done]), **{output.path: output.etag for output in outputs}},
            named={manifest.job_id: frozenset(output.path for output in manifest.outputs) for manifest in done},
            unreadable=unreadable,
        )

    def counts(self, file: Seen) -> bool:
        """Whether a file that was listed holds rows of its own."""
        job = file.said.job
        if _names(self.replaced, file.meta) or job in self.unfinished:
            return False
        return job is None or file.meta.path in self.named.get(job, (file.meta.path,))

    def free(self, file: Seen) -> bool:
        """Whether a new job may take a file."""
        return self.counts(file) and not _names(self.taken, file.meta)

    def visible(self, listed: Iterable[Seen], within: str) -> Iterator[Seen]:
        """The files to read, of those listed and those that the listing came too early for, below a folder."""
        if self.unreadable:
            raise ModakError(
                "measurements.manifest_unreadable",
                f"The manifest {self.unreadable[0]} cannot be read, so it is not known which files count.",
                hint="Look at it, and delete it when no job is running.",
            )
        missing = {meta.path: meta for meta in self.outputs if meta.path.startswith(f"{within}/")}
        for file in listed:
            missing.pop(file.meta.path, None)
            if self.counts(file):
                yield file
        for meta in missing.values():
            found = parse_path(meta.path)
            if found is not None:
                yield Seen(meta, *found)


def _inputs(manifests: Iterable[Manifest]) -> dict[str, str]:
    return {
        path: etag
        for manifest in manifests
        for path, (_, etag) in zip(manifest.input_files, manifest.all_pins, strict=True)
    }


def _names(versions: Mapping[str, str], meta: Meta) -> bool:
    """Whether a version is among those named; a file that was replaced since is another file."""
    etag = versions.get(meta.path)
    return etag is not None and etag in ("", meta.etag)
