"""How each root of a lake is reached: the credentials of this process, by URI, for the driver and for tasks.

A process holds one keyring. The site fills it from settings and storage profiles, `spark.distribute` hands it to the
tasks with their work, and whoever opens a file asks it by the file's URI. It never enters the catalog, a log or a Spark
setting, and prints no value.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modak.core.errors import Refused
from modak.storage.uri import local_path, normal


@dataclass(frozen=True, slots=True)
class Key:
    """A root and the properties that open it, named as Iceberg's FileIO names them."""

    root: str
    props: Mapping[str, str] = field(default_factory=dict, repr=False)
    missing: str | None = None
    """The variable that should hold the credentials and is not set."""
    wrong: str | None = None
    """What is wrong with a property in it."""
    instead: str = ""
    """What to write in its place."""
    owner: str = ""
    """The profile that it opens and the variable that it came from, in words."""

    def holds(self, uri: str) -> bool:
        """Whether a normal URI is the root or lies below it."""
        return uri == self.root or uri.startswith(f"{self.root}/")


_lock = threading.Lock()
_keys: dict[str, Key] = {}


def use(keys: Iterable[Key]) -> None:
    """Add keys to the keyring; a later one for the same root replaces the earlier."""
    with _lock:
        _keys.update({key.root: key for key in keys})


def carried() -> tuple[Key, ...]:
    """What travels into tasks: local folders need no key."""
    with _lock:
        return tuple(key for key in _keys.values() if local_path(key.root) is None)


def key_of(uri: str) -> Key:
    """The key of the longest root that holds a URI; without any, the provider's own chain is asked."""
    plain = normal(uri)
    with _lock:
        fitting = [key for key in _keys.values() if key.holds(plain)]
    found = max(fitting, key=lambda key: len(key.root), default=Key(plain))
    if (refusal := unusable(found)) is not None:
        raise refusal
    return found


def whose(uri: str) -> str:
    """Whose key opens a URI, as a sentence to follow a refusal of it."""
    try:
        owner = key_of(uri).owner
    except Refused as error:
        return f" {error.message}"
    return f" The key is that of {owner}." if owner else ""


def unusable(key: Key) -> Refused | None:
    """Why a key opens nothing."""
    if key.missing is not None:
        return Refused(
            "config.no_credentials",
            f"{key.missing} is not set, so {key.root} cannot be opened.",
            hint="Set it to key=value;… in the environment of the worker and start it again.",
        )
    if key.wrong is not None:
        where = f" with the key of {key.owner}" if key.owner else ""
        return Refused("config.property", f"{key.root} cannot be opened{where}: {key.wrong}", hint=key.instead)
    return None
