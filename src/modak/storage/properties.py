"""What opens a store, by name: one table of what a user writes, what Iceberg's Java file IO calls it, and what the
client of tasks (obstore) calls it.

Both open the same files, so a property either reaches both alike, or concerns only how one of them works (sizes of
pieces), or is refused with what to do instead. Users write Iceberg's Java names.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from modak.storage.uri import normal

ACCOUNT = "<account>"
"""Stands in a name for the Azure account; Iceberg looks it up by the whole host."""


@dataclass(frozen=True, slots=True)
class Property:
    """One property of a store, in three languages."""

    name: str
    java: str
    client: str | None = None
    """None where the client has no use for it."""


def _same(name: str, client: str | None = None) -> Property:
    return Property(name, name, client)


TABLE: Mapping[str, tuple[Property, ...]] = {
    "s3": (
        _same("s3.endpoint", "endpoint"),
        _same("s3.access-key-id", "access_key_id"),
        _same("s3.secret-access-key", "secret_access_key"),
        _same("s3.session-token", "session_token"),
        _same("client.region", "region"),
        Property("s3.region", "client.region", "region"),
        # The client asks the opposite question.
        _same("s3.path-style-access", "virtual_hosted_style_request"),
    ),
    "gs": (
        _same("gcs.oauth2.token", "bearer_token"),
        _same("gcs.oauth2.token-expires-at"),
        _same("gcs.project-id"),
        _same("gcs.service.host", "base_url"),
        _same("gcs.no-auth", "skip_signature"),
        _same("gcs.channel.read.chunk-size-bytes"),
        _same("gcs.channel.write.chunk-size-bytes"),
        _same("gcs.delete.batch-size"),
    ),
    "abfs": (
        _same("adls.auth.shared-key.account.name", "account_name"),
        _same("adls.auth.shared-key.account.key", "account_key"),
        _same(f"adls.sas-token.{ACCOUNT}", "sas_token"),
        _same("adls.token", "token"),
        _same(f"adls.connection-string.{ACCOUNT}", "endpoint"),
        Property("adls.endpoint", f"adls.connection-string.{ACCOUNT}", "endpoint"),
        _same("adls.read.block-size-bytes"),
        _same("adls.write.block-size-bytes"),
    ),
}
_OWN = {"s3": ("s3.", "client."), "gs": ("gcs.",), "abfs": ("adls.",)}
_GOOGLE = "Set GOOGLE_APPLICATION_CREDENTIALS to the key's file in the environment of the worker: both clients read it."
_ENTRA = "Set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET in the environment of the worker instead."
_INSTEAD = {
    "s3.access-key": "Write s3.access-key-id.",
    "s3.secret-key": "Write s3.secret-access-key.",
    "gcs.service-account-key": _GOOGLE,
    "gcs.credentials-file": _GOOGLE,
    **dict.fromkeys(("service_account", "service_account_key", "application_credentials"), _GOOGLE),
    **dict.fromkeys(("adls.token.tenant-id", "adls.token.client-id", "adls.token.client-secret"), _ENTRA),
    **dict.fromkeys(("adls.tenant-id", "adls.client-id", "adls.client-secret"), _ENTRA),
    **dict.fromkeys(("tenant_id", "client_id", "client_secret"), _ENTRA),
    "adls.account-name": "Write adls.auth.shared-key.account.name.",
    "adls.account-key": "Write adls.auth.shared-key.account.key.",
    "adls.sas-token": f"Write adls.sas-token.{ACCOUNT}.",
}
_CLOSE = 0.8
"""Iceberg has dozens of properties for S3 that the client has no use for; only what looks like a slip is refused."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A property that cannot reach both clients."""

    name: str
    hint: str


def store_of(root: str) -> str | None:
    """The kind of store of a root: a key of the table, or none for a folder."""
    scheme = normal(root).partition(":")[0]
    return {"s3": "s3", "gs": "gs", "abfs": "abfs", "abfss": "abfs"}.get(scheme)


