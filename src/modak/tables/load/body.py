"""The body of a load on disk: counted while it arrives, decompressed piece by piece, never in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

from modak.core.errors import ModakError

Encoding = Literal["identity", "gzip", "zstd"]

_STEP = 1 << 20


def too_large(most: int) -> ModakError:
    """The body has more bytes than are allowed."""
    return ModakError("load.too_large", f"The body has more than {most:,} bytes.", hint="Split it into more batches.")


class Spool:
    """A file that takes the pieces of a body as they come."""

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self._most = most
        self._size = 0
        self._file: IO[bytes] = path.open("wb")

    def write(self, piece: bytes) -> None:
        """Take the next piece."""
        self._size += len(piece)
        if self._size > self._most:
            raise too_large(self._most)
        self._file.write(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def plain(path: Path, encoding: Encoding, most: int) -> Path:
    """The body without its compression, as a file beside it; the limit counts the plain bytes too."""
    if encoding == "identity":
        return path
    target = path.with_suffix(".plain")
    with Spool(target, most) as sink:
        for piece in _decompressed(path, encoding):
            sink.write(piece)
    return target


def _decompressed(path: Path, encoding: Encoding) -> Iterator[bytes]:
    import pyarrow as pa

    try:
        with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, encoding) as source:
            while piece := source.read(_STEP):
                yield piece
    except (pa.ArrowException, OSError) as error:
        # What the operating system says has a number, and is not about the body.
        if getattr(error, "errno", None) is not None:
            raise
        raise ModakError("load.encoding", f"The body is not {encoding}, or ends in the middle.") from error
