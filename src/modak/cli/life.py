"""The life of a table in words: each known event of the flows becomes a verb and a sentence.

Used for people at a terminal only; a pipe and MODAK_LOG=json carry the event with all its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from modak.cli.output import count, duration, number, size

Fields = Mapping[str, Any]


DETAIL = frozenset(
    {
        "catalog.committed",
        "catalog.migrated",
        "fold.planned",
        "lease.taken",
        "partition.found",
        "register.done",
        "retention.planned",
        "spark.jars_fetched",
        "unregister.done",
    }
)
"""Events that say to a person what another event says better; a terminal shows them only with --debug."""


PASSING = frozenset({"tiering.progress", "fold.progress", "verify.progress"})
"""Events whose line a terminal overwrites with the next one."""


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a table's life."""

    verb: str
    text: str
    colour: str = "cyan"


def describe(event: str, fields: Fields) -> Step | None:
    """The sentence for an event, or None when it has none of its own."""
    teller = _TELLERS.get(event)
    if teller is None and event.startswith("grid."):
        teller = _finding
    try:
        if teller is not None:
            return teller(fields)
        if event in _SENTENCES:
            verb, template, colour = _SENTENCES[event]
            return Step(verb, template.format_map(fields), colour)
    except (KeyError, TypeError, ValueError):
        # An event without the expected fields is still worth a line; the caller prints it as it is.
        return None
    return None


def _sealed(at: Fields) -> Step:
    return Step("sealed", f"{at['table']}: {_partitions(at['partitions'])}; late writes are captured from here on")


def _exported(at: Fields) -> Step:
    parts = [count(at["rows"], "row")]
    if "bytes" in at:
        parts.append(size(at["bytes"]))
    if at.get("seconds") is not None:
        parts.append(duration(float(at["seconds"])))
    if at.get("rows_per_second") is not None:
        parts.append(f"{number(at['rows_per_second'])} rows/s")
    if "files" in at:
        parts.append(count(at["files"], "file"))
    return Step("exported", f"{at['table']}: " + ", ".join(parts))


def _exporting(at: Fields) -> Step:
    left = at.get("seconds_left")
    rest = f", about {duration(float(left))} left" if left else ""
    rows = f" (about {count(at['rows'], 'row')})" if at.get("rows") else ""
    return Step("exporting", f"{at['table']}: {at['tasks']} of {at['of']} tasks are done{rows}{rest}", "dim")


def _committed(at: Fields) -> Step:
    return Step("committed", f"{at['table']}: {count(at['rows'], 'row')} in lake snapshot {at['snapshot']}", "green")


def _folded(at: Fields) -> Step:
    rate = f", {number(at['rows_per_second'])} rows/s" if at.get("rows_per_second") is not None else ""
    return Step(
        "folded",
        f"{at['table']}: {count(at['rows'], 'correction')} into the lake,"
        f" {count(at['replaced'], 'row')} replaced{rate}",
    )


def _passing(verb: str, what: str) -> Callable[[Fields], Step]:
    def tell(at: Fields) -> Step:
        left = at.get("seconds_left")
        rest = f", about {duration(float(left))} left" if left else ""
        return Step(verb, f"{at['table']}: {at[what]}, {at['tasks']} of {at['of']} tasks are done{rest}", "dim")

    return tell


def _counted(verb: str, noun: str, rest: str, colour: str) -> Callable[[Fields], Step]:
    def tell(at: Fields) -> Step:
        return Step(verb, f"{at['table']}: {count(at['rows'], noun)} {rest}", colour)

    return tell


def _expired(at: Fields) -> Step:
    rows, files = count(at["rows"], "lake row"), count(at["files"], "file")
    return Step("expired", f"{at['table']}: {rows} in {files} below {at['line']}", "magenta")


def _debt(at: Fields) -> Step:
    colour = "red" if at["level"] == "error" else "yellow"
    return Step("look at", f"{at['table']}: {number(at['rows'])} corrections wait for the fold", colour)


def _cleaned(at: Fields) -> Step:
    rest = ", ".join(f"{key} {value}" for key, value in at.items() if key != "table" and value is not None)
    return Step(
        "repaired", f"{at.get('table', 'catalog')}: {rest}" if rest else str(at.get("table", "catalog")), "yellow"
    )


def _finding(at: Fields) -> Step:
    return Step("look at", f"{at['table']}: {at.get('finding') or at['message']}", "yellow")


def _failed(at: Fields) -> Step:
    where = f"{at['table']}: " if at.get("table") else ""
    what = at.get("message") or at.get("error") or at["code"]
    hint = f" ({at['hint']})" if at.get("hint") else ""
    return Step("failed", f"{where}{what}{hint}", "red")


