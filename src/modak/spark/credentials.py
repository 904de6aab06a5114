"""Credentials of the lake's roots for Iceberg's own file IO, inside the JVM.

One file IO serves every root: Iceberg picks the credentials by the longest prefix of a path. They are handed over as
objects of the JVM, so they stand in no Spark setting, on no page of its UI and on no command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modak.storage.access import Key, unusable
from modak.storage.properties import for_java
from modak.storage.uri import local_path

FILE_IO = "org.apache.iceberg.io.ResolvingFileIO"
_S3 = {
    # Throttling and failing servers are waited out, with growing and random pauses.
    "s3.retry.num-retries": "8",
    "s3.retry.min-wait-ms": "100",
    "s3.retry.max-wait-ms": "10000",
}


def needed_schemes(keys: Iterable[Key]) -> frozenset[str]:
    """The kinds of store that the roots lie on; a local folder is none."""
    return frozenset(key.root.partition(":")[0] for key in keys if local_path(key.root) is None)


def java_credentials(jvm: Any, keys: Iterable[Key]) -> Any:
    """The keys as Iceberg's list of storage credentials."""
    made = jvm.java.util.ArrayList()
    for key in keys:
        if local_path(key.root) is None and unusable(key) is None:
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
    field.get(jdbc_catalog).setCredentials(java_credentials(jvm, keys))


def _map(jvm: Any, values: Mapping[str, str]) -> Any:
    made = jvm.java.util.HashMap()
    for name, value in values.items():
        made.put(name, value)
    return made
