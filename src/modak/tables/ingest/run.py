"""One ingest: look at the inputs, plan, scan keys, write or adopt, and land everything in one commit or nothing at all.

Runs beside the daemon: the journal row is held by a lock while the command lives, and the commit is the one transaction
that every flow makes. Keys that the lake has are found by `locate` (files whose bounds exclude them are not read) and
hidden by deletion vectors; corrections of the same keys that are older than the journal row leave the delta in the same
transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any, LiteralString, TypeVar

import psycopg
import structlog

from modak.catalog import oplock
from modak.catalog.journal import Journal
from modak.catalog.records import TableState
from modak.catalog.write import CatalogWriter, CommitTransaction
from modak.core.errors import ModakError, Refused, UsageError
from modak.core.faults import reach
from modak.core.ids import OpId, new_op_id
from modak.core.names import TableName
from modak.core.states import OpPhase
from modak.lake.locate import KeyFile, Located
from modak.lake.model import DataFile, LakeTable, Prepared, data_folder
from modak.postgres.connect import translate
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.storage.uri import normal
from modak.tables.evolve import evolve
from modak.tables.fold.read import Shape, shape_of
from modak.tables.ingest import overlay
from modak.tables.ingest.commit import DRIVER_ROWS, Landing, Retired
from modak.tables.ingest.inputs import Kind, Source, opened
from modak.tables.ingest.inspect import THREADS, inspect
from modak.tables.ingest.plan import SHOWN, Facts, IngestPlan, Refusal, plan_ingest, room_of
from modak.tables.ingest.rows import Intake
from modak.tables.ingest.work import (
    Job,
    Scanned,
    adopt_file,
    key_batches,
    key_schema,
    look_through,
    scan_keys,
    write_rows,
)
from modak.tables.registration.preflight import map_columns
from modak.tables.site import Site
from modak.tables.tidy import give_up, tidy_landed

log = structlog.get_logger()

Result = TypeVar("Result")
OnProgress = Callable[[str, int, int], None]

_KNOWN: LiteralString = "SELECT source, version FROM modak.ingested WHERE table_id = %s"
_TAKEN: LiteralString = """
    INSERT INTO modak.ingested (table_id, source, version, op_id, row_count)
    SELECT %(table)s, s, v, %(op)s, n
    FROM unnest(%(sources)s::text[], %(versions)s::text[], %(rows)s::bigint[]) t (s, v, n)