def _partitions(value: Any) -> str:
    if isinstance(value, int):
        return count(value, "partition")
    names = [str(name) for name in value]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{count(len(names), 'partition')} ({shown})"


_TELLERS: Mapping[str, Callable[[Fields], Step]] = {
    "tiering.sealed": _sealed,
    "tiering.progress": _exporting,
    "tiering.exported": _exported,
    "tiering.committed": _committed,
    "fold.progress": _passing("folding", "step"),
    "fold.committed": _folded,
    "verify.progress": _passing("verifying", "doing"),
    "delta.debt": _debt,
    "fold.swept": _counted("swept", "folded correction", "that readers had held", "dim"),
    "retention.committed": _expired,
    "retention.stragglers": _counted("expired", "late correction", "below the retention line", "magenta"),
    "verify.repaired": _counted("repaired", "row", "written from the heap into the delta", "yellow"),
    "spill.stray_rows": _counted("look at", "row", "in the spill partition, where no row may stay", "red"),
    "repair.cleaned": _cleaned,
    "cycle.failed": _failed,
}
_SENTENCES: Mapping[str, tuple[str, str, str]] = {
    "tiering.advanced": ("advanced", "{table}: the cut-line is now {cut_line}", "green"),
    "tiering.again": ("again", "{table}: {detail}", "dim"),
    "tiering.deferred": ("waiting", "{table}: {reason}", "dim"),
    "reclaim.dropped": ("dropped", "{table}: heap partition {partition}", "magenta"),
    "reclaim.deferred": ("waiting", "{table}: {partition} stays in the heap for now, {reason}", "dim"),
    "reclaim.failed": ("failed", "{table}: {partition} cannot be dropped: {error}", "red"),
    "reclaim.unwatched": ("again", "{table}: {partition} is exported once more, {because}", "yellow"),
    "fold.again": ("again", "{table}: {detail}", "dim"),
    "delta.debt_paid": ("folded", "{table}: the backlog of corrections is small again", "green"),
    "retention.deferred": ("waiting", "{table}: the retention line stays, {because}", "dim"),
    "seam.lost": ("failed", "the point in time of a read over {tables} is lost", "red"),
    "premake.made": ("made", "{table}: partition {partition} for rows to come", "cyan"),
    "premake.deferred": ("waiting", "{table}: {reason}", "dim"),
    "partition.detached": ("look at", "{table}: {partition} was detached by somebody else", "yellow"),
    "partition.gone": ("look at", "{table}: {partition} was dropped by somebody else", "yellow"),
    "partition.changed": ("noticed", "{table}: {was} is now {partition}", "cyan"),
    "lake.frozen": ("look at", "{table}: foreign snapshot {snapshot} ({operation}) stops publication", "red"),
    "lake.foreign_rewrite": ("noticed", "{table}: foreign snapshot {snapshot} rearranged files", "cyan"),
    "lake.commit_again": ("again", "{table}: somebody else committed first ({because})", "dim"),
    "evolve.committed": ("evolved", "{table}: the lake's schema follows the table's", "green"),
    "evolve.note": ("look at", "{table}: {note}", "yellow"),
    "http.listening": ("serving", "HTTP at {address}", "cyan"),
    "publish.done": ("published", "{table} in the catalog of MODAK_CATALOG_URI", "cyan"),
    "publish.withdrawn": ("withdrawn", "{lake} from the catalog of MODAK_CATALOG_URI; its files stay", "cyan"),
    "publish.left_alone": (
        "look at",
        "{lake}: MODAK_CATALOG_URI shows a table of somebody else; it stays",
        "yellow",
    ),
    "daemon.waiting": ("waiting", "{because}", "yellow"),
    "leader.acquired": ("leading", "this worker leads (epoch {epoch})", "green"),
    "leader.waiting": ("standby", "another worker leads; this one waits", "dim"),
    "leader.lost": ("standby", "the lease is lost; another worker may lead", "yellow"),
    "lease.lost": ("standby", "the lease of epoch {epoch} is lost", "yellow"),
    "embedded.created": ("created", "the embedded Postgres in {place}", "cyan"),
    "embedded.started": ("started", "the embedded Postgres on port {port}", "cyan"),
    "embedded.stopped": ("stopped", "the embedded Postgres", "cyan"),
    "spark.starting": ("starting", "Spark on {master}, which takes some seconds", "dim"),
    "spark.jars_fetching": ("fetching", "the jars of Spark's Iceberg and Postgres, once, into {into}", "cyan"),
}
