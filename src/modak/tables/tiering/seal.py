"""Sealing: from here on, no write to these partitions can be missed.

In one short transaction the capture trigger goes onto the leaves and their state becomes `sealing`. From its commit
on, every write to them also lands in `modak.delta` in the writer's own transaction, and only then is the export
snapshot taken. The lock that a trigger needs conflicts with writers, so it is asked for in milliseconds and given up
quickly: a user never queues behind us.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from modak.catalog import capture
from modak.catalog.lease import Epoch
from modak.catalog.records import TableRecord
from modak.catalog.write import CatalogWriter
from modak.core.errors import ModakError
from modak.core.faults import reach
from modak.core.states import PartitionState
from modak.postgres.describe import Leaf
from modak.tables.site import Site
from modak.tables.tiering.plan import Partition

LOCK_MILLIS = 50
TRIES = 20


def seal(site: Site, epoch: Epoch, record: TableRecord, pairs: Sequence[tuple[Partition, Leaf]]) -> None:
    """Install the capture trigger on every leaf and note it in the catalog; what is sealed already is only checked."""
    writer = site.writer(epoch)
    for partition, leaf in pairs:
        _seal_one(site, writer, record, partition, leaf)


def _seal_one(site: Site, writer: CatalogWriter, record: TableRecord, partition: Partition, leaf: Leaf) -> None:
    for attempt in range(TRIES):
        try:
            reach("seal.before_trigger")
            _install(writer, record, partition, leaf)
            reach("seal.after_trigger")
            return
        except ModakError as error:
            if error.code != "postgres.busy" or attempt == TRIES - 1:
                raise
            # Give the writers that hold us off a moment of quiet before asking again.
            site.clock.sleep(random.uniform(0.05, 0.25) * (attempt + 1))  # noqa: S311


def _install(writer: CatalogWriter, record: TableRecord, partition: Partition, leaf: Leaf) -> None:
    with writer.step(LOCK_MILLIS) as tx:
        trigger_oid = capture.install(tx.conn, record.table_id, leaf.oid)
        # A tiered leaf that is sealed anew counts as watched only when its second export has landed (`commit.py`).
        file = None if partition.state is PartitionState.TIERED else leaf.relfilenode
        tx.note_leaf(record.table_id, partition.name, leaf.oid, file, trigger_oid)
        if partition.state is PartitionState.HOT:
            tx.partitions(record.table_id, (partition.name,), PartitionState.HOT, PartitionState.SEALING)
