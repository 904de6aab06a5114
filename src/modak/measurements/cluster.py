"""The cluster's part: who may compact, and the table in Postgres that tells everybody which files there are.

A compactor alone needs none of this. In a cluster, the watcher hands over what jobs did to a bridge; ours writes into
the catalog under the leader's epoch, all changes of a job in one transaction. Whoever does not lead gets `NotLeader`,
and the hand-over is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, LiteralString, Protocol

import psycopg

from modak.catalog.lease import Epoch
from modak.catalog.moves import hold_epoch
from modak.core.errors import NotLeader, Refused
from modak.core.faults import reach
from modak.measurements.completion import CompactedOutput
from modak.measurements.layout import parse_name
from modak.postgres.connect import connect, translate
from modak.postgres.dsn import Dsn

_REGISTER: LiteralString = """
    INSERT INTO modak.measurement_files
        (path, sha256, size_bytes, database, measurement, partition_time, tier, created_at, origin)
    SELECT %(path)s, %(sha256)s, %(size_bytes)s, %(database)s, %(measurement)s, %(partition_time)s, %(tier)s,
        %(created_at)s, %(origin)s
    WHERE NOT EXISTS (SELECT FROM modak.measurement_tombstones WHERE path = %(path)s)
    ON CONFLICT (path) DO UPDATE SET sha256 = excluded.sha256, size_bytes = excluded.size_bytes
"""
_DELETE: LiteralString = "DELETE FROM modak.measurement_files WHERE path = ANY(%s)"
_BURY: LiteralString = """
    INSERT INTO modak.measurement_tombstones (path) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING
"""
_FORGET: LiteralString = """
    DELETE FROM modak.measurement_tombstones WHERE gone_at < clock_timestamp() - interval '90 days'
"""


class CompactionRoleGated(Refused):
    """This node may not compact."""

    def __init__(self, role: str) -> None:
        super().__init__(
            "measurements.gated",
            f"This node has the role {role!r} and does not compact.",
            hint="Ask the node that is the compactor.",
        )


class ClusterGate(Protocol):
    """Decides whether this node compacts. No gate at all means that it does."""

    def can_compact(self) -> bool:
        """Whether this node may compact now."""

    def role(self) -> str:
        """What this node is, for people."""


@dataclass(frozen=True)
class CompactedFile:
    """A compacted file, as the cluster knows it."""

    path: str
    sha256: str
    size_bytes: int
    database: str
    measurement: str
    partition_time: datetime
    tier: str
    created_at: datetime

    @classmethod
    def of(cls, output: CompactedOutput) -> CompactedFile:
        """What a job has made."""
        return cls(
            output.path,
            output.sha256,
            output.size_bytes,
            output.database,
            output.measurement,
            output.partition_time,
            output.tier,
            output.created_at,
        )


@dataclass(frozen=True)
class DeleteSourceOp:
    """A source that is gone, and why."""

    path: str
    reason: str = "compaction"


class ManifestBridge(Protocol):
    """Writes into the cluster's table of files. Raises `NotLeader` where this node may not."""

    def register_compacted_file(self, file: CompactedFile) -> None:
        """Let everybody know of a file."""

    def delete_compacted_source(self, path: str, reason: str) -> None:
        """Let everybody forget a file."""

    def batch_file_ops(self, registers: Sequence[CompactedFile], deletes: Sequence[DeleteSourceOp]) -> None:
        """Both at once, all or nothing."""


class LeaderGate:
    """Only the leader compacts."""

    def __init__(self, epoch: Callable[[], Epoch | None]) -> None:
        self._epoch = epoch

    def can_compact(self) -> bool:
        return self._epoch() is not None

    def role(self) -> str:
        return "leader" if self.can_compact() else "follower"


class PostgresBridge:
    """The table `modak.measurement_files`, written in the name of the leader's epoch."""

    def __init__(self, dsn: Dsn, origin: str, epoch: Callable[[], Epoch | None], timeout_seconds: float = 5.0) -> None:
        self._dsn = dsn
        self._origin = origin
        self._epoch = epoch
        self._timeout = timeout_seconds

    def register_compacted_file(self, file: CompactedFile) -> None:
        self.batch_file_ops([file], [])

    def delete_compacted_source(self, path: str, reason: str) -> None:
        self.batch_file_ops([], [DeleteSourceOp(path, reason)])

    def batch_file_ops(self, registers: Sequence[CompactedFile], deletes: Sequence[DeleteSourceOp]) -> None:
        epoch = self._epoch()
        if epoch is None:
            raise NotLeader("measurements.not_leader", "This node does not lead; the table of files is not changed.")
        reach("cluster.before_apply")
        try:
            with connect(self._dsn, application="modak measurements") as conn:
                self._apply(conn, epoch, registers, deletes)
        except psycopg.Error as error:
            raise translate(error) from error
        reach("cluster.applied")

    def _apply(
        self,
        conn: psycopg.Connection[Any],
        epoch: Epoch,
        registers: Sequence[CompactedFile],
        deletes: Sequence[DeleteSourceOp],
    ) -> None:
        limit = f"{int(self._timeout * 1000)}ms"
        with conn.transaction():
            conn.execute(
                "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)", (limit, limit)
            )
            hold_epoch(conn, epoch)
            for file in registers:
                conn.execute(_REGISTER, {**asdict(file), "origin": self._origin})
            gone = [each.path for each in deletes]
            if gone:
                conn.execute(_DELETE, (gone,))
                # Raw files are never registered late; remembering each of them would be a second listing.
                conn.execute(_BURY, ([path for path in gone if _is_output(path)],))
                conn.execute(_FORGET)


def _is_output(path: str) -> bool:
    said = parse_name(path.rpartition("/")[2])
    return said is not None and said.job is not None
