"""The client of an object store: one set of options for S3, Google Cloud Storage and Azure, and one way to fail.

Properties are named as Iceberg's FileIO names them (`properties.py`), so that a profile has one spelling for Java and
for tasks. Single requests are retried by the client with growing, random pauses and a limit on the time; errors come
out as sentences that hold no key.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from modak.core.errors import ModakError, UsageError
from modak.storage.access import whose
from modak.storage.properties import for_client, store_of
from modak.storage.uri import local_path

CLIENT = {
    "timeout": timedelta(hours=1),
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=60),
}
RETRIES = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}
NO_RETRIES = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
_AT_ONCE = 16

_SECRET = re.compile(r"(?i)((?:secret|password|token|signature|credential|accesskeyid|sig)[\w-]*[=:]\s*)[^\s&,;<>\"]+")
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
_DENIED_STATUS = re.compile(r"status code: 40[13]\b")


def backend(root: str, props: Mapping[str, str], retries: Mapping[str, Any] = RETRIES) -> Any:
    """obstore's store for a root: a folder, or a path of a bucket."""
    if local_path(root) is not None:
        from obstore.store import LocalStore

        return LocalStore(local_path(root))
    from obstore.store import from_url

    given: Any = options(root, props)
    client: Any = {**CLIENT, "allow_http": given.pop("allow_http", "false") == "true"}
    again: Any = retries
    try:
        return from_url(root, config=given, client_options=client, retry_config=again)
    except trouble() as error:
        raise translated(error, f"open {root}", root) from error


def options(root: str, props: Mapping[str, str]) -> dict[str, str]:
    """What obstore calls the properties of a profile."""
    if store_of(root) is None:
        raise UsageError("usage.uri", f"{root} is no place for a lake.", hint="Use a folder, s3://, gs:// or abfs://.")
    return for_client(root, props)


def delete(client: Any, keys: Sequence[str]) -> None:
    """Delete objects, whether or not they are there.

    S3 forgives those that are missing. Google and Azure stop at the first, and then each is asked for on its own.
    """
    import obstore

    def one(key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(client, key)

    try:
        obstore.delete(client, [*keys])
    except FileNotFoundError:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(one, keys))


def trouble() -> tuple[type[Exception], ...]:
    """What obstore and the operating system raise."""
    from obstore.exceptions import BaseError

    return (BaseError, OSError)


def translated(error: Exception, what: str, uri: str) -> ModakError:
    """An error of the store of a URI as a sentence for people; retryable unless another try cannot help."""
    if _is_denial(error):
        said = scrubbed(_said(error))
        message = f"Storage refuses to {what}{said and ': '}{said}.{whose(uri)}"
        return ModakError("storage.denied", message, hint="Check the credentials and rights.")
    first = _said(error) or (str(error).splitlines() or [type(error).__name__])[0]
    if "Invalid or unsupported" in first or "MissingRegion" in first:
        return ModakError("storage.failed", f"Storage cannot {what}: {scrubbed(first)}")
    return ModakError("storage.failed", f"Storage cannot {what}: {scrubbed(first)}", retryable=True)


def _is_denial(error: Exception) -> bool:
    # A listing that is refused has no class of its own.
    named = isinstance(error, PermissionError) or type(error).__name__ in _DENIED
    return named or _DENIED_STATUS.search(str(error)) is not None


def _said(error: Exception) -> str:
    """What the store itself gives as the reason."""
    text = str(error)
    parts = [found[1].strip() for name in ("Code", "Message") if (found := re.search(rf"<{name}>([^<]+)<", text))]
    return ": ".join(parts).rstrip(".")


def scrubbed(text: str) -> str:
    """A store's words without what looks like a key in them."""
    return _SECRET.sub(r"\1***", text)
