"""When the pump commits, and where the work is done. Pure.

A commit follows after so many changes or so many milliseconds, whichever comes first. Commits cost about the same
however much they carry, so a pump that is behind lets more changes wait while the last commit's time has not passed: it
lands one batch beside the reading of the next, and the slower the commits, the fewer and larger they are.
"""

from __future__ import annotations

from dataclasses import dataclass

COALESCE = 5
"""So many times the usual batch may wait in memory while the pump is behind."""
DRIVER_ROWS = 1_000_000
"""Up to so many changes are written in this process; what a Spark job costs is only worth it for more."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a table's pump goes."""

    batch: int
    flush_seconds: float
    commit_seconds: float = 0.0
    """How long the last commit took."""

    @property
    def most_waiting(self) -> int:
        """Changes that may wait in memory."""
        return COALESCE * self.batch

    def is_full(self, changes: int, since_commit: float) -> bool:
        """Whether what waits is committed now, with more to read."""
        if changes < self.batch:
            return False
        return since_commit >= self.commit_seconds or changes >= self.most_waiting

    def pause(self, turn_seconds: float, read: int) -> float:
        """How long to wait before the next turn, after one of so many seconds that read so many changes."""
        if read >= self.batch:
            return 0.0
        return max(0.0, max(self.flush_seconds, self.commit_seconds) - turn_seconds)


def in_driver(changes: int) -> bool:
    """Whether a batch is written without a Spark job."""
    return changes <= DRIVER_ROWS