"""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an ingest did."""

    table: TableName
    plan: IngestPlan
    rows: int = 0
    replaced: int = 0
    adopted_files: int = 0
    written_files: int = 0
    bytes: int = 0
    left_out: int = 0
    """Rows whose key came again later in the input."""
    corrections: int = 0
    """Older corrections that the new rows supersede."""
    snapshot_id: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for."""

    table: TableName
    given: tuple[str, ...]
    kind: Kind
    rewrite: bool = False
    dry_run: bool = False


def ingest(
    site: Site, request: Request, *, stdin: IO[bytes] | None = None, on_progress: OnProgress | None = None
) -> IngestReport:
    """Take the whole input in as one atomic upsert, or refuse all of it with the first reasons."""
    try:
        return _ingest(site, request, stdin, on_progress or _quiet)
    except psycopg.Error as error:
        raise translate(error) from error


def _ingest(site: Site, request: Request, stdin: IO[bytes] | None, tell: OnProgress) -> IngestReport:
    started = site.clock.monotonic()
    writer = site.writer(None)
    state = site.reader.state(request.table)
    refuse_unless_cold(state)
    with opened(request.given, request.kind, site.keys[state.table.profile_id], stdin) as sources:
        _refuse_own(state, sources)
        look = _Look.at(site, writer, state, evolving=not request.dry_run)
        facts = inspect(sources, look.intake.shape, look.lake, look.cut)
        plan = plan_ingest(request.table, look.intake.room, facts, _known(site, state), rewrite=request.rewrite)
        _refuse(plan.refusals)
        if request.dry_run:
            # Footers tell whether Parquet fits; of JSON lines only the lines themselves do.
            lines = [one for one in plan.rewrite if one.source.kind == "jsonl"]
            _refuse_faults(lines, [look_through(one.source, look.intake) for one in lines])
        if request.dry_run or not (plan.adopt or plan.rewrite):
            return IngestReport(request.table, plan, seconds=site.clock.monotonic() - started)
        report = _Ingest(site, writer, look, plan, tell, request.rewrite).run()
    return replace(report, seconds=site.clock.monotonic() - started)


def refuse_unless_cold(state: TableState) -> None:
    """Only tables whose cold rows are in the lake alone can take history there."""
    record = state.table
    if record.mode == "mirrored" and record.heap_retention is None:
        raise Refused("ingest.mode", f"{record.name} is mirrored whole.", hint="COPY the rows into Postgres.")
    if record.keep_heap:
        raise Refused(
            "ingest.keep_heap", f"{record.name} keeps its rows in the heap too.", hint="COPY the rows into Postgres."
        )
    if record.frozen is not None:
        raise Refused(
            "lake.frozen", "Publication is frozen by a foreign snapshot.", hint="Look at modak-worker status."
        )
    if state.staged_loads:
        raise Refused(
            "ingest.staged_loads",
            f"{state.staged_loads} staged loads of {record.name} wait for their adoption.",
            hint="The daemon adopts them in its next cycle; try again then.",
        )


@dataclass(frozen=True, slots=True)
class _Look:
    """The table as an ingest sees it."""

    state: TableState
    lake: LakeTable
    intake: Intake
    cut: tuple[int, ...]

    @classmethod
    def at(cls, site: Site, writer: CatalogWriter, state: TableState, *, evolving: bool) -> _Look:
        record = state.table
        with site.connect(autocommit=True) as conn:
            heap = describe(conn, record.name, record.tier_key)
        lake, shape = shaped(site, writer, state, heap, evolving=evolving)
        documents = frozenset(column.name for column in heap.columns if column.type.name in ("json", "jsonb"))
        cut = tuple(sorted({part.upper for part in state.partitions if part.upper is not None}))
        return cls(state, lake, Intake(shape, room_of(state), documents), cut)


def shaped(
    site: Site, writer: CatalogWriter, state: TableState, heap: PgTable, *, evolving: bool = True
) -> tuple[LakeTable, Shape]:
    """The lake table with every column that the heap has, and the shape of its rows."""
    record = state.table
    mapped, problems = map_columns(heap, record.numeric_as, frozenset({*record.pk_columns, record.tier_key}))
    if problems:
        raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
    lake = site.lake.load(record.lake)
    if lake is None:
        raise Refused("lake.missing", f"The lake table {record.lake} is gone from the catalog.")
    if evolving:
        lake = evolve(site, writer, state, heap, mapped, lake)
    here = {column.name for column in lake.schema}
    return lake, shape_of(record, heap, [one for one in mapped if one.column.name in here], lake)


def _refuse_own(state: TableState, sources: Sequence[Source]) -> None:
    own = next((source for source in sources if source.uri.startswith(f"{normal(state.table.location)}/")), None)
    if own is not None:
        raise UsageError("usage.ingest", f"{own.shown} belongs to the lake of {state.table.name} itself.")


def _known(site: Site, state: TableState) -> set[tuple[str, str]]:
    """Sources with their versions: one source may have come in several of them, as standard input does."""
    with site.connect(autocommit=True) as conn:
        return {(source, version) for source, version in conn.execute(_KNOWN, (state.table.table_id,))}


def _refuse(refusals: Sequence[Refusal]) -> None:
    if not refusals:
        return
    lines = "\n".join(f"  - {one}" for one in refusals[:SHOWN])
    more = f"\n  … and {len(refusals) - SHOWN:,} more" if len(refusals) > SHOWN else ""
    raise Refused(
        "ingest.refused", f"The input is refused as a whole:\n{lines}{more}", hint="Nothing was changed; mend it first."
    )


def _refuse_faults(facts: Sequence[Facts], faults: Sequence[Sequence[tuple[int, str]]]) -> None:
    _refuse(
        [
            Refusal(one.source.shown, reason, row)
            for one, several in zip(facts, faults, strict=True)
            for row, reason in several
        ]
    )


class _Ingest:
    """One planned ingest on its way."""

    def __init__(
        self, site: Site, writer: CatalogWriter, look: _Look, plan: IngestPlan, tell: OnProgress, rewrite: bool
    ) -> None:
        self._site = site
        self._writer = writer
        self._look = look
        self._plan = plan
        self._tell = tell
        self._may_rewrite = rewrite
        self._op_id: OpId = new_op_id(site.clock)
        self._folder = data_folder(look.state.table.location, self._op_id)

    def run(self) -> IngestReport:
        site, table = self._site, self._look.state.table
        with oplock.held(site.dsn, self._op_id):
            Journal(self._writer).begin(self._op_id, table.table_id, "ingest", self._journaled(), [self._folder])
            try:
                # The beginning: folds that look at the delta after this see the journal and wait.
                began = _now(site)
                Journal(self._writer).phase(self._op_id, OpPhase.PLANNED, OpPhase.WRITING)
                report = self._take_in(began)
            except ModakError as error:
                give_up(site, self._writer, table.location, self._op_id, error)
                raise
            reach("ingest.landed")
            landed = site.reader.op(self._op_id)
            assert landed is not None
            tidy_landed(site, self._writer, site.reader.state(table.name), landed)
        return report

    def _take_in(self, began: str) -> IngestReport:
        adopt, anew = list(self._plan.adopt), list(self._plan.rewrite)
        facts = [*adopt, *anew]
        scans = self._each("keys", scan_keys, [self._job(at, one) for at, one in enumerate(facts)])
        _refuse_faults(facts, [scan.faults for scan in scans])
        late = self._late([scan.keys for scan in scans])
        self._refuse_repeating(adopt, late)
        repeating = [at for at in range(len(adopt)) if at in late]
        written = [*repeating, *range(len(adopt), len(facts))]
        jobs = [self._job(at, facts[at], tuple(late.get(at, ()))) for at in written]
        made = self._each("rows", write_rows, jobs)
        _refuse_faults([facts[at] for at in written], [faults for _, faults in made])
        whole = [at for at in range(len(adopt)) if at not in late]
        adopted = self._each("adopt", adopt_file, [self._job(at, facts[at]) for at in whole])
        files = (*adopted, *(file for files, _ in made for file in files))
        names = tuple(dict.fromkeys(name for at in whole if not facts[at].has_ids for name in facts[at].columns))
        located, landed, corrections = self._land(files, names, facts, scans, began)
        return IngestReport(
            self._plan.table,
            self._plan,
            rows=sum(file.rows for file in files),
            replaced=located.rows,
            adopted_files=len(adopted),
            written_files=len(files) - len(adopted),
            bytes=sum(file.bytes for file in files),
            left_out=sum(len(rows) for rows in late.values()),
            corrections=corrections,
            snapshot_id=landed.snapshot_id,
        )

    def _job(self, at: int, facts: Facts, left_out: tuple[int, ...] = ()) -> Job:
        look = self._look
        return Job(
            facts.source,
            look.intake,
            self._folder,
            f"{at:05d}",
            look.lake.layout,
            look.lake.spec_id,
            self._site.settings.lake.target_file_bytes,
            look.cut,
            facts,
            left_out,
        )

    def _each(self, step: str, work: Callable[[Job], Result], jobs: list[Job]) -> list[Result]:
        if not jobs:
            return []
        rows = sum(job.facts.rows for job in jobs if job.facts is not None)
        big = sum(job.source.size for job in jobs if job.source.kind == "jsonl") >> 8
        if rows + big <= DRIVER_ROWS or len(jobs) == 1:
            # Keys and copies are mostly waiting; rows take a writer's memory each, and long lines take more.
            light = step != "rows" and all(job.source.kind == "parquet" for job in jobs)
            done = []
            with ThreadPoolExecutor(THREADS if light else 1, "modak-ingest") as threads:
                for number, made in enumerate(threads.map(work, jobs), start=1):
                    done.append(made)
                    self._tell(step, number, len(jobs))
            return done
        from modak.spark.distribute import distribute

        return distribute(self._site.spark, work, jobs, on_progress=lambda some, all_: self._tell(step, some, all_))

    def _late(self, keys: list[KeyFile]) -> dict[int, list[int]]:
        """Source → rows whose key comes again later in the input: the last one wins."""
        from modak.lake.decode import arrow_schema
        from modak.spark.duplicates import superseded

        shape = self._look.intake.shape
        schema = key_schema(arrow_schema(shape.keys))
        return superseded(key_batches(keys, schema), schema, shape.key_names)

    def _refuse_repeating(self, adopt: Sequence[Facts], late: dict[int, list[int]]) -> None:
        if self._may_rewrite:
            return
        _refuse(
            [
                Refusal(
                    adopt[at].source.shown,
                    f"{len(late[at]):,} rows have a key that comes again later in the input, so the file cannot be"
                    " adopted as it is (--rewrite keeps the last of each)",
                    late[at][0] + 1,
                )
                for at in range(len(adopt))
                if at in late
            ]
        )

    def _land(
        self,
        files: tuple[DataFile, ...],
        names: tuple[str, ...],
        facts: Sequence[Facts],
        scans: Sequence[Scanned],
        began: str,
    ) -> tuple[Located, Prepared, int]:
        site, look, table = self._site, self._look, self._look.state.table
        keys = [scan.keys for scan in scans]
        sources = {
            "table": table.table_id,
            "op": self._op_id,
            "sources": [_name(one.source) for one in facts],
            "versions": [one.source.version for one in facts],
            "rows": [scan.rows for scan in scans],
        }
        landing = Landing(site, self._writer, look.state, look.intake, self._op_id, self._folder, keys)

        def also(tx: CommitTransaction) -> None:
            tx.change("These sources", _TAKEN, sources)

        def older() -> list[Retired]:
            return [(overlay.superseded(site, table.table_id, look.intake.shape, keys, began), began)]

        return landing.land(files, names, "ingest", OpPhase.WRITING, also, older)

    def _journaled(self) -> dict[str, Any]:
        room = self._look.intake.room
        return {
            "table": [self._plan.table.schema, self._plan.table.name],
            "cut_from": room.lower,
            "cut_to": room.upper,
            "sources": [one.source.shown for one in (*self._plan.adopt, *self._plan.rewrite)][:100],
            "adopt": len(self._plan.adopt),
            "rewrite": len(self._plan.rewrite),
        }


def _now(site: Site) -> str:
    with site.connect(autocommit=True) as conn:
        row = conn.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    return str(row[0])


def _name(source: Source) -> str:
    return source.shown if source.shown == "-" else source.uri


def _quiet(_step: str, _done: int, _total: int) -> None:
    return None