def unknown(root: str, props: Mapping[str, str]) -> Unknown | None:
    """The first property that is none of the root's store; names of other stores do not matter to it."""
    store = store_of(root)
    if store is None:
        return None
    written = {property_.name: property_ for property_ in TABLE[store]}
    spoken = {property_.client: property_.name for property_ in TABLE[store] if property_.client}
    for name in sorted(props):
        if name in _INSTEAD:
            return Unknown(name, _INSTEAD[name])
        if name in spoken:
            return Unknown(name, f"Write {spoken[name]}.")
        if _general(name) in written or not name.startswith(_OWN[store]):
            continue
        near = difflib.get_close_matches(name, written, n=1, cutoff=_CLOSE if store == "s3" else 0.6)
        if near:
            return Unknown(name, f"Did you mean {near[0]}?")
        if store != "s3":
            return Unknown(name, f"Known: {', '.join(written)}.")
    return None


def for_java(root: str, props: Mapping[str, str]) -> dict[str, str]:
    """The properties as Iceberg's file IO reads them."""
    store = store_of(root)
    if store is None:
        return {}
    # Whatever else Iceberg can do with S3 is for Iceberg alone.
    alone = props if store == "s3" else {}
    found = {name: value for name, value in alone.items() if value and name != "s3.region"}
    for property_, value in _given(store, root, props):
        found.setdefault(property_.java.replace(ACCOUNT, _host(root)), value)
    if "adls.auth.shared-key.account.key" in found:
        found.setdefault("adls.auth.shared-key.account.name", _host(root).partition(".")[0])
    if "s3.endpoint" in found:
        found.setdefault("client.region", "us-east-1")
        found.setdefault("s3.path-style-access", "true")
    return found


def for_client(root: str, props: Mapping[str, str]) -> dict[str, str]:
    """The properties as the client of tasks reads them."""
    store = store_of(root)
    if store is None:
        return {}
    found: dict[str, str] = {}
    for property_, value in _given(store, root, props):
        if property_.client is not None:
            found.setdefault(property_.client, value)
    if store == "s3":
        if "endpoint" in found:
            found.setdefault("region", "us-east-1")
        styled = props.get("s3.path-style-access") or ("true" if "endpoint" in found else "false")
        found["virtual_hosted_style_request"] = "false" if styled == "true" else "true"
    elif store == "abfs":
        _one_way_in(found, root)
    elif found.get("skip_signature") == "true":
        # The client leaves only reads unsigned, and would ask the machine's own identity for a token to write with.
        found.setdefault("bearer_token", "")
    if any(found.get(key, "").startswith("http://") for key in ("endpoint", "base_url")):
        found["allow_http"] = "true"
    return found


def _one_way_in(found: dict[str, str], root: str) -> None:
    """Of several ways into Azure, the one that Iceberg would take."""
    if "sas_token" in found:
        losing: tuple[str, ...] = ("account_name", "account_key", "token")
    elif "account_key" in found:
        found.setdefault("account_name", _host(root).partition(".")[0])
        losing = ("token",)
    else:
        losing = ()
    for name in losing:
        found.pop(name, None)


def _given(store: str, root: str, props: Mapping[str, str]) -> list[tuple[Property, str]]:
    """What is set, in the order of the table; of an account's properties only those of the root's own account."""
    found = []
    for property_ in TABLE[store]:
        names = [property_.name]
        if ACCOUNT in property_.name:
            host = _host(root)
            names = [property_.name.replace(ACCOUNT, account) for account in (host, host.partition(".")[0])]
        found += [(property_, props[name]) for name in names if props.get(name)]
    return found


def _general(name: str) -> str:
    """A name with the account taken out."""
    for prefix in ("adls.sas-token.", "adls.connection-string."):
        if name.startswith(prefix) and len(name) > len(prefix):
            return f"{prefix}{ACCOUNT}"
    return name


def _host(root: str) -> str:
    authority = normal(root).partition("://")[2].partition("/")[0]
    return authority.rpartition("@")[2]
