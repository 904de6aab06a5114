"""A share of the delta becomes files: the new rows as data files, the keys of all rows for `locate` to find.

Every share reads under the snapshot that the fold holds, in a Spark task or in the driver. The data files have no
deletion vectors and nothing refers to the keys' file once the commit has landed: tidying removes it. Memory is bounded
by one batch and the writer's row group.
"""

from __future__ import annotations

from dataclasses import dataclass

from modak.catalog.records import DeltaRange
from modak.core.faults import reach
from modak.lake.locate import KeyFile
from modak.lake.model import DataFile, Layout
from modak.postgres.dsn import Dsn
from modak.tables.fold.read import Shape, images_of, keys_of, select


@dataclass(frozen=True, slots=True)
class Share:
    """One task's part of a batch, with all that the task needs to know."""

    dsn: Dsn
    table_id: int
    rows: DeltaRange
    snapshot: str
    shape: Shape
    folder: str
    task: str
    layout: Layout
    spec_id: int
    target_bytes: int
    low_cardinality: frozenset[str]
    cut: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """What a share became."""

    rows: int
    keys: KeyFile
    files: tuple[DataFile, ...]

    @property
    def upserts(self) -> int:
        """Rows in the data files."""
        return sum(file.rows for file in self.files)


def write_share(share: Share) -> Written:
    """Stream one range of the delta into files of its own."""
    import pyarrow as pa

    from modak.lake.decode import arrow_schema
    from modak.lake.iceberg.files import FileWriter
    from modak.lake.iceberg.locate import KeyWriter
    from modak.postgres.arrow import stream

    shape = share.shape
    key_schema = arrow_schema(shape.keys)
    rows = 0
    reach("fold.share_started")
    writer = FileWriter(
        share.folder,
        shape.columns,
        share.layout,
        tier_key=shape.tier_key,
        spec_id=share.spec_id,
        target_bytes=share.target_bytes,
        low_cardinality=share.low_cardinality,
        task=share.task,
        cut=share.cut,
    )
    with writer, KeyWriter(f"{share.folder}/{share.task}-keys.arrow", key_schema, shape.tier_key) as keys:
        for batch in stream(share.dsn, select(shape, share.table_id, share.rows), snapshot=share.snapshot):
            found = keys_of(batch, shape)
            keys.write(pa.RecordBatch.from_arrays([found[name] for name in shape.key_names], schema=key_schema))
            writer.write(images_of(batch, found, shape, writer.schema))
            rows += len(batch)
        reach("fold.share_read")
        made = Written(rows, keys.close(), tuple(writer.close()))
    reach("fold.share_written")
    return made
