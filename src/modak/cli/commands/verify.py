"""`verify`: prove that heap and lake say the same, and put it right where the heap is the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from modak.cli.output import count, dump, duration, note, number, paint, record, say
from modak.cli.output import table as grid
from modak.cli.parsing import JsonOption, TableOption
from modak.core.errors import UsageError
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.verify.report import BandCount, VerifyReport

MANY_BANDS = 40
"""More bands than that are not listed one by one, except those that differ."""


def verify(
    table: TableOption,
    *,
    repair: Annotated[
        bool, typer.Option("--repair", help="Write the heap's rows through the delta, then verify again.")
    ] = False,
    since: Annotated[
        str | None, typer.Option("--since", metavar="KEY", help="Only rows at or above this tier key.")
    ] = None,
    sample: Annotated[
        float | None, typer.Option("--sample", metavar="FRACTION", help="Only this share of the bands, such as 0.1.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compare heap and lake; exit code 1 on a mismatch.

    Every column of every row is compared where both sides have it; elsewhere the structure of the lake is checked.
    """
    name = TableName.parse(table)
    if sample is not None and not 0 < sample <= 1:
        raise UsageError("usage.sample", f"--sample {sample} is not a share.", hint="Write a number such as 0.1.")
    from modak.cli.place import opened

    with opened(log_level="info") as site:
        from modak.tables.verify.repair import repair_differing
        from modak.tables.verify.run import Limits
        from modak.tables.verify.run import verify as run
        from modak.tables.verify.since import since_key

        axis = site.reader.state(name).table.axis
        limits = Limits(None if since is None else since_key(axis, since), sample)
        report = run(site, name, limits, repair_differing if repair else None)
        # What a mirror lacks its daemon mends, later; only a delta can be read back at once.
        again = run(site, name, limits) if repair and report.repaired is not None and report.differing_rows else None
    if json:
        dump({**_plain(report), "after_repair": None if again is None else _plain(again)})
    else:
        _show(report)
        if again is not None:
            say(f"{count(report.repaired or 0, 'row')} written through the delta; verified again:")
            _show(again)
    if not (again or report).sound:
        raise typer.Exit(1)


def _plain(report: VerifyReport) -> dict[str, Any]:
    parts = {name: [record(each) for each in getattr(report, name)] for name in ("bands", "differences", "findings")}
    more = {"table": str(report.table), "lake_only_rows": report.lake_only_rows, "sound": report.sound}
    return {**record(report), **parts, **more}


def _show(report: VerifyReport) -> None:
    listed = [band for band in report.bands if len(report.bands) <= MANY_BANDS or band.differing]
    right = frozenset({"Heap rows", "Lake rows", "Delta rows"})
    if listed:
        columns = ("From", "To", "Partition", "Heap rows", "Lake rows", "Delta rows", "Result")
        grid(columns, [_band(band) for band in listed], right=right)
    if len(listed) < len(report.bands):
        say(f"Equal besides: {count(len(report.bands) - len(listed), 'band')}.")
    _show_limits(report)
    if report.differences:
        headings = ("Difference", "Key", "Tier key", "Column", "Heap", "Lake")
        grid(headings, [_difference(each) for each in report.differences])
    for remark in report.notes:
        note(remark)
    for finding in report.findings:
        say(f"{paint('wrong', 'red')} {finding.message}")
    spent = _spent(report)
    if report.sound:
        say(f"{paint('equal' if report.compared_rows else 'sound', 'green')} {report.table}: {spent}")
        return
    least = "at least " if report.at_least else ""
    say(
        f"{paint('different', 'red')} {report.table}: {least}{count(report.differing_rows, 'differing row')}, "
        f"{count(len(report.findings), 'other finding')}; {spent}"
    )


def _spent(report: VerifyReport) -> str:
    done = []
    if report.compared_rows or not report.lake_only_rows:
        done.append(f"{count(report.compared_rows, 'row')} compared")
    if report.lake_only_rows:
        done.append(f"{count(report.lake_only_rows, 'row')} that only the lake has checked for keys, lines and files")
    rows = report.compared_rows + report.lake_only_rows
    rate = rows / report.seconds if report.seconds else 0
    return f"{', '.join(done)} in {duration(report.seconds)} ({number(rate)} rows/s)"


def _show_limits(report: VerifyReport) -> None:
    if report.skipped_bands:
        seen = ", ".join(f"[{band.lower or '–'}, {band.upper})" for band in report.bands[:10])
        more = f" and {len(report.bands) - 10} more" if len(report.bands) > 10 else ""
        note(f"Looked at {seen}{more}; left out {count(report.skipped_bands, 'band')}.")
    if report.left_out:
        note(f"Not compared, because old rows wait for their values: {', '.join(report.left_out)}.")


def _band(band: BandCount) -> tuple[str, ...]:
    heap = "–" if band.heap_rows is None else number(band.heap_rows)
    result = "different" if band.differing else "equal" if band.heap_rows is not None else "lake only"
    place = (band.lower or "–", band.upper, band.partition or "–")
    return (*place, heap, number(band.lake_rows), number(band.delta_rows), result)


def _difference(each: Any) -> tuple[str, ...]:
    kind = {"missing": "missing in the lake", "extra": "extra in the lake"}.get(each.kind, each.kind)
    if each.kind == "duplicated":
        kind = f"{each.copies} times in the lake"
    if each.column is None:
        return (kind, each.key, each.tier_key, "", "", "")
    return (kind, each.key, each.tier_key, each.column, _value(each.heap), _value(each.lake))


def _value(text: str | None) -> str:
    return "NULL" if text is None else text
