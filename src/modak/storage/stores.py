"""All roots that this process may touch, as one store: each URI goes to the root that it lies below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from modak.core.errors import Refused
from modak.storage.access import Key, unusable
from modak.storage.store import Entry, Store
from modak.storage.uri import normal


class Stores:
    """The calls of a `Store`, over several roots; whatever lies below none of them is refused."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = sorted(keys, key=lambda key: -len(key.root))
        self._open: dict[str, Store] = {}

    @property
    def roots(self) -> Mapping[str, Key]:
        """What can be touched."""
        return {key.root: key for key in self._keys}

    def list(self, prefix_uri: str | None = None) -> Iterator[Entry]:
        """Every file below a folder (or below all roots), in no order; a folder that does not exist is empty."""
        for folder in [prefix_uri] if prefix_uri is not None else [key.root for key in self._keys]:
            yield from self._of(folder).list(folder)

    def folders(self, prefix_uri: str) -> Sequence[str]:
        """The folders right below a folder; itself when files lie in it too, so that together they hold all of it."""
        return self._of(prefix_uri).folders(prefix_uri)

    def delete(self, uris: Iterable[str]) -> int:
        """Delete files; one that is gone already is fine."""
        wanted: dict[str, list[str]] = {}
        for uri in uris:
            wanted.setdefault(self._of(uri).root, []).append(uri)
        return sum(self._of(root).delete(several) for root, several in wanted.items())

    def delete_prefix(self, prefix_uri: str) -> int:
        """Delete a folder with everything in it."""
        return self._of(prefix_uri).delete_prefix(prefix_uri)

    def exists(self, uri: str) -> bool:
        """Whether a file is there."""
        return self._of(uri).exists(uri)

    def size(self, uri: str) -> int:
        """The size of a file in bytes."""
        return self._of(uri).size(uri)

    def read(self, uri: str) -> bytes:
        """The whole of a small file."""
        return self._of(uri).read(uri)

    def write(self, uri: str, content: bytes) -> None:
        """Create a file; `storage.exists` if there is one already."""
        self._of(uri).write(uri, content)

    def _of(self, uri: str) -> Store:
        plain = normal(uri)
        for key in self._keys:
            if key.holds(plain):
                if (refusal := unusable(key)) is not None:
                    raise refusal
                if key.root not in self._open:
                    self._open[key.root] = Store.of(key.root, key.props)
                return self._open[key.root]
        raise Refused(
            "storage.outside",
            f"{uri} lies outside every storage profile.",
            hint="modak-worker profile list shows where lakes may lie.",
        )
