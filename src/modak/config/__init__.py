"""Settings: one small frozen model per concern, read from `MODAK_*` environment variables and from nothing else.

Names are resolved on first use, because pydantic takes a good part of the time that a short command has.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modak.config.contexts import EntitySettings, MeasurementSettings
    from modak.config.explaining import Setting, document, explain
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
    from modak.config.read import load
    from modak.config.settings import Settings

_HOMES = {
    "modak.config.contexts": ("EntitySettings", "MeasurementSettings"),
    "modak.config.explaining": ("Setting", "document", "explain"),
    "modak.config.read": ("load",),
    "modak.config.settings": ("Settings",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF.get(name, "modak.config.models")), name)
    globals()[name] = value
    return value


__all__ = [
    "CorrectionSettings",
    "CredentialSettings",
    "EntitySettings",
    "HomeSettings",
    "HttpSettings",
    "LakeSettings",
    "LeaderSettings",
    "LoadSettings",
    "LogSettings",
    "MaintenanceSettings",
    "MeasurementSettings",
    "MirrorSettings",
    "PostgresSettings",
    "Setting",
    "Settings",
    "SparkSettings",
    "TieringSettings",
    "document",
    "explain",
    "load",
]
