"""Credentials of the lake's roots for Iceberg's own file IO, inside the JVM.

One file IO serves every root: Iceberg picks the credentials by the longest prefix of a path. Its file IO for Azure
knows no credentials by prefix, only properties: some are named after an account, a key or token holds for all. Both are
handed over as objects of the JVM, so they stand in no Spark setting, on no page of its UI and on no command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modak.core.errors import Refused
from modak.storage.access import Key, unusable
from modak.storage.properties import for_java, store_of
from modak.storage.uri import local_path

FILE_IO = "org.apache.iceberg.io.ResolvingFileIO"
_S3 = {
    # Throttling and failing servers are waited out, with growing and random pauses.
    "s3.retry.num-retries": "8",
    "s3.retry.min-wait-ms": "100",
    "s3.retry.max-wait-ms": "10000",
}
_FOR_ALL_ACCOUNTS = ("adls.auth.shared-key.account.name", "adls.auth.shared-key.account.key", "adls.token")


def needed_schemes(keys: Iterable[Key]) -> frozenset[str]:
    """The kinds of store that the roots lie on; a local folder is none."""
    return frozenset(key.root.partition(":")[0] for key in keys if local_path(key.root) is None)


def unlock(jvm: Any, file_io: Any, keys: Iterable[Key]) -> None:
    """Give a resolving file IO what opens the roots; it replaces what it had."""
    usable = [key for key in keys if local_path(key.root) is None and unusable(key) is None]
    if azure := azure_props(usable):
        together = jvm.java.util.HashMap(file_io.properties())
        together.putAll(_map(jvm, azure))
        file_io.initialize(together)
    file_io.setCredentials(_credentials(jvm, usable))


def azure_props(keys: Iterable[Key]) -> dict[str, str]:
    """The properties of all Azure roots together; two that only one account can have are refused."""
    found: dict[str, str] = {}
    ways: dict[tuple[str | None, ...], Key] = {}
    for key in keys:
        if store_of(key.root) != "abfs":
            continue
        props = java_props(key)
        way = tuple(props.pop(name, None) for name in _FOR_ALL_ACCOUNTS)
        if not any(name.startswith("adls.sas-token.") for name in props):
            ways.setdefault(way, key)
            props |= {name: value for name, value in zip(_FOR_ALL_ACCOUNTS, way, strict=True) if value is not None}
        found |= props
    if len(ways) > 1:
        one, other = list(ways.values())[:2]
        raise Refused(
            "config.azure_accounts",
            f"{one.root} and {other.root} have different keys, and Iceberg takes one for all accounts of Azure.",
            hint="Give all accounts but one a signature: adls.sas-token.<account>.",
        )
    return found


def _credentials(jvm: Any, keys: Iterable[Key]) -> Any:
    made = jvm.java.util.ArrayList()
    for key in keys:
        if store_of(key.root) != "abfs":
            made.add(jvm.org.apache.iceberg.io.StorageCredential.create(f"{key.root}/", _map(jvm, java_props(key))))
    return made


def java_props(key: Key) -> dict[str, str]:
    """The properties of a root as Iceberg's file IO wants them."""
    props = for_java(key.root, key.props)
    return {**_S3, **props} if key.root.startswith("s3:") else props


def grant(jvm: Any, jdbc_catalog: Any, keys: Iterable[Key]) -> None:
    """Give a JDBC catalog that Spark has made the credentials; they replace those it had."""
    catalog_class = jdbc_catalog.getClass()
    while catalog_class.getSimpleName() != "JdbcCatalog":
        catalog_class = catalog_class.getSuperclass()
    field = catalog_class.getDeclaredField("io")
    field.setAccessible(True)
    unlock(jvm, field.get(jdbc_catalog), keys)


def _map(jvm: Any, values: Mapping[str, str]) -> Any:
    made = jvm.java.util.HashMap()
    for name, value in values.items():
        made.put(name, value)
    return made
