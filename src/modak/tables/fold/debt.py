"""Delta debt: every seam read pays for corrections that are not folded, so a growing backlog is told in time."""

from __future__ import annotations

from typing import Literal

import structlog

from modak.catalog.records import TableState
from modak.tables.site import Site

log = structlog.get_logger()

ERROR_FACTOR = 4

Level = Literal["warning", "error"]


def debt_level(rows: int, warn_rows: int) -> Level | None:
    """How bad a backlog is."""
    if rows < warn_rows:
        return None
    return "error" if rows >= ERROR_FACTOR * warn_rows else "warning"


def debt_problem(rows: int, warn_rows: int) -> str | None:
    """What the status says about a backlog."""
    level = debt_level(rows, warn_rows)
    if level is None:
        return None
    limit = warn_rows * (ERROR_FACTOR if level == "error" else 1)
    return f"{rows:,} corrections wait to be folded ({level} from {limit:,})"


def tell_debt(site: Site, state: TableState, rows: int) -> None:
    """Say once when a table's backlog crosses a level, and once when it is well again."""
    table_id = state.table.table_id
    warn = site.settings.corrections.delta_backlog_warn_rows
    level = debt_level(rows, warn)
    known = {said: (table_id, f"delta debt {said}") for said in ("warning", "error")}
    before = next((said for said in ("error", "warning") if known[said] in site.told), None)
    if level == before:
        return
    site.told.difference_update(known.values())
    if level is not None:
        site.told.add(known[level])
        tell = log.error if level == "error" else log.warning
        tell("delta.debt", table=str(state.table.name), rows=rows, warn_rows=warn, level=level)
    else:
        log.info("delta.debt_paid", table=str(state.table.name), rows=rows)
