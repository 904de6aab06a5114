"""Which hosts are this machine: one rule for what HTTP listens on, for the name it is called by, and for TLS.

And which pages are of the host that is called: what a browser sends from any other one is somebody else's wish.
"""

from __future__ import annotations

import re

_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1|\[::1\]", re.IGNORECASE | re.ASCII)
_HEADER = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?", re.ASCII)


def is_loopback(host: str) -> bool:
    """Whether a host name or an address is this machine; nothing is resolved."""
    return _LOOPBACK.fullmatch(host) is not None


def is_called_loopback(header: str) -> bool:
    """Whether a `Host` header names this machine; a name of another site that leads here (rebinding) does not."""
    parts = _HEADER.fullmatch(header)
    return parts is not None and is_loopback(parts[1])


def is_page_of(origin: str, host: str) -> bool:
    """Whether an `Origin` header names the host of a `Host` header; where TLS ends elsewhere the schemes differ."""
    return origin.partition("://")[2].lower() == host.lower() != ""
