"""What `status` says of a mirror that somebody should look at, by what its pump has told."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from modak.catalog.mirrors import MirrorHealth
from modak.tables.status import _mirror_problems

SITE: Any = SimpleNamespace(settings=SimpleNamespace(mirror=SimpleNamespace(slot_warn_bytes=1_000_000)))


@pytest.mark.parametrize(
    ("health", "said"),
    [
        (None, []),
        (MirrorHealth(table_id=1, lag_seconds=5.0, retained_bytes=1_000_000), []),
        (
            MirrorHealth(table_id=1, retained_bytes=1_000_001),
            ["its replication slot keeps 1,000,001 bytes of WAL, more than 1,000,000"],
        ),
        (
            MirrorHealth(table_id=1, paused="The slot was given up."),
            ["the mirror is paused: The slot was given up. Set MODAK_SLOT_POLICY to warn or reanchor to go on."],
        ),
        (
            MirrorHealth(table_id=1, error="storage.gone: It is away.", failing_since=datetime(2026, 1, 2, tzinfo=UTC)),
            ["the mirror stands still since 2026-01-02 00:00:00: storage.gone: It is away."],
        ),
    ],
)
def test_what_a_mirror_suffers_from_is_said_with_what_to_do(health: MirrorHealth | None, said: list[str]) -> None:
    assert list(_mirror_problems(SITE, health)) == said
