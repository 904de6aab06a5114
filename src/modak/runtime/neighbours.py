"""What the API does through the tables' own rooms: maintenance policy and storage profiles, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modak.catalog import profiles
from modak.catalog.records import TableRecord
from modak.tables.maintenance import policy
from modak.tables.profiles import place_of, properties_of
from modak.tables.site import Site


def policy_of(site: Site, record: TableRecord) -> list[dict[str, Any]]:
    """Every key of a table's maintenance policy: the value in force and where it comes from."""
    return _shown(policy.of(site, record))


def edit_policy(
    site: Site, record: TableRecord, assignments: Mapping[str, str], removed: Sequence[str], *, reset: bool
) -> list[dict[str, Any]]:
    """Change a table's own policy, all at once; returns the policy then in force."""
    values = policy.parse(assignments, removed)
    return _shown(policy.edit(site, record.name, values, removed, reset=reset))


def create_profile(
    site: Site, name: str, warehouse: str, config: Mapping[str, str], credentials: str | None, *, default: bool
) -> None:
    """Write a storage profile down; the same again is no change, a different one is refused."""
    root = place_of(warehouse)
    properties = properties_of(config, root)
    with site.connect() as conn:
        profiles.create(conn, name, root, config=properties, credentials=credentials, default=default)


def _shown(found: policy.Policy) -> list[dict[str, Any]]:
    return [{"key": name, "value": each.value, "source": each.source} for name, each in found.settings.items()]
