"""A whole site on real parts for mirrored tables, as for tiered ones."""

from __future__ import annotations

from tests.mirror.world import ground, make
from tests.tables.conftest import leader, site

__all__ = ["ground", "leader", "make", "site"]
