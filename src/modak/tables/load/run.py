"""One batch under one label: hot rows to the heap, few cold rows to the delta, many cold rows to staged files.

Everything that happens to Postgres happens in one transaction together with the label, so a batch is taken in whole and
once, whatever is retried, and a rejected one leaves nothing. Memory is bounded by one batch of rows, the cold rows that
may still go to the delta, and the writer's buffer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, LiteralString

import psycopg
import structlog
from psycopg import sql

from modak.catalog import expiry, loads
from modak.catalog.loads import Accepted, Label
from modak.catalog.records import TableState
from modak.core.axis import TierKey
from modak.core.errors import Conflict, ModakError, Refused
from modak.core.faults import reach
from modak.core.names import TableName
from modak.postgres.connect import connect, translate
from modak.postgres.describe import describe
from modak.postgres.model import PgTable
from modak.tables.ingest.plan import SHOWN, room_of
from modak.tables.ingest.rows import Fault, Intake, axis_of, parsed, text_columns
from modak.tables.ingest.run import shaped
from modak.tables.load.cold import Cold, NotHere
from modak.tables.load.route import COLD, NOWHERE, Routes, routes_of
from modak.tables.load.weigh import LINE, weigh
from modak.tables.site import Site

if TYPE_CHECKING:
    import pyarrow as pa

    from modak.lake.model import LakeTable
    from modak.spark.texts import Format

log = structlog.get_logger()

MOST_STAGED = 1_000
"""Labels that may wait for their adoption before loads of a table are put off."""

_PIECE = 1 << 20
_ROWS = ("21", "22", "23")
"""What Postgres calls trouble with the data itself."""
_CHECKS: LiteralString = "SELECT EXISTS (SELECT FROM pg_constraint WHERE conrelid = %s AND contype = 'c')"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A batch as it was sent."""

    table: TableName
    label: str
    form: Format
    max_error_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a batch."""

    label: str
    state: str
    hot_rows: int
    delta_rows: int
    spooled_rows: int
    staged_files: int
    rejected_rows: int
    replay: bool

    @classmethod
    def of(cls, known: Label) -> LoadResult:
        """The recorded result of a label."""
        return cls(
            known.label,
            known.state,
            known.hot_rows,
            known.delta_rows,
            known.spooled_rows,
            known.staged_files,
            known.rejected_rows,
            True,
        )


class BadRows(ModakError):
    """The batch has rows that cannot be taken, and more of them than allowed; nothing was recorded."""

    def __init__(self, faults: list[Fault], rejected: int, total: int) -> None:
        super().__init__(
            "load.bad_rows",
            f"{rejected:,} of {total:,} rows cannot be taken.",
            hint="Nothing was recorded; the same label may be sent again with repaired rows.",
        )
        self.faults = tuple(faults[:SHOWN])
        self.rejected = rejected
        self.total = total


def load(site: Site, request: LoadRequest, body: Path) -> LoadResult:
    """Take a batch in, once; a label that is known gives its recorded result."""
    try:
        state = site.reader.state(request.table)
        return _Load(site, request, body, state).run()
    except psycopg.Error as error:
        raise _explained(error) from error


def refuse_under_pressure(site: Site, request: LoadRequest) -> None:
    """Stop new batches of a table whose earlier ones are not worked off; a known label brings nothing and passes."""
    name = request.table
    record = site.reader.state(name).table
    most = 4 * site.settings.corrections.delta_backlog_warn_rows
    try:
        with site.connect(autocommit=True) as conn:
            labels, corrections = loads.pressure(conn, record.table_id, most)
            if labels < MOST_STAGED and corrections < most:
                return
            known = loads.find(conn, record.table_id, request.label)
    except psycopg.Error as error:
        raise translate(error) from error
    if known is None or not known.stands:
        what = f"{labels:,} staged loads" if labels >= MOST_STAGED else f"{corrections:,} corrections"
        raise ModakError("load.pressure", f"{what} of {name} wait to be worked off.", hint="Try later.", retryable=True)


@dataclass
class _Tally:
    total: int = 0
    rejected: int = 0
    spooled: int = 0
    faults: list[Fault] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)


class _Load:
    """One batch on its way."""

    def __init__(self, site: Site, request: LoadRequest, body: Path, state: TableState) -> None:
        self._site = site
        self._request = request
        self._body = body
        self._state = state
        with site.connect(autocommit=True) as conn:
            self._heap: PgTable = describe(conn, request.table, state.table.tier_key)
            checked = conn.execute(_CHECKS, (self._heap.oid,)).fetchone()
        self._given = [column for column in self._heap.columns if not column.generated]
        self._routes: Routes = routes_of(state, self._heap)
        self._stageable = len(self._given) == len(self._heap.columns) and not (checked and checked[0])
        self._defaulted = frozenset(column.name for column in self._given if column.default is not None)
        self._lake: LakeTable | None = None
        self._blamed: dict[int, str] = {}
        """Line → reason of rows that Postgres has refused."""

    def run(self) -> LoadResult:
        try:
            return self._staging_if_possible()
        except (ModakError, psycopg.Error) as error:
            if not _is_about_rows(error):
                raise
            self._blamed = self._weigh()
            if not self._blamed:
                raise
        return self._staging_if_possible()

    def _staging_if_possible(self) -> LoadResult:
        try:
            return self._try(may_stage=self._stageable)
        except NotHere:
            return self._try(may_stage=False)

    def _weigh(self) -> dict[int, str]:
        """The lines that Postgres does not take, asked in a transaction that leaves nothing."""
        intake, tally = self._intake(), _Tally()
        columns = [column.name for column in self._given]
        record = self._state.table
        key = list(dict.fromkeys((*record.pk_columns, record.tier_key)))
        with tempfile.TemporaryFile(prefix="modak-load-") as rows:
            for texts, numbers in self._routed(intake, Cold(self, intake, False), tally):
                rows.write(_csv(_numbered(texts, numbers), [LINE, *columns]))
            rows.seek(0)
            missing = {name for name in columns if name not in tally.seen and name in self._defaulted}
            with connect(self._site.dsn, application="modak load") as conn:
                given = [name for name in columns if name not in missing]
                found = weigh(conn, self._heap.oid, columns, given, key, iter(lambda: rows.read(_PIECE), b""))
                conn.rollback()
        return found

    def _try(self, *, may_stage: bool) -> LoadResult:
        request, table_id = self._request, self._state.table.table_id
        with connect(self._site.dsn, application="modak load") as conn:
            if not loads.try_lock(conn, table_id, request.label):
                raise Conflict("load.in_flight", f"Label {request.label!r} is in flight.", hint="Ask again later.")
            known = loads.find(conn, table_id, request.label)
            if known is not None and known.stands:
                return LoadResult.of(known)
            intake = self._intake()
            cold = Cold(self, intake, may_stage)
            tally = _Tally()
            try:
                done = self._take_in(conn, intake, cold, tally)
                reach("load.before_commit")
            except (ModakError, psycopg.Error, OSError, NotHere):
                cold.discard()
                raise
            # Its answer may be lost although it has landed, and then the label needs its files.
            conn.commit()
        reach("load.committed")
        log.info("load.accepted", table=str(request.table), label=request.label, state=done.state, rows=tally.total)
        return done

    def _intake(self) -> Intake:
        """The shape of the rows; the lake's own columns are looked at only when something has to be staged."""
        from modak.tables.fold.read import Shape
        from modak.tables.registration.preflight import map_columns

        record = self._state.table
        mapped, problems = map_columns(self._heap, record.numeric_as, frozenset({*record.pk_columns, record.tier_key}))
        if problems:
            raise Refused("evolve.column_type", problems[0].message, hint=problems[0].hint)
        names = {column.name for column in self._given}
        kept = tuple(one for one in mapped if one.column.name in names)
        shape = Shape(tuple(one.column for one in kept), kept, record.pk_columns, record.tier_key)
        documents = frozenset(column.name for column in self._given if column.type.name in ("json", "jsonb"))
        return Intake(shape, room_of(self._state), documents)

    def lake_intake(self, documents: frozenset[str]) -> tuple[LakeTable, Intake]:
        """The same with the lake's columns and their ids."""
        lake, shape = shaped(self._site, self._site.writer(None), self._state, self._heap, evolving=False)
        if len(shape.columns) != len(self._given):
            # A column that the lake does not have yet: the leader brings it there first.
            raise NotHere
        return lake, Intake(shape, room_of(self._state), documents)

    @property
    def site(self) -> Site:
        return self._site

    @property
    def state(self) -> TableState:
        return self._state

    @property
    def label(self) -> str:
        return self._request.label

    @property
    def threshold(self) -> int:
        return self._site.settings.load.spool_threshold

    @property
    def defaulted(self) -> frozenset[str]:
        return self._defaulted

    def _take_in(self, conn: psycopg.Connection[Any], intake: Intake, cold: Cold, tally: _Tally) -> LoadResult:
        request = self._request
        columns = [column.name for column in self._given]
        # Everything is looked at before Postgres sees a row: a refusal leaves no half COPY behind.
        with tempfile.TemporaryFile(prefix="modak-load-") as rows:
            for texts, _ in self._routed(intake, cold, tally):
                rows.write(_csv(texts, columns))
            staged = cold.close()
            for texts in cold.leftover():
                rows.write(_csv(texts, columns))
            if tally.rejected > request.max_error_ratio * max(tally.total, 1):
                raise BadRows(tally.faults, tally.rejected, tally.total)
            rows.seek(0)
            self._copy(conn, columns, rows)
        heap, delta = self._upsert(conn, columns, tally)
        if staged:
            self._refuse_expired(conn, staged.keys.lower)
        load = Accepted(
            self._state.table.table_id,
            request.label,
            heap,
            delta,
            tally.spooled if staged else 0,
            tally.rejected,
            staged.keys.lower if staged else None,
            staged.keys.upper if staged else None,
            staged.described() if staged else [],
            len(staged.files) if staged else 0,
            cold.stage_id,
        )
        loads.accept(conn, load)
        return LoadResult(
            load.label, load.state, heap, delta, load.spooled_rows, load.staged_files, tally.rejected, False
        )

    def _refuse_expired(self, conn: psycopg.Connection[Any], lowest: TierKey) -> None:
        """Retention may have moved its line while the batch was staged; from here on it waits until the label is seen.

        Rows of the delta need no such look: below the line nobody reads them, and retention takes them away.
        """
        line = expiry.hold_line(conn, self._state.table.table_id)
        if line is not None and lowest < line:
            shown = self._state.table.axis.literal(line)
            raise Conflict(
                "load.lines_moved",
                f"The retention line of {self._request.table} has moved to {shown} meanwhile.",
                hint="Send it again to be told which rows have expired.",
            )

    def _copy(self, conn: psycopg.Connection[Any], columns: list[str], rows: IO[bytes]) -> None:
        target = sql.Identifier(self._request.table.schema, self._request.table.name)
        listed = sql.SQL(", ").join(map(sql.Identifier, columns))
        empty = sql.SQL("CREATE TEMP TABLE modak_load ON COMMIT DROP AS SELECT {} FROM {} WITH NO DATA")
        conn.execute(empty.format(listed, target))
        with conn.cursor().copy(sql.SQL("COPY modak_load ({}) FROM STDIN (FORMAT csv)").format(listed)) as copy:
            while piece := rows.read(_PIECE):
                copy.write(piece)

    def _upsert(self, conn: psycopg.Connection[Any], columns: list[str], tally: _Tally) -> tuple[int, int]:
        absent = [name for name in columns if name not in tally.seen and name in self._defaulted]
        for name in absent:
            # A column that no row gives gets its default, as in an INSERT that leaves it out.
            conn.execute(sql.SQL("ALTER TABLE pg_temp.modak_load DROP COLUMN {}").format(sql.Identifier(name)))
        row = conn.execute(
            "SELECT heap, delta FROM modak.modak_upsert_from(%s::oid::regclass, 'pg_temp.modak_load'::regclass)",
            (self._heap.oid,),
        ).fetchone()
        assert row is not None
        return int(row[0]), int(row[1])

    def _routed(self, intake: Intake, cold: Cold, tally: _Tally) -> Iterator[tuple[pa.RecordBatch, Any]]:
        """The texts of the rows for Postgres, and their lines; cold ones go aside."""
        import numpy as np
        import pyarrow as pa

        from modak.lake.decode import arrow_schema
        from modak.spark.texts import read_texts

        schema = arrow_schema(intake.shape.columns)
        blamed_lines = np.fromiter(self._blamed, np.int64, len(self._blamed))
        for texts in read_texts(self._body, self._request.form, text_columns(intake)):
            found, numbers = texts.rows, np.asarray(texts.lines)
            blamed = np.isin(numbers, blamed_lines) if len(blamed_lines) else np.zeros(len(numbers), bool)
            if blamed.any():
                found, numbers = found.filter(pa.array(~blamed)), numbers[~blamed]
            made = parsed(found, numbers, intake.shape.mapped, schema)
            rows = found if made.kept.all() else found.filter(pa.array(made.kept))
            keys = made.batch.column(intake.shape.tier_key)
            routes = np.full(len(rows), NOWHERE, np.int8)
            valued = np.asarray(keys.is_valid())
            axis = axis_of(keys.fill_null(pa.scalar(0, keys.type)) if keys.null_count else keys)
            routes[valued] = self._routes.of(axis[valued])
            lost = np.flatnonzero(routes == NOWHERE)
            bad = len(texts.faults) + int(blamed.sum()) + int((~made.kept).sum()) + len(lost)
            tally.total += len(texts.rows) + len(texts.faults)
            tally.rejected += bad
            told = [(int(line), self._blamed[int(line)]) for line in np.asarray(texts.lines)[blamed][:SHOWN]]
            faults = [*texts.faults, *told, *made.faults, *self._why(lost[:SHOWN], axis, valued, made.numbers)]
            tally.faults += sorted(faults)[: SHOWN - len(tally.faults)]
            tally.seen |= {name for name in rows.schema.names if rows.column(name).null_count < len(rows)}
            if tally.rejected and not self._request.max_error_ratio and len(tally.faults) >= SHOWN:
                raise BadRows(tally.faults, tally.rejected, tally.total)
            aside = np.flatnonzero(routes == COLD) if cold.may_stage else ()
            if len(aside):
                tally.spooled += len(aside)
                cold.take(rows.take(pa.array(aside)), made.batch.take(pa.array(aside)))
            # Cold rows that cannot be staged go to Postgres with the others, which knows where they belong.
            hot = np.flatnonzero(routes < (COLD if cold.may_stage else NOWHERE))
            if len(hot):
                yield (rows if len(hot) == len(rows) else rows.take(pa.array(hot))), made.numbers[hot]

    def _why(self, lost: Any, axis: Any, valued: Any, numbers: Any) -> list[Fault]:
        name = self._state.table.tier_key
        return [
            (int(numbers[at]), self._routes.why_not(int(axis[at])) if valued[at] else f"column {name} is NULL")
            for at in lost
        ]


