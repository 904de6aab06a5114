"""`policy`, `maintain` and `health`: how a table's lake is looked after, a pass now, and how it is doing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modak.cli.output import count, dump, duration, fields, note, number, paint, say, size
from modak.cli.parsing import JsonOption, TableOption, pairs
from modak.core.errors import ModakError, UsageError
from modak.core.names import TableName

if TYPE_CHECKING:
    from modak.tables.maintenance.health import Health
    from modak.tables.maintenance.plan import MaintenancePlan
    from modak.tables.maintenance.policy import Policy
    from modak.tables.site import Site

POLL_SECONDS = 0.3
PATIENCE_SECONDS = 60.0
"""How long a leader may be gone before whoever waits is told."""
_WHAT = {
    "debt": "delete debt",
    "pack": "small files",
    "manifests": "manifests",
    "expiry": "snapshots",
    "orphans": "orphans",
}


def policy(
    table: TableOption,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; repeat for more.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="KEY", help="Back to the default; repeat for more.")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="All settings back to their defaults.")] = False,
) -> None:
    """Show or edit a maintenance policy.

    Without edits it prints every setting that maintenance will run with and where each comes from.
    """
    from modak.tables.maintenance.policy import edit, of, parse

    name = TableName.parse(table)
    chosen = parse(pairs("--set", set_ or []), unset or [])
    if reset and (chosen or unset):
        raise UsageError("usage.reset", "--reset stands alone.", hint="Reset first, then set in a second command.")
    from modak.cli.place import opened

    with opened() as site:
        if chosen or unset or reset:
            _show_policy(edit(site, name, chosen, unset or [], reset=reset))
        else:
            _show_policy(of(site, site.reader.state(name).table))


def _show_policy(found: Policy) -> None:
    wide = max(len(name) for name in found)
    values = {name: _shown(each.value) for name, each in found.settings.items()}
    value_wide = max(map(len, values.values()))
    for name, each in found.settings.items():
        source = paint(f"({each.source})", "green" if each.source == "table" else "dim")
        say(f"{name.ljust(wide)}  {values[name].ljust(value_wide)}  {source}")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if value != "" else "–"


def maintain(
    table: TableOption,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="File the request and return.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and change nothing.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Run the pass in this process, under the same lock as a worker.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="With --local: how long to wait for the lead."),
    ] = 20.0,
) -> None:
    """Ask the leader for a maintenance pass now.

    The command waits for the pass and prints what it did.
    """
    name = TableName.parse(table)
    if no_wait and (local or dry_run):
        raise UsageError("usage.no_wait", "--no-wait asks the leader; it cannot be combined with --local or --dry-run.")
    from modak.cli.place import opened

    with opened(log_level="info" if local and not dry_run else "warning") as site:
        if dry_run:
            _show_plan(site, name)
        elif local:
            _locally(site, name, wait)
        else:
            _request(site, name, no_wait=no_wait)


def _locally(site: Site, name: TableName, wait: float) -> None:
    from modak.runtime.leader import Leader
    from modak.runtime.maintaining import answer, run
    from modak.tables.maintenance import requests
    from modak.tables.repair import repair

    record = site.reader.state(name).table
    with Leader.campaign(site, wait) as leader:
        repair(site, leader.epoch)
        claimed = requests.claim(site.writer(leader.epoch), record.table_id)
        report = run(site, leader, name) if claimed is None else answer(site, leader, claimed)
    if report is None:
        raise ModakError("maintenance.failed", f"The pass over {name} failed.", hint="The log above says why.")
    _show_outcome(name, report.plain())
    if report.failed:
        raise typer.Exit(1)


def _request(site: Site, name: TableName, *, no_wait: bool) -> None:
    from modak.tables.maintenance import requests

    leader = requests.leader(site)
    if leader is None and not no_wait:
        # Refused before it is filed, so that no pass comes as a surprise to whoever starts a worker tomorrow.
        site.reader.state(name)
        raise ModakError(
            "maintenance.no_leader",
            "No worker leads this database, so nobody would run the pass.",
            hint=f"Start one with modak-worker run, or run it here: modak-worker maintain --table {name} --local",
        )
    request, waiting = requests.file_request(site, name)
    if no_wait:
        say(f"Request {request} for {name} is {'refreshed' if waiting else 'filed'}.")
        if leader is None:
            note("No worker leads now; the next one that does takes it.")
        return
    _wait(site, name, request)


def _wait(site: Site, name: TableName, request: int) -> None:
    from modak.tables.maintenance import requests

    told: dict[str, Any] = {}
    alone_since: float | None = None
    while True:
        found = requests.look(site, request)
        if found is None:
            raise ModakError("maintenance.gone", f"{name} was unregistered while its pass waited.")
        if found.finished_at is not None:
            break
        if found.progress and dict(found.progress) != told:
            told = dict(found.progress)
            done = f" {told['done']} of {told['total']} tasks" if told.get("total") else ""
            note(f"{_WHAT.get(told['pass'], told['pass'])}{done} …")
        if requests.leader(site) is not None:
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > PATIENCE_SECONDS:
            raise ModakError(
                "maintenance.no_leader",
                f"The worker went away; request {request} waits for the next one.",
                hint=f"Start one with modak-worker run, or run it here: modak-worker maintain --table {name} --local",
            )
        time.sleep(POLL_SECONDS)
    if found.outcome:
        _show_outcome(name, found.outcome)
    if found.error:
        raise ModakError("maintenance.failed", f"The pass over {name} failed: {found.error}")


def _show_outcome(name: TableName, outcome: Mapping[str, Mapping[str, Any]]) -> None:
    done = {key: what for key, what in outcome.items() if "skipped" not in what}
    if not done:
        say(f"Nothing to do for {name}.")
    for key, what in outcome.items():
        label = _WHAT.get(key, key)
        if "skipped" in what:
            say(f"{label}: {what['skipped']}.")
        elif "error" in what:
            say(f"{paint(label, 'red')}: {what['error']}")
        else:
            say(f"{paint(label, 'green')}: {_counters(what)} in {duration(float(what.get('seconds', 0)))}.")


def _counters(what: Mapping[str, Any]) -> str:
    if "files_before" in what:
        text = (
            f"{count(what['files_before'], 'file')} ({size(what['bytes_before'])}) became "
            f"{number(what['files_after'])} ({size(what['bytes_after'])})"
        )
        if what.get("deletes_before") or what.get("delete_files_dropped"):
            gone = what["rows_before"] - what["rows_after"]
            text += f", {count(what['deletes_before'], 'delete file')} applied, {count(gone, 'deleted row')} gone"
        return text
    if "manifests_before" in what:
        return f"{number(what['manifests_before'])} became {number(what['manifests_after'])}"
    if "snapshots" in what:
        return f"{number(what['snapshots'])} expired, {count(what['files_deleted'], 'file')} deleted"
    if "bytes_deleted" in what:
        return f"{count(what['files_deleted'], 'file')} deleted ({size(what['bytes_deleted'])})"
    return ", ".join(f"{key} {value}" for key, value in what.items() if key != "seconds")


def _show_plan(site: Site, name: TableName) -> None:
    from modak.tables.maintenance.plan import PASSES
    from modak.tables.maintenance.run import plan_now

    plan = plan_now(site, name)
    for each in PASSES:
        if each in plan.skipped:
            say(f"{_WHAT[each]}: {plan.skipped[each]}.")
        else:
            say(f"{paint(_WHAT[each], 'green')}: {_step(plan, each)}.")
    say(f"Read {size(plan.bytes_read)}, written about {size(plan.bytes_written)}.")
    bounds = plan.bounds
    if bounds.pinned:
        say(f"{count(len(bounds.pinned), 'pinned snapshot')} must stay, and everything since the oldest.")
    if bounds.staged:
        say(f"{count(len(bounds.staged), 'staged file')} must stay.")
    note("Nothing was changed.")


def _step(plan: MaintenancePlan, name: Any) -> str:
    from modak.tables.maintenance.plan import ExpiryStep, ManifestStep, RewriteStep

    step = plan.steps[name]
    if isinstance(step, RewriteStep):
        deletes = f", {count(step.deletes, 'delete file')} applied" if step.deletes else ""
        more = ", more in further commits" if step.more else ""
        return (
            f"{count(step.files, 'file')} ({size(step.bytes_read)}) would become {number(len(step.bins))} "
            f"(about {size(step.bytes_written)}){deletes}{more}"
        )
    if isinstance(step, ManifestStep):
        return f"{number(step.manifests)} ({size(step.bytes)}) would be folded"
    if isinstance(step, ExpiryStep):
        return f"{number(len(step.ids))} would expire"
    return "the data folder would be listed"


def health(
    table: Annotated[
        str | None, typer.Option("--table", metavar="SCHEMA.TABLE", help="Only this table, in full.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Show how the lake is doing.

    What the worker collected last: files by size, delete debt, manifests, snapshots, pins, and what to do about them.
    """
    name = None if table is None else TableName.parse(table)
    from modak.cli.place import opened

    with opened() as site:
        from modak.tables.maintenance.health import read
        from modak.tables.maintenance.policy import of

        if name is not None:
            in_force = of(site, site.reader.state(name).table)
        found = [each for each in read(site) if name is None or each.table == name]
    if json_:
        dump([_plain(each) for each in found])
        return
    if not found:
        say("No table is registered.")
    for each in found:
        _show_health(each)
    if name is not None:
        for each in found:
            _show_thresholds(each)
        _show_policy(in_force)


