"""`entities …`: stores of entities, from their tables in Postgres to base and delta files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modak.cli.output import count, dump, duration, note, number, paint, record, say, size
from modak.cli.output import table as grid
from modak.cli.parsing import JsonOption
from modak.core.errors import ModakError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from modak.entities.changelog import Unfit
    from modak.entities.compaction import CompactionReport
    from modak.entities.flushing import FlushReport
    from modak.entities.health import SchemaStatus
    from modak.entities.initial import InitReport
    from modak.entities.reconciling import Reconciled
    from modak.entities.store import EntityStore
    from modak.spark.predicate import Predicate

SchemaOption = Annotated[
    str | None, typer.Option("--schema", metavar="SCHEMA", help="Only this schema, by its id or its name.")
]


@contextmanager
def opened(*, log_level: str = "warning") -> Iterator[EntityStore]:
    """The entity store of the settings, for one command."""
    from modak.cli.errors import debugging
    from modak.cli.place import settings
    from modak.cli.quick import structlog_without_rich

    chosen = settings()
    structlog_without_rich()
    from modak.cli import logs
    from modak.entities.store import EntityStore
    from modak.runtime.opening import open_site
    from modak.spark import session

    logs.configure(chosen.log.format, level="debug" if debugging() else log_level)

    def spark() -> object:
        return session.start(chosen, chosen.home.path)

    if chosen.entities.pg_host is not None:
        yield EntityStore.open(chosen, None, spark=spark)  # type: ignore[arg-type]
        return
    with open_site(chosen) as site:
        yield EntityStore.open(chosen, site.dsn, spark=spark)  # type: ignore[arg-type]


def install() -> None:
    """Make the three tables and watch every write.

    Tables that are there are checked and kept. Safe to run again at any time: what is missing is made.
    """
    with opened() as store:
        from modak.entities.address import is_loopback
        from modak.entities.tables import install as run
        from modak.entities.tables import unseen

        with store.connect() as conn:
            made = run(conn, store.tables)
            # Without a base, rows that were there before the log are in no file.
            baseless = [each for each in store.schema_ids() if not store.manifests.load(each).manifest.base]
            older = [each for each in baseless if unseen(conn, store.tables, each)]
        dsn = store.address.dsn
    say(f"{paint('installed', 'green')} {made.main.name}, {made.eav.name} and {made.log.name}: every write is watched")
    mode = dict(dsn.options).get("sslmode", "")
    how = "without TLS, because it is this machine" if is_loopback(dsn.host) and mode == "disable" else f"TLS: {mode}"
    note(f"Postgres {dsn.host}:{dsn.port} ({how}).")
    if made.dirtied:
        note(
            f"Writes had not been watched for a while, so {count(made.dirtied, 'row')} will be exported again. Rows "
            "that were deleted meanwhile may still be in the files: modak-worker entities verify tells, and "
            "modak-worker entities init --replace-delta puts it right."
        )
    for each in older:
        note(f"Schema {each} has rows from before that nobody has exported: modak-worker entities init --schema {each}")


def flush(
    schema: SchemaOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide, and change nothing.")] = False,
) -> None:
    """Export changed rows now, where thresholds say so.

    One pass over all schemas, or one: exactly what the daemon does on its interval.
    """
    with opened(log_level="error" if dry_run else "warning") as store:
        from modak.entities.flushing import flush as run

        reports = run(store, schemas=None if schema is None else [_id(store, schema)], dry_run=dry_run)
    if not reports:
        say("No row is dirty.")
    for report in reports:
        _show_flush(report)
    if dry_run:
        note("Nothing was changed.")
    _end([report.error for report in reports])


def _show_flush(report: FlushReport) -> None:
    where = f"schema {report.schema_id}"
    if report.skipped:
        say(f"{paint('skipped', 'yellow')} {where}: somebody else works on it")
    elif report.files:
        say(
            f"{paint('flushed', 'green')} {where}: {count(report.rows, 'row')} in {count(report.files, 'file')} "
            f"({size(report.bytes)}), {count(report.marked, 'row')} marked clean"
        )
    elif report.decision is not None:
        verb = "would flush" if report.decision.flush else "nothing to do in"
        say(f"{verb} {where}: {report.decision.because}")
    _show_unfit(report.schema_id, report.unfit, len(report.unfit))


def init(
    schema: SchemaOption = None,
    replace_delta: Annotated[
        bool, typer.Option("--replace-delta", help="Also where deltas exist; the new base replaces them.")
    ] = False,
) -> None:
    """Export everything anew as a base.

    The new files of a schema are published at once, at the end; until then readers see what they saw before.
    """
    errors: list[ModakError | None] = []
    with opened(log_level="info") as store:
        from modak.entities.initial import init as run

        for schema_id in store.schema_ids() if schema is None else (_id(store, schema),):
            try:
                _show_init(run(store, schema_id, replace_delta=replace_delta))
            except ModakError as error:
                errors.append(error)
    _end(errors)


def _show_init(report: InitReport) -> None:
    rate = report.rows / report.seconds if report.seconds else 0
    say(
        f"{paint('exported', 'green')} schema {report.schema_id}: {count(report.rows, 'row')} in "
        f"{count(report.files, 'base file')} ({size(report.bytes)}), {duration(report.seconds)} ({number(rate)} rows/s)"
    )
    _show_unfit(report.schema_id, report.unfit, len(report.unfit))


def _show_unfit(schema_id: int, unfit: Sequence[Unfit], of: int) -> None:
    for each in unfit[:10]:
        say(f"{paint('put aside', 'yellow')} schema {schema_id}: row {each.row_id}: {each.reason}")
    if of > 10:
        say(f"{number(of - 10)} more rows are put aside.")


def compact(
    schema: SchemaOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")] = False,
) -> None:
    """Merge base and delta files where it pays."""
    with opened(log_level="warning") as store:
        from modak.entities.compaction import compact as run
        from modak.entities.compaction import plan

        chosen = None if schema is None else [_id(store, schema)]
        if dry_run:
            for schema_id in chosen or store.schema_ids():
                planned = plan(store, schema_id)
                kind = type(planned).__name__.lower()
                say(f"schema {schema_id}: {kind}, {getattr(planned, 'because', 'if no keys overlap')}")
            note("Nothing was changed.")
            return
        reports = run(store, chosen)
    for report in reports:
        _show_compaction(report)
    _end([report.error for report in reports])


def _show_compaction(report: CompactionReport) -> None:
    where = f"schema {report.schema_id}"
    if report.promoted:
        say(f"{paint('promoted', 'green')} {where}: {count(report.promoted, 'delta')} moved to the base")
    elif report.merged:
        say(
            f"{paint('compacted', 'green')} {where}: {count(report.merged, 'file')} became {number(report.files)} "
            f"with {count(report.rows, 'row')} ({size(report.bytes)}), {duration(report.seconds)}"
        )
    elif report.error is None:
        say(f"nothing to do in {where}: {report.because}")


def status(json: JsonOption = False) -> None:
    """Show how every schema is doing."""
    with opened() as store:
        from modak.entities.health import status as run

        rows = run(store)
    if json:
        dump({"schemas": [{**record(row), "put_aside": list(map(record, row.put_aside))} for row in rows]})
        return
    columns = ("Schema", "Name", "Dirty", "Oldest", "Put aside", "Base", "Delta", "Version", "Waiting for gc")
    right = frozenset({"Dirty", "Put aside", "Version", "Waiting for gc"})
    grid(columns, [_line(row) for row in rows], right=right)
    for row in rows:
        _show_unfit(row.schema_id, row.put_aside, row.quarantined)


def _line(row: SchemaStatus) -> tuple[str, ...]:
    return (
        str(row.schema_id),
        row.name,
        number(row.dirty),
        "–" if row.oldest_seconds is None else duration(row.oldest_seconds),
        number(row.quarantined),
        f"{count(row.base_rows, 'row')}, {count(row.base_files, 'file')}, {size(row.base_bytes)}",
        f"{count(row.delta_rows, 'row')}, {count(row.delta_files, 'file')}, {size(row.delta_bytes)}",
        str(row.version),
        number(row.waiting_for_gc),
    )


def reconcile(
    schema: SchemaOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Have the rows of stray or lost files exported again.")
    ] = False,
    gc: Annotated[bool, typer.Option("--gc", help="Delete files that have been out of the store for a while.")] = False,
    json: JsonOption = False,
) -> None:
    """Compare manifests with the files; exit code 1 on differences.

    Only what left the store more than a quarter of an hour ago is ever deleted, and only with --gc.
    """
    with opened() as store:
        from modak.entities.reconciling import reconcile as run

        chosen = store.schema_ids() if schema is None else (_id(store, schema),)
        done = [run(store, schema_id, repair=repair, gc=gc) for schema_id in chosen]
        now = [run(store, schema_id) for schema_id in chosen] if repair or gc else done
        left = [each.found.any for each in now]
    if json:
        dump({"schemas": [_plain(each) for each in done], "sound": not any(left)})
    else:
        for each in done:
            _show_reconciled(each)
    if any(left):
        raise typer.Exit(1)


def _plain(done: Reconciled) -> dict[str, object]:
    found = record(done.found)
    return {**record(done), "found": {**found, "missing": [entry.path for entry in done.found.missing]}}


def _show_reconciled(done: Reconciled) -> None:
    found = done.found
    where = f"schema {done.schema_id}"
    for what, paths in (
        ("unlisted delta", found.delta_orphans),
        ("unlisted base", found.base_orphans),
        ("temporary file", found.leftovers),
        ("lost file", [entry.path for entry in found.missing]),
        ("lost manifest", [found.lost_manifest] if found.lost_manifest else []),
    ):
        for path in paths:
            say(f"{paint(what, 'yellow')} {where}: {path}")
    if done.repaired_rows:
        say(f"Marked {count(done.repaired_rows, 'row')} of {where} dirty; the next flush exports what is dirty.")
    if done.deleted:
        say(f"Deleted {count(done.deleted, 'file')} of {where}.")
    if done.waiting:
        say(f"Left {count(done.waiting, 'file')} of {where} for gc.")
    if done.busy:
        files = count(len(found.waiting), "file")
        say(f"{paint('in work', 'yellow')} {where}: somebody works on it; not listed yet, or left for gc: {files}")
    elif not found.any:
        say(f"{paint('in order', 'green')} {where}")


def query(
    text: Annotated[str, typer.Argument(metavar="QUERY", help="Spark SQL; schemas go by their names.")],
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="table, csv, json (a line per row) or parquet.")
    ] = "table",
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write there, not to stdout.")] = None,
) -> None:
    """Query entities, unflushed changes included."""
    from modak.cli.answers import FORMATS

    if format_ not in FORMATS:
        raise UsageError("usage.format", f"There is no format {format_!r}.", hint=f"Known: {', '.join(FORMATS)}.")
    if format_ == "parquet" and output is None:
        raise UsageError("usage.output", "Parquet goes into a file.", hint="Add --output answer.parquet.")
    if not text.strip():
        raise UsageError("usage.query", "There is no query.")
    with opened() as store:
        from modak.cli.answers import deliver
        from modak.cli.commands.sql import _quieten
        from modak.core.names import TableName
        from modak.entities.reading import assemble
        from modak.entities.types import spark_struct
        from modak.tables.seam.mentions import understand, wrong
        from modak.tables.seam.query import answer

        assert store.crew.spark is not None
        spark = store.crew.spark()
        _quieten()
        known = {TableName("public", each.name.lower()): each for each in store.registry.schemas}
        statement = understand(spark, text.strip().rstrip(";"), known)

        def read(name: TableName, needed: frozenset[str], predicate: Predicate | None) -> DataFrame:
            schema = known[name]
            return assemble(spark, store, schema, [a for a in schema.attributes if a.name in needed], predicate)

        try:
            schemas = {name: spark_struct(known[name].attributes) for name in statement.views}
            deliver(answer(spark, statement, schemas, read), format_, output.absolute() if output else None)
        except (ModakError, OSError):
            raise
        except Exception as error:
            raise wrong(error) from None


def verify(schema: SchemaOption = None, json: JsonOption = False) -> None:
    """Compare Postgres with the store, every attribute; exit code 1 on a mismatch."""
    with opened() as store:
        from modak.entities.verifying import verify as run

        chosen = store.schema_ids() if schema is None else (_id(store, schema),)
        reports = [run(store, schema_id) for schema_id in chosen]
    if json:
        dump([{**record(each), "differences": [record(one) for one in each.differences]} for each in reports])
    else:
        for report in reports:
            if report.differences:
                headings = ("Difference", "Row", "Attribute", "Postgres", "Store")
                rows = [(d.kind, d.row_id, d.attribute, d.postgres, d.store) for d in report.differences]
                grid(headings, rows)
            spent = f"{count(report.compared, 'row')} compared in {duration(report.seconds)}"
            dirty = f", {number(report.dirty)} dirty ones are read from Postgres" if report.dirty else ""
            if report.sound:
                say(f"{paint('equal', 'green')} schema {report.schema_id}: {spent}{dirty}")
            else:
                say(f"{paint('different', 'red')} schema {report.schema_id}: {count(report.differing, 'row')}; {spent}")
    if not all(report.sound for report in reports):
        raise typer.Exit(1)


def _id(store: EntityStore, schema: str) -> int:
    from modak.entities.reading import resolve

    return resolve(store, int(schema) if schema.isdigit() else schema).schema_id


def _end(errors: list[ModakError | None]) -> None:
    """Tell every failure; the command has failed if one schema has."""
    from modak.cli.errors import report

    for error in errors:
        if error is not None:
            report(error)
    if any(errors):
        raise typer.Exit(1)
