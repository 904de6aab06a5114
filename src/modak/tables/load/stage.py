"""Cold rows of a large batch as files, outside of every table's location, until the leader adopts them.

The folder is written down before its first file. The files are those of the lake already: its field ids, one partition
each, every key once. Memory is bounded by the writer's buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from modak.catalog import loads
from modak.catalog.loads import Stage
from modak.catalog.records import TableState
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.core.ids import new_op_id
from modak.lake.locate import KeyFile
from modak.lake.model import DataFile, LakeTable
from modak.tables.ingest.rows import Intake
from modak.tables.site import Site

if TYPE_CHECKING:
    import pyarrow as pa

    from modak.lake.iceberg.files import FileWriter
    from modak.lake.iceberg.locate import KeyWriter

FOLDER = "modak-staged"
BUFFER_BYTES = 24 << 20
FILE_BYTES = 64 << 20
KEY_MEMORY = "64MB"


@dataclass(frozen=True, slots=True)
class Staged:
    """What a batch left in its folder."""

    files: tuple[DataFile, ...]
    keys: KeyFile

    @property
    def uris(self) -> tuple[str, ...]:
        """Every file of it."""
        return (*(file.path for file in self.files), self.keys.uri)

    def described(self) -> dict[str, Any]:
        """As the label keeps it."""
        return {"data": [asdict(file) for file in self.files], "keys": asdict(self.keys)}

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Staged:
        """Back from the label."""
        try:
            return cls(tuple(DataFile(**file) for file in described["data"]), KeyFile(**described["keys"]))
        except (KeyError, TypeError, IndexError):
            raise Refused("load.damaged", "The label does not say what was staged under it.") from None


class Staging:
    """Writes the cold rows of one batch; leaving it with an error takes the files away again."""

    def __init__(self, site: Site, state: TableState, lake: LakeTable, intake: Intake, label: str) -> None:
        self._site = site
        self._intake = intake
        stage_id = new_op_id(site.clock)
        root = site.root_of(state.table.profile_id)
        self.stage = Stage(stage_id, state.table.table_id, label, f"{root}/{FOLDER}/{stage_id}")
        reach("load.before_stage")
        with site.connect(autocommit=True) as conn:
            loads.open_stage(conn, self.stage)
        reach("load.stage_opened")
        cut = tuple(sorted({part.upper for part in state.partitions if part.upper is not None}))
        self._files, self._keys = _writers(self.stage.folder, intake, lake, cut)
        self._closed = False

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows in the lake's types."""
        import pyarrow as pa

        shape = self._intake.shape
        self._files.write(pa.RecordBatch.from_arrays(batch.columns, schema=self._files.schema))
        keys = [batch.column(name) for name in shape.key_names]
        self._keys.write(pa.RecordBatch.from_arrays(keys, schema=self._schema))

    def close(self) -> Staged:
        """Finish the files; a key that comes twice is refused."""
        made = Staged(tuple(self._files.close()), self._keys.close())
        self._closed = True
        reach("load.staged")
        self._refuse_twice(made.keys)
        return made

    @property
    def _schema(self) -> pa.Schema:
        from modak.lake.decode import arrow_schema

        return arrow_schema(self._intake.shape.keys)

    def _refuse_twice(self, keys: KeyFile) -> None:
        import duckdb

        from modak.spark.duplicates import repeated
        from modak.tables.ingest.work import key_batches, key_schema

        schema = key_schema(self._schema)
        try:
            late = repeated(key_batches([keys], schema), schema, self._intake.shape.key_names, memory=KEY_MEMORY)
        except duckdb.IOException as error:
            # Keys that are too many for the memory wait on the same disk as the body.
            raise OSError(str(error)) from error
        if late:
            raise ModakError(
                "load.twice",
                f"{late:,} rows have a key that comes again in the batch.",
                hint="Give each key once.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, ModakError):
            self.discard()

    def discard(self) -> None:
        """Remove what was staged; what cannot be removed now goes after the grace."""
        try:
            if not self._closed:
                self._files.abort()
            self._site.store.delete_prefix(self.stage.folder)
            with self._site.connect(autocommit=True) as conn:
                loads.forget_stage(conn, self.stage.stage_id)
        except ModakError:
            return


def _writers(folder: str, intake: Intake, lake: LakeTable, cut: tuple[int, ...]) -> tuple[FileWriter, KeyWriter]:
    from modak.lake.decode import arrow_schema
    from modak.lake.iceberg.files import FileWriter
    from modak.lake.iceberg.locate import KeyWriter

    shape = intake.shape
    files = FileWriter(
        folder,
        shape.columns,
        lake.layout,
        task="load",
        tier_key=shape.tier_key,
        spec_id=lake.spec_id,
        target_bytes=FILE_BYTES,
        cut=cut,
        buffer_bytes=BUFFER_BYTES,
        open_files=16,
    )
    return files, KeyWriter(f"{folder}/keys.arrow", arrow_schema(shape.keys), shape.tier_key)
