"""Storage profiles in the catalog: created once, never changed while tables lie on them; exactly one is the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, LiteralString

import psycopg
from psycopg.types.json import Jsonb

from modak.catalog.read import CatalogReader
from modak.catalog.records import Profile
from modak.core.errors import Refused
from modak.core.faults import reach

_CREATE: LiteralString = """
    INSERT INTO modak.storage_profiles (name, warehouse, format, config, credentials_ref)
    VALUES (%(name)s, %(warehouse)s, %(format)s, %(config)s, %(credentials)s) ON CONFLICT (name) DO NOTHING
"""
_DEFAULT: LiteralString = """
    UPDATE modak.storage_profiles SET is_default = false WHERE is_default AND name <> %(name)s
"""
_MAKE_DEFAULT: LiteralString = "UPDATE modak.storage_profiles SET is_default = true WHERE name = %(name)s"


def create(
    conn: psycopg.Connection[Any],
    name: str,
    warehouse: str,
    *,
    lake_format: str = "iceberg",
    config: Mapping[str, str] | None = None,
    credentials: str | None = None,
    default: bool = False,
) -> bool:
    """Write a profile down; False when the very same one is there already. A different one of that name is refused."""
    wanted = {
        "name": name,
        "warehouse": warehouse,
        "format": lake_format,
        "config": Jsonb(dict(config or {})),
        "credentials": credentials,
    }
    reach("profiles.before_create")
    with conn.transaction():
        # One at a time: two that each make themselves the default would find the other's in the way.
        conn.execute("LOCK TABLE modak.storage_profiles IN SHARE ROW EXCLUSIVE MODE")
        created = conn.execute(_CREATE, wanted).rowcount == 1
        if not created:
            _refuse_differences(CatalogReader(conn).profile(name), wanted, dict(config or {}))
        if default:
            conn.execute(_DEFAULT, wanted)
            conn.execute(_MAKE_DEFAULT, wanted)
    reach("profiles.created")
    return created


def _refuse_differences(known: Profile, wanted: Mapping[str, Any], config: Mapping[str, str]) -> None:
    pairs = {
        "--warehouse": (known.warehouse, wanted["warehouse"]),
        "--format": (known.format, wanted["format"]),
        "--config": (dict(known.config), config),
        "--credentials": (known.credentials_ref, wanted["credentials"]),
    }
    differing = [flag for flag, (old, new) in pairs.items() if old != new]
    if differing:
        raise Refused(
            "profile.differs",
            f"There is a profile {known.name} already, with another {' and '.join(differing)}.",
            hint="Tables rely on it as it is; give the new one another name.",
        )
