"""What the embedded server needs of the machine: its process, a port, a private file."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Postmaster:
    """A server process and whether it accepts connections."""

    pid: int
    ready: bool


def find_postmaster(data: Path) -> Postmaster | None:
    """The server that works in a data folder, if one does."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        pid = int(lines[0])
    except (FileNotFoundError, PermissionError, IndexError, ValueError):
        return None
    if not _runs_in(pid, data):
        return None
    return Postmaster(pid, ready=len(lines) > 7 and lines[7].strip() == "ready")


def _runs_in(pid: int, data: Path) -> bool:
    # A postmaster works inside its data folder, which tells it from a process that got the same number later.
    if Path("/proc/self").exists():
        try:
            return Path(os.readlink(f"/proc/{pid}/cwd")) == data.resolve() and _state(pid) != "Z"
        except OSError:
            return False
    listed = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return "postgres" in listed.stdout and str(data) in listed.stdout


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def bindable(port: int) -> bool:
    """Whether a server could take the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def write_private(path: Path, text: str) -> None:
    """Put a file in place at once, readable by nobody else."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
