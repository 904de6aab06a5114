"""Who runs the embedded server, and where.

Postgres refuses root, so root lends it an unprivileged account and a folder that this account can reach.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modak.core.errors import ModakError

_CANDIDATES = ("postgres", "nobody", "daemon")


@dataclass(frozen=True, slots=True)
class Account:
    """A system user to run programs as; `None` ids mean: as ourselves."""

    uid: int | None = None
    gid: int | None = None

    def run(self, command: Sequence[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a program as this account, in a session of its own and with a clean environment."""
        # PG* variables of the caller would reach the server, a terminal's Ctrl-C would stop it.
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
        for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
            if name in os.environ:
                environment[name] = os.environ[name]
        return subprocess.run(
            list(command),
            user=self.uid,
            group=self.gid,
            extra_groups=[] if self.uid is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
            timeout=timeout,
            check=False,
            text=True,
            errors="replace",
        )

    def own(self, path: Path) -> None:
        """Give a file or folder to the account."""
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def reaches(self, folder: Path) -> bool:
        """Whether the account can pass through every parent of a folder."""
        if self.uid is None:
            return True
        return self.run(["/bin/sh", "-c", 'test -x "$1"', "sh", str(folder)], timeout=30).returncode == 0

    def starts(self, program: Path) -> bool:
        """Whether the account can run a program."""
        try:
            return self.run([str(program), "--version"], timeout=30).returncode == 0
        except OSError:
            return False


def account_for(data: Path) -> Account:
    """The account that owns existing data, else ourselves, else (as root) a suitable unprivileged one."""
    if os.geteuid() != 0:
        return Account()
    if data.exists():
        owner = data.stat()
        if owner.st_uid != 0:
            return Account(owner.st_uid, owner.st_gid)
    for name in _CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(entry.pw_uid, entry.pw_gid)
    raise ModakError(
        "embedded.no_account",
        "Postgres does not run as root, and this machine has no account to run it as.",
        hint="Run modak-worker as an ordinary user, or set MODAK_PG_URL.",
    )


def reachable_place(wanted: Path, home: Path, account: Account, fallbacks: Sequence[Path]) -> Path:
    """`wanted` if the account can get there, else a folder named after `home` below the first usable fallback."""
    if account.reaches(wanted.parent):
        return wanted
    # /root is closed to everybody else, and that is where the default home of root lies.
    key = hashlib.sha256(str(home).encode()).hexdigest()[:16]
    for root in fallbacks:
        if not root.is_dir() or not account.reaches(root):
            continue
        base = root / "modak"
        try:
            base.mkdir(mode=0o711, exist_ok=True)
        except OSError:
            continue
        status = base.lstat()
        if base.is_symlink() or status.st_uid != os.geteuid():
            continue
        base.chmod(0o711)
        return base / key
    raise ModakError(
        "embedded.no_place",
        f"The account that runs Postgres cannot reach {wanted}.",
        hint="Set MODAK_HOME to a folder that other users may pass through, such as /var/lib/modak.",
    )
