"""A tiered table with a lake in a folder, and files to bring into it."""

from __future__ import annotations

from tests.tables.conftest import events, leader, site

__all__ = ["events", "leader", "site"]
