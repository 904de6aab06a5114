"""Measurement stores, entity stores and the group of workers, as the API shows them.

What a store holds is read from the store by whichever worker is asked; what runs is known to the leader only, and the
others say who that is.
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from modak.catalog import operators
from modak.core.errors import ModakError, Refused
from modak.runtime.web.context import API, Context
from modak.runtime.web.errors import RESPONSES
from modak.runtime.web.plain import entry, plain

log = structlog.get_logger()

Database = Annotated[str | None, Query(max_length=200, description="Only this database")]
MOST = 1000


class Trigger(BaseModel):
    """What to compact now."""

    database: str | None = Field(None, max_length=200, description="Only this database; all if not given")


def router(context: Context) -> APIRouter:
    """The routes under `/api/v1` that are about stores and workers."""
    site, guard = context.site, context.guard
    routes = APIRouter(prefix=API, dependencies=[Depends(guard.reader)], responses=RESPONSES)

    @routes.get("/cluster/status", tags=["cluster"], summary="Who leads, which workers there are, what is handed over")
    def cluster() -> dict[str, Any]:
        """The lease, every worker that has been heard of with what it does, and the hand-over of measurement jobs."""
        serving = site.services.get("measurements")
        with site.connect(autocommit=True) as conn:
            return entry(
                {
                    "leader": asdict(operators.lead(conn)),
                    "workers": [asdict(each) for each in operators.workers(conn)],
                    "this_worker": context.pulse.holder,
                    "role": context.pulse.role,
                    "completion_watcher": None if serving is None else serving.watcher.stats(),
                }
            )

    @routes.get("/entities/status", tags=["entities"], summary="What waits and what lies in the entity store")
    def entities() -> list[dict[str, Any]]:
        """One entry per schema that is served."""
        from modak.entities.health import status as look
        from modak.entities.store import EntityStore

        chosen = site.settings.entities
        if not chosen.enabled:
            raise Refused("entities.disabled", "No entity store is served.", hint="Set MODAK_ENTITIES_ENABLED=true.")
        dsn = site.dsn if chosen.pg_host is None else None
        return [plain(asdict(each)) for each in look(EntityStore.open(site.settings, dsn, clock=site.clock))]

    _add_measurements(routes, context)
    _add_trigger(routes, context)
    return routes


def _add_measurements(routes: APIRouter, context: Context) -> None:
    site = context.site

    @routes.get("/measurements/status", tags=["measurements"], summary="What the store holds and what is due")
    def status() -> dict[str, Any]:
        """Takes one listing of the store."""
        from modak.measurements import survey
        from modak.measurements.opening import tiers_of

        state = _state(context)
        serving = site.services.get("measurements")
        found = survey.status(state, [tier.policy for tier in tiers_of(site.settings, state.objects)])
        return {"store": plain(found), "scheduler": None if serving is None else plain(serving.scheduler.status())}

    @routes.get("/measurements/stats", tags=["measurements"], summary="What this leader has compacted")
    def stats() -> dict[str, Any]:
        """Counters since the process began to lead; null where it does not."""
        serving = site.services.get("measurements")
        return {"manager": None if serving is None else plain(serving.manager.stats()), "role": context.pulse.role}

    @routes.get("/measurements/candidates", tags=["measurements"], summary="Partitions that are worth a merge")
    def candidates(database: Database = None) -> list[dict[str, Any]]:
        """By the rules of the tiers, now; at most a thousand."""
        from modak.measurements.discover import sources
        from modak.measurements.layout import check_name
        from modak.measurements.opening import tiers_of
        from modak.measurements.tiers import find_candidates

        state = _state(context)
        if database is not None:
            check_name("database", database)
        found: list[dict[str, Any]] = []
        policies = [tier.policy for tier in tiers_of(site.settings, state.objects) if tier.is_enabled()]
        for source in sources(state.objects, database):
            for policy in policies:
                for each in find_candidates(state, policy, source):
                    if len(found) >= MOST:
                        return found
                    found.append(
                        {
                            "database": each.database,
                            "measurement": each.measurement,
                            "partition": each.partition_path,
                            "tier": each.tier,
                            "files": each.file_count,
                            "bytes": each.bytes,
                        }
                    )
        return found

    @routes.get("/measurements/jobs", tags=["measurements"], summary="Jobs under way or waiting for their clean-up")
    def jobs(database: Database = None) -> list[dict[str, Any]]:
        """As the manifests in the store tell it, so of every compactor."""
        from modak.measurements.layout import check_name
        from modak.measurements.manifest import Held

        state = _state(context)
        if database is not None:
            check_name("database", database)
        return [
            plain(
                {
                    "job": each.manifest.job_id,
                    "status": each.manifest.status,
                    "tier": each.manifest.tier,
                    "partition": each.manifest.partition_path,
                    "inputs": len(each.manifest.input_files),
                    "outputs": len(each.manifest.outputs),
                    "since": each.manifest.since,
                    "owner": each.manifest.owner,
                }
            )
            for each in state.manifests.held(database)
            if isinstance(each, Held)
        ][:MOST]

    @routes.get("/measurements/history", tags=["measurements"], summary="What the last cycles did")
    def history(limit: Annotated[int, Query(ge=1, le=200)] = 20) -> list[dict[str, Any]]:
        """Newest first."""
        from modak.measurements.history import recall

        return [plain(asdict(cycle)) for cycle in recall(_state(context).objects, limit)]


def _add_trigger(routes: APIRouter, context: Context) -> None:
    site, guard = context.site, context.guard

    @routes.post(
        "/measurements/trigger",
        tags=["measurements"],
        status_code=202,
        summary="Start a compaction cycle now",
        dependencies=[Depends(guard.admin_only)],
    )
    def trigger(wanted: Trigger | None = None) -> dict[str, Any]:
        """409 while a cycle runs or where this worker may not compact, 400 for a name that no database can have."""
        from modak.measurements.cluster import CompactionRoleGated
        from modak.measurements.layout import check_name
        from modak.measurements.manager import CycleAlreadyRunning

        database = wanted.database if wanted else None
        if database is not None:
            check_name("database", database)
        serving = site.services.get("measurements")
        if serving is None:
            raise CompactionRoleGated(context.pulse.role)
        if serving.manager.is_cycle_running():
            raise CycleAlreadyRunning
        if serving.scheduler.status()["gated"]:
            raise CompactionRoleGated(context.pulse.role)

        def run() -> None:
            try:
                serving.scheduler.trigger_now(database)
            except ModakError as error:
                log.error("measurements.trigger_failed", code=error.code, error=error.message, hint=error.hint)

        threading.Thread(target=run, name="modak-measurements-trigger", daemon=True).start()
        return {"started": True, "database": database}


def _state(context: Context) -> Any:
    from modak.measurements.opening import open_state

    chosen = context.site.settings.measurements
    if not chosen.enabled or chosen.root is None:
        raise Refused(
            "measurements.disabled", "No measurement store is served.", hint="Set MODAK_MEASUREMENTS_ENABLED=true."
        )
    return open_state(context.site.settings, context.site.clock)
