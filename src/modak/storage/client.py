"""The client of an object store: one set of options for S3, Google Cloud Storage and Azure, and one way to fail.

Properties are named as Iceberg's FileIO names them, so that a profile has one spelling for Java and for tasks. Single
requests are retried by the client with growing, random pauses and a limit on the time; errors come out as sentences
that hold no key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from modak.core.errors import ModakError, UsageError
from modak.storage.uri import local_path, normal

_S3 = {
    "s3.endpoint": "endpoint",
    "s3.access-key-id": "access_key_id",
    "s3.secret-access-key": "secret_access_key",
    "s3.session-token": "session_token",
    "client.region": "region",
    "s3.region": "region",
}
_GCS = {
    "gcs.service-account-key": "service_account_key",
    "gcs.credentials-file": "service_account",
    "gcs.service.host": "base_url",
}
_AZURE = {
    "adls.auth.shared-key.account.name": "account_name",
    "adls.auth.shared-key.account.key": "account_key",
    "adls.token.client-id": "client_id",
    "adls.token.client-secret": "client_secret",
    "adls.token.tenant-id": "tenant_id",
    "adls.endpoint": "endpoint",
}
_AZURE_SAS = "adls.sas-token."
CLIENT = {
    "timeout": timedelta(hours=1),
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=60),
}
RETRIES = {"max_retries": 6, "retry_timeout": timedelta(seconds=60)}
NO_RETRIES = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}

_SECRET = re.compile(r"(?i)((?:secret|password|token|signature|credential|accesskeyid|sig)[\w-]*[=:]\s*)[^\s&,;<>\"]+")
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")


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
        raise translated(error, f"open {root}") from error


def options(root: str, props: Mapping[str, str]) -> dict[str, str]:
    """What obstore calls the properties of a profile."""
    scheme = normal(root).partition(":")[0]
    if scheme == "s3":
        found = {_S3[key]: props[key] for key in _S3 if props.get(key)}
        if "endpoint" in found:
            found.setdefault("region", "us-east-1")
        styled = props.get("s3.path-style-access", "true" if "endpoint" in found else "false")
        found["virtual_hosted_style_request"] = "false" if styled == "true" else "true"
    elif scheme == "gs":
        found = {_GCS[key]: props[key] for key in _GCS if props.get(key)}
    elif scheme in ("abfs", "abfss"):
        found = {_AZURE[key]: props[key] for key in _AZURE if props.get(key)}
        found |= {"sas_token": value for key, value in props.items() if key.startswith(_AZURE_SAS)}  # noqa: B035
    else:
        raise UsageError("usage.uri", f"{root} is no place for a lake.", hint="Use a folder, s3://, gs:// or abfs://.")
    if scheme != "s3":
        # The names of the client itself pass as they are.
        found |= {key: value for key, value in props.items() if "." not in key}
    if any(found.get(key, "").startswith("http://") for key in ("endpoint", "base_url")):
        found["allow_http"] = "true"
    return found


def trouble() -> tuple[type[Exception], ...]:
    """What obstore and the operating system raise."""
    from obstore.exceptions import BaseError

    return (BaseError, OSError)


def translated(error: Exception, what: str) -> ModakError:
    """An error of the store as a sentence for people; retryable unless another try cannot help."""
    if isinstance(error, PermissionError) or type(error).__name__ in _DENIED:
        return ModakError("storage.denied", f"Storage refuses to {what}.", hint="Check the credentials and rights.")
    first = _cause(error)
    if "Invalid or unsupported" in first or "MissingRegion" in first:
        return ModakError("storage.failed", f"Storage cannot {what}: {scrubbed(first)}")
    return ModakError("storage.failed", f"Storage cannot {what}: {scrubbed(first)}", retryable=True)


def _cause(error: Exception) -> str:
    """What the store itself gives as the reason, else the first line of what the client says."""
    said = str(error)
    parts = [found[1].strip() for name in ("Code", "Message") if (found := re.search(rf"<{name}>([^<]+)<", said))]
    return ": ".join(parts) or (said.splitlines() or [type(error).__name__])[0]


def scrubbed(text: str) -> str:
    """A store's words without what looks like a key in them."""
    return _SECRET.sub(r"\1***", text)
