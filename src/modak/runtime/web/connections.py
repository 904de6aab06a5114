"""Connections of the daemon's HTTP: one that says nothing is closed, so that nobody holds the server up by silence.

uvicorn ends a connection that is still between two requests; it waits for ever for the first one, and for the rest of
one that was begun. Here both must have come, head and all, within some seconds. Memory: a timer per connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""How long the head of a request may take from its connection, or its first byte on one that had others."""


class Prompt(H11Protocol):
    """uvicorn's connection, which closes unless a request comes."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Whoever is idle, as h11 calls it, has sent less than a head; every byte has put off uvicorn's own timer.
        if self.conn.their_state is h11.IDLE:
            self._expect()
        else:
            self._expect_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_no_more()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._expect_no_more()
        super().handle_websocket_upgrade(event)

    def _expect(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _expect_no_more(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
