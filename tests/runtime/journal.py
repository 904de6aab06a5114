"""Rows of the journal as operations leave them, without the operations."""

from __future__ import annotations

from modak.tables.site import Site

ENDS = {"op-done": "tier", "op-failed": "fold", "op-abandoned": "retention"}
"""The operations that `ended` writes down, newest first, and of which kind each is."""
FAILURE = "test.failed: The disk is full."

_STEPS = {
    "op-done": ("prepared", "committed", "done"),
    "op-failed": ("failed",),
    "op-abandoned": ("writing", "abandoned"),
}


def ended(site: Site, table_id: int) -> None:
    """One operation that is done, one that failed and one that a crash has cut off."""
    with site.connect(autocommit=True) as conn:
        for age, (op_id, kind) in enumerate(ENDS.items()):
            conn.execute(
                "INSERT INTO modak.op_log (op_id, table_id, kind, started_at, counters)"
                """ VALUES (%s, %s, %s, clock_timestamp() + make_interval(mins => %s), '{"rows": 7}')""",
                (op_id, table_id, kind, 10 - age),
            )
            for phase in _STEPS[op_id]:
                conn.execute(
                    "UPDATE modak.op_log SET phase = %s, error = %s WHERE op_id = %s",
                    (phase, FAILURE if phase == "failed" else None, op_id),
                )


def begun(site: Site, table_id: int, count: int, kind: str = "many") -> None:
    """So many operations that have begun long ago, a minute apart."""
    with site.connect(autocommit=True) as conn:
        conn.execute(
            "INSERT INTO modak.op_log (op_id, table_id, kind, started_at)"
            " SELECT 'op-' || i, %s, %s, '2024-01-01 00:00:00.123456+00'::timestamptz + make_interval(mins => i)"
            " FROM generate_series(1, %s) AS i",
            (table_id, kind, count),
        )