def _plain(each: Health) -> dict[str, Any]:
    return {
        "table": str(each.table),
        "counters": each.counters,
        "warnings": list(each.warnings),
        "policy": each.policy,
        "collected_at": each.collected_at,
        "maintained_at": each.maintained_at,
    }


def _show_health(each: Health) -> None:
    counters = each.counters
    if each.collected_at is None or "files" not in counters:
        say(f"{each.table}: not collected yet; a running worker does it by itself.")
        return
    classes = ", ".join(
        f"{number(files)} {name.replace('_', ' ')}"
        for name, files in counters.get("files_by_size", {}).items()
        if files
    )
    fields(
        {
            "table": str(each.table),
            "files": f"{number(counters['files'])} ({classes or 'none'})",
            "rows": number(counters.get("records", 0)),
            "delete debt": f"{count(counters.get('delete_files', 0), 'delete file')} on "
            f"{count(counters.get('files_under_deletes', 0), 'file')}, {counters.get('delete_ratio', 0):.1%} of rows",
            "manifests": number(counters.get("manifests", 0)),
            "snapshots": number(counters.get("snapshots", 0)),
            "bytes": f"{size(counters.get('bytes', 0))} live, {size(counters.get('bytes_reclaimable', 0))} reclaimable",
            "pins": f"{number(counters.get('pins', 0))}, the oldest for "
            f"{duration(float(counters.get('oldest_pin_seconds', 0)))}",
            "collected": each.collected_at.isoformat(timespec="seconds"),
            "maintained": each.maintained_at.isoformat(timespec="seconds") if each.maintained_at else "–",
        }
    )
    for one in each.warnings:
        say(f"{paint('look at', 'yellow')} {one['name']}: {one['message']} {one['hint']}")


def _show_thresholds(each: Health) -> None:
    """Everything that is looked at, and from where on it is told."""
    from modak.tables.maintenance.health import judged

    if "files" in each.counters:
        say("Warnings, each from its threshold on:")
        fields({one.name: f"{one.value:g} of {one.threshold:g}" for one in judged(each.counters, each.policy)})
