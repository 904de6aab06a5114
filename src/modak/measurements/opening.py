"""From settings to a store, its tiers and a manager."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from modak.config import Settings
from modak.core.clock import Clock
from modak.core.errors import UsageError
from modak.measurements.manager import Manager, ManagerConfig
from modak.measurements.retention import Retention
from modak.measurements.runners import ProcessRunner, Runner, SparkRunner
from modak.measurements.state import Patience, State
from modak.measurements.tiers import (
    BaseTierConfig,
    DailyTier,
    DailyTierConfig,
    HourlyTier,
    HourlyTierConfig,
    Tier,
    WindowTier,
)
from modak.measurements.windows import Level
from modak.storage.objects import Objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LATE_DAYS = 7


def open_state(settings: Settings, clock: Clock | None = None) -> State:
    """The measurement store of the settings."""
    chosen = settings.measurements
    if chosen.root is None:
        raise UsageError(
            "measurements.root",
            "There is no measurement store.",
            hint="Set MODAK_MEASUREMENTS_ROOT to a folder or bucket.",
        )
    patience = Patience(timedelta(seconds=chosen.grace_seconds), chosen.claim_seconds)
    return State(Objects.of(chosen.root, storage_props(settings)), clock, patience)


def storage_props(settings: Settings) -> dict[str, str]:
    """How the bucket of the store is reached: as the default lake is."""
    lake = settings.lake
    key, secret = lake.s3_access_key, lake.s3_secret_key
    props = {
        "s3.endpoint": lake.s3_endpoint_url or "",
        "s3.region": lake.s3_region or "",
        "s3.access-key-id": key.get_secret_value() if key else "",
        "s3.secret-access-key": secret.get_secret_value() if secret else "",
        "s3.path-style-access": "true" if lake.s3_endpoint else "",
    }
    return {name: value for name, value in props.items() if value}


def tiers_of(settings: Settings, objects: Objects, clock: Clock | None = None) -> tuple[Tier, ...]:
    """The four tiers as they are set."""
    chosen = settings.measurements

    def config(word: str) -> dict[str, object]:
        names = ("min_age_hours", "min_files", "target_size_mb", "enabled")
        return {"clock": clock, **{name: getattr(chosen, f"{word}_{name}") for name in names}}

    return (
        HourlyTier(HourlyTierConfig(objects, **config("hourly"))),  # type: ignore[arg-type]
        DailyTier(DailyTierConfig(objects, **config("daily"))),  # type: ignore[arg-type]
        WindowTier("weekly", Level.WEEK, BaseTierConfig(objects, **config("weekly")), LATE_DAYS),  # type: ignore[arg-type]
        WindowTier("monthly", Level.MONTH, BaseTierConfig(objects, **config("monthly")), LATE_DAYS),  # type: ignore[arg-type]
    )


def schedules_of(settings: Settings) -> dict[str, str]:
    """When each enabled tier runs."""
    chosen = settings.measurements
    words = ("hourly", "daily", "weekly", "monthly")
    return {word: getattr(chosen, f"{word}_schedule") for word in words if getattr(chosen, f"{word}_enabled")}


def open_manager(
    settings: Settings, state: State, runner: Runner | None = None, completion_dir: Path | None = None
) -> Manager:
    """A manager as the settings want it."""
    chosen = settings.measurements
    keys = {name: chosen.sort_keys_of(name) for name in chosen.sort_keys}
    return Manager(
        ManagerConfig(
            storage_backend=state.objects,
            tiers=tiers_of(settings, state.objects, state.clock),
            temp_directory=chosen.temp_directory,
            state=state,
            runner=runner,
            max_concurrent=chosen.max_concurrent,
            memory_limit=chosen.memory_limit,
            completion_dir=completion_dir,
            sort_keys_config={name: value for name, value in keys.items() if name != "*"},
            default_sort_keys=keys.get("*", ()),
            batch_files=chosen.batch_files,
            profile=chosen.profile,
            retention=Retention(chosen.kept()),
            export_kept=timedelta(seconds=chosen.export_kept),
            storage_props=storage_props(settings),
        )
    )


def runner_of(settings: Settings) -> Runner:
    """Where jobs run; Spark is started only when they run there."""
    chosen = settings.measurements
    if chosen.isolation == "process":
        return ProcessRunner(chosen.max_concurrent)
    from modak.spark import session

    spark: SparkSession = session.start(settings, settings.home.path)
    return SparkRunner(spark, chosen.max_concurrent)
