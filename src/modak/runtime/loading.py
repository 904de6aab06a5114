"""`modak.load`: a batch of rows into a running daemon, once, from any Python program.

Only the standard library is needed. The same label is sent again after a lost answer, so a batch is never loaded twice.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

from modak.core.errors import ModakError, UsageError

TRIES = 8
_TYPES = {
    ".jsonl": "application/x-ndjson",
    ".ndjson": "application/x-ndjson",
    ".json": "application/x-ndjson",
    ".csv": "text/csv",
    ".parquet": "application/vnd.apache.parquet",
    ".arrow": "application/vnd.apache.arrow.stream",
}
_AGAIN = frozenset({409, 429, 502, 503, 504})


def load(
    table: str,
    rows: Iterable[Mapping[str, Any]] | bytes | str | Path,
    *,
    label: str | None = None,
    url: str | None = None,
    token: str | None = None,
    content_type: str | None = None,
    max_error_ratio: float = 0.0,
    tries: int = TRIES,
    timeout: float = 600.0,
) -> dict[str, Any]:
    """Load rows (mappings, the bytes of a body, or the path of a file) into a table; returns the daemon's answer.

    Without `url` the daemon of this machine is asked, at `MODAK_HTTP_HOST`: the worker that listens on
    `MODAK_METRICS_PORT`, else the console on `MODAK_CONSOLE_PORT`. Without `token` `MODAK_LOAD_TOKEN` is taken. Without
    a label one is made up, and used for every try of this call.
    """
    base = url or _here()
    secret = token or os.environ.get("MODAK_LOAD_TOKEN")
    if not secret:
        raise UsageError("load.token", "There is no token.", hint="Give token=…, or set MODAK_LOAD_TOKEN.")
    body, kind = _body(rows, content_type)
    # With all digits, because of a million rows the last ones count, and without an exponent, which the daemon refuses.
    ratio = f"{Decimal(repr(float(max_error_ratio))):f}"
    ask = f"{base.rstrip('/')}/api/load/{urllib.parse.quote(table)}?max_error_ratio={ratio}"
    headers = {"X-Modak-Token": secret, "X-Modak-Label": label or uuid4().hex, "Content-Type": kind}
    for attempt in range(1, tries + 1):
        try:
            return _sent(ask, body, headers, timeout)
        except ModakError as error:
            if not error.retryable or attempt == tries:
                raise
        pause = min(0.2 * 2.0**attempt, 10.0)
        time.sleep(pause / 2 + random.uniform(0, pause / 2))  # noqa: S311
    raise AssertionError("unreachable")


def _here() -> str:
    host = os.environ.get("MODAK_HTTP_HOST", "127.0.0.1")
    console, headless = os.environ.get("MODAK_CONSOLE_PORT", "9090"), os.environ.get("MODAK_METRICS_PORT")
    return f"http://{host}:{headless if headless and _listens(host, headless) else console}"


def _listens(host: str, port: str) -> bool:
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _body(rows: Iterable[Mapping[str, Any]] | bytes | str | Path, kind: str | None) -> tuple[bytes | Path, str]:
    if isinstance(rows, bytes):
        return rows, kind or "application/x-ndjson"
    if isinstance(rows, str | Path):
        path = Path(rows)
        return path, kind or _TYPES.get(path.suffix, "application/x-ndjson")
    lines = "".join(json.dumps(dict(row), default=str) + "\n" for row in rows)
    return lines.encode(), "application/x-ndjson"


def _sent(ask: str, body: bytes | Path, headers: dict[str, str], timeout: float) -> dict[str, Any]:
    if not ask.startswith(("http://", "https://")):
        raise UsageError("load.url", "The address of the daemon begins with http:// or https://.")
    stream = body.open("rb") if isinstance(body, Path) else None
    length = str(body.stat().st_size) if isinstance(body, Path) else str(len(body))
    try:
        request = urllib.request.Request(  # noqa: S310 - checked above
            ask,
            data=stream if isinstance(body, Path) else body,
            headers={**headers, "Content-Length": length},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise _refused(error) from None
    except (urllib.error.URLError, ConnectionError, TimeoutError, json.JSONDecodeError) as error:
        reason = str(getattr(error, "reason", error))
        raise ModakError("load.unreachable", f"The daemon does not answer: {reason}", retryable=True) from None
    finally:
        if stream is not None:
            stream.close()


def _refused(error: urllib.error.HTTPError) -> ModakError:
    try:
        said = json.loads(error.read())
    except ValueError:
        said = {}
    # Loads answer in a form of their own; what is settled before one begins, as the API does.
    said = said["error"] if isinstance(said.get("error"), dict) else said
    message = str(said.get("message") or error.reason)
    wrong = "; ".join(f"line {row['line']}: {row['reason']}" for row in said.get("rows", ())[:5])
    code = str(said.get("code") or said.get("error") or f"load.http_{error.code}")
    again = error.code in _AGAIN
    return ModakError(code, f"{message} {wrong}".strip(), hint=str(said.get("hint") or ""), retryable=again)
