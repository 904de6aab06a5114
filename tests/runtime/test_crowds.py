"""HTTP under a crowd: whoever says nothing is sent away, who is too much is told so, and the probes answer always."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import APIRouter

import modak
from modak.core.errors import ModakError
from modak.runtime.hosting import loads
from modak.runtime.web import connections, room
from modak.runtime.web.app import create_app
from modak.runtime.web.context import Context
from modak.runtime.web.server import listening

CROWD = 250
PROBES = ("/livez", "/readyz")


def in_its_own_loop(what: Coroutine[Any, Any, None]) -> None:
    """In a thread: the browser of other tests keeps a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, what).result()


def connect(address: str) -> socket.socket:
    where = urlsplit(address)
    assert where.hostname is not None
    return socket.create_connection((where.hostname, where.port), timeout=30)


@contextmanager
def crowd(address: str, says: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [said(stack.enter_context(connect(address)), says) for _ in range(CROWD)]


def said(sock: socket.socket, what: bytes) -> socket.socket:
    sock.sendall(what)
    return sock


def closed_under(sock: socket.socket, drops: bytes, seconds: float) -> bool:
    """Whether a server closes while one byte after the other comes."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            sock.sendall(drops)
            time.sleep(0.1)
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("says", [b"", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_connections_without_a_request_hold_up_nobody_and_are_closed(
    bare: Callable[..., Context], monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 5.0)
    with listening(bare(), 0) as address, crowd(address, says) as silent:
        for path in (*PROBES, "/api/v1/overview"):
            assert httpx.get(address + path, timeout=30).status_code == 200
        assert [sock.recv(1) for sock in silent] == [b""] * CROWD


def test_a_request_that_comes_byte_by_byte_is_closed_though_the_connection_had_others(
    bare: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    with listening(bare(), 0) as address, connect(address) as sock:
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200")
        assert closed_under(sock, b"G", 30)


def test_a_connection_between_two_requests_is_ended_by_the_pause_between_requests_alone(
    bare: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with listening(bare(), 0) as address:
        line = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
        for _ in range(2):
            line.request("GET", "/livez")
            answer = line.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
            kept = line.sock
            time.sleep(1.5)
        assert line.sock is kept, "it was not made anew"
        line.close()


def test_a_body_and_an_answer_may_take_longer_than_a_head(
    bare: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    slow = APIRouter()

    @slow.post("/slow")
    async def answer(body: list[int]) -> int:
        await asyncio.sleep(1.5)
        return sum(body)

    with listening(bare(), 0, [slow]) as address, connect(address) as sock:
        head = b"POST /slow HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 6\r\n\r\n"
        sock.sendall(head + b"[1, ")
        time.sleep(1.5)
        sock.sendall(b"2]")
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200")


def test_more_requests_than_there_is_room_for_are_told_so_and_the_probes_answer(
    bare: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_REQUESTS", 2)
    context, held = bare(), APIRouter()

    async def ask() -> None:
        go, begun = asyncio.Event(), asyncio.Semaphore(0)

        @held.get("/held")
        async def hold() -> str:
            begun.release()
            await go.wait()
            return "done"

        transport = httpx.ASGITransport(create_app(context, [held]))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            under_way = [asyncio.create_task(client.get("/held")) for _ in range(2)]
            for _ in under_way:
                await begun.acquire()
            full = await asyncio.wait_for(client.get("/held"), 30)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "api.full")
            assert full.headers["retry-after"]
            assert full.headers["x-content-type-options"] == "nosniff"
            assert [(await client.get(path)).status_code for path in PROBES] == [200, 200]
            go.set()
            assert [(await each).status_code for each in under_way] == [200, 200]
            assert (await client.get("/held")).status_code == 200, "there is room again"

    in_its_own_loop(ask())


def test_the_probes_wait_for_no_thread(bare: Callable[..., Context]) -> None:
    go, held = threading.Event(), APIRouter()

    @held.get("/held")
    def hold() -> str:
        go.wait(60)
        return "done"

    app = create_app(bare(), [held])

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            under_way = [asyncio.create_task(client.get("/held")) for _ in range(100)]
            try:
                for path in PROBES:
                    assert (await asyncio.wait_for(client.get(path), 20)).status_code == 200
            finally:
                go.set()
                await asyncio.gather(*under_way)

    in_its_own_loop(ask())


def test_a_program_that_loads_is_told_to_come_back(
    bare: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MOST_REQUESTS", 0)
    context = bare(MODAK_LOAD_TOKEN="token-of-loads")
    with listening(context, 0, loads(context)) as address, pytest.raises(ModakError) as told:
        modak.load("public.events", b"{}", label="one", url=address, token="token-of-loads", tries=1)
    assert (told.value.code, told.value.retryable) == ("api.full", True)
    assert told.value.hint
