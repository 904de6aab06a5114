"""A TCP proxy in front of Postgres that misbehaves on demand.

It shows what a client does when the network fails at the worst moment: the COMMIT has reached the server and its answer
has not come back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from types import TracebackType


class FaultProxy:
    """Forwards a loopback port to a server until it is told to fail."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._marker: bytes | None = None
        self._hole = threading.Event()
        self._closed = False
        self.swallowed = threading.Event()
        """Set once answers have been swallowed and the connection was cut."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="fault-proxy", daemon=True).start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def swallow_answers_after(self, substring: bytes) -> None:
        """Once a client sends `substring`, pass it on, swallow the server's answer to it, and cut that connection."""
        with self._lock:
            self._marker = substring
            self.swallowed.clear()

    def black_hole(self) -> None:
        """From now on no byte passes in either direction, and no connection is closed."""
        self._hole.set()

    def lead_to(self, host: str, port: int) -> None:
        """Lead to another server from now on, and reset what is open to the one before."""
        self._target = (host, port)
        self.cut()

    def heal(self) -> None:
        """Forward again; forget the marker. Bytes that fell into the hole stay lost."""
        with self._lock:
            self._marker = None
        self._hole.clear()

    def cut(self) -> None:
        """Reset every open connection; new ones are accepted."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.cut()

    def close(self) -> None:
        """Stop listening and reset every connection."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                continue
            server.settimeout(None)
            pair = _Pair(client, server)
            with self._lock:
                self._pairs.append(pair)
            threading.Thread(target=self._to_server, args=(pair,), daemon=True).start()
            threading.Thread(target=self._to_client, args=(pair,), daemon=True).start()

    def _to_server(self, pair: _Pair) -> None:
        # The marker may be split over two reads, so the end of the last one is kept.
        tail = b""
        for data in _chunks(pair.client):
            if self._hole.is_set():
                continue
            with self._lock:
                marker = self._marker
                if marker is not None and not pair.mute and marker in tail + data:
                    pair.mute = True
                    self._marker = None
            tail = (tail + data)[-len(marker) + 1 :] if marker and len(marker) > 1 else b""
            try:
                pair.server.sendall(data)
            except OSError:
                break
        pair.cut()

    def _to_client(self, pair: _Pair) -> None:
        for data in _chunks(pair.server):
            if pair.mute:
                # The server has answered, so it has done what was asked: only the client does not know.
                pair.cut()
                self.swallowed.set()
                return
            if self._hole.is_set():
                continue
            try:
                pair.client.sendall(data)
            except OSError:
                break
        pair.cut()


class _Pair:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.mute = False

    def cut(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                end.close()


def _chunks(end: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = end.recv(65_536)
        except OSError:
            return
        if not data:
            return
        yield data
