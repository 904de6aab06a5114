"""What a listing has told, so that one which begins anew tells nothing twice.

A set of all the paths of a large table would take a gigabyte. Kept are digests of 128 bits, one after the other, and
nothing looks for them unless the listing breaks off: then they are sorted, once per attempt. That two paths of a table
have the same digest is less likely than that the machine counts wrong.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left

WIDTH = 16


class Told:
    """The names that a listing has told, in so many bytes each."""

    def __init__(self) -> None:
        self._earlier = b""
        """Sorted: what attempts before this one have told."""
        self._now = bytearray()

    def begin_again(self) -> None:
        """The listing begins anew: what was told by now is not new any more."""
        import numpy as np

        if self._now:
            digests = np.frombuffer(self._earlier + self._now, dtype=f"S{WIDTH}")
            self._earlier = np.sort(digests).tobytes()
            self._now = bytearray()

    def is_new(self, name: str) -> bool:
        """Whether no earlier attempt has told a name; it counts as told from now on."""
        digest = hashlib.blake2b(name.encode(), digest_size=WIDTH).digest()
        if self._earlier and self._has(digest):
            return False
        self._now += digest
        return True

    def _has(self, digest: bytes) -> bool:
        place = bisect_left(range(len(self._earlier) // WIDTH), digest, key=self._at)
        return self._at(place) == digest

    def _at(self, place: int) -> bytes:
        return self._earlier[place * WIDTH : (place + 1) * WIDTH]
