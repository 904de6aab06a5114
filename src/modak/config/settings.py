"""All settings of a process in one frozen value, and the list of its models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_type_hints

from modak.config.contexts import EntitySettings, MeasurementSettings
from modak.config.fields import Concern
from modak.config.models import (
    CorrectionSettings,
    CredentialSettings,
    HomeSettings,
    HttpSettings,
    LakeSettings,
    LeaderSettings,
    LoadSettings,
    LogSettings,
    MaintenanceSettings,
    MirrorSettings,
    PostgresSettings,
    SparkSettings,
    TieringSettings,
)


@dataclass(frozen=True)
class Settings:
    """All settings of a process, one frozen model per concern."""

    home: HomeSettings
    postgres: PostgresSettings
    lake: LakeSettings
    credentials: CredentialSettings
    tiering: TieringSettings
    corrections: CorrectionSettings
    mirror: MirrorSettings
    leader: LeaderSettings
    maintenance: MaintenanceSettings
    http: HttpSettings
    load: LoadSettings
    spark: SparkSettings
    log: LogSettings
    measurements: MeasurementSettings
    entities: EntitySettings


def concerns() -> dict[str, type[Concern]]:
    """The models by the name under which `Settings` holds them."""
    hints = get_type_hints(Settings)
    return {field.name: hints[field.name] for field in fields(Settings)}