def _csv(texts: pa.RecordBatch, columns: list[str]) -> bytes:
    import pyarrow as pa
    from pyarrow import csv

    arrays = [
        texts.column(name) if name in texts.schema.names else pa.nulls(len(texts), pa.string()) for name in columns
    ]
    sink = pa.BufferOutputStream()
    options = csv.WriteOptions(include_header=False, quoting_style="needed")
    csv.write_csv(pa.RecordBatch.from_arrays(arrays, names=columns), sink, options)
    return bytes(sink.getvalue())


def _numbered(texts: pa.RecordBatch, numbers: Any) -> pa.RecordBatch:
    import pyarrow as pa

    lines = pa.array(numbers, pa.int64()).cast(pa.string())
    return pa.RecordBatch.from_arrays([lines, *texts.columns], names=[LINE, *texts.schema.names])


def _is_about_rows(error: Exception) -> bool:
    """Whether single rows of the batch may be to blame."""
    if isinstance(error, psycopg.Error):
        return (error.sqlstate or "").startswith(_ROWS)
    return isinstance(error, ModakError) and error.code == "load.twice"


def _explained(error: psycopg.Error) -> ModakError:
    """Rows that Postgres refuses are the sender's; everything else is as everywhere."""
    state = error.sqlstate or ""
    if state.startswith(_ROWS):
        said = (error.diag.message_primary or str(error)).strip()
        where = (error.diag.context or "").splitlines()
        return ModakError("load.refused", f"Postgres refuses the rows: {said}", hint=where[0] if where else "")
    return translate(error)
