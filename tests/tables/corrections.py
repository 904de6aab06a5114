"""Corrections of cold rows as the SQL functions leave them in the delta."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.tables.events import Events


@dataclass
class Corrections:
    """Writes the delta of `public.events`."""

    events: Events

    def upsert(self, id_: int, ts: int, body: str | None, **more: Any) -> None:
        self.record(str(id_), ts, {"id": str(id_), "ts": str(ts), "body": body, **more})

    def delete(self, id_: int, ts: int) -> None:
        self.record(str(id_), ts, None)

    def record(self, pk: str, tier_key: int, image: dict[str, Any] | None) -> None:
        with self.events.site.connect(autocommit=True) as conn:
            conn.execute(
                "SELECT modak.record_change(%s, %s, %s, NULL, %s)",
                (self.table_id, pk, tier_key, None if image is None else json.dumps(image)),
            )

    @property
    def table_id(self) -> int:
        return self.events.site.reader.state(self.events.name).table.table_id
