"""Settings that are well formed one by one and make no sense together."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import SecretStr

from modak.config.settings import Settings

Contradiction = tuple[tuple[str, ...], str]
"""The variables involved, and the sentence for people."""


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """What cannot be meant, whatever each variable alone says."""
    yield from _lake(settings)
    yield from _leader_and_http(settings)
    yield from _stores(settings)


def _lake(settings: Settings) -> Iterator[Contradiction]:
    lake = settings.lake
    if (lake.s3_access_key is None) != (lake.s3_secret_key is None):
        keys = ("MODAK_S3_ACCESS_KEY", "MODAK_S3_SECRET_KEY")
        yield keys, f"{keys[0]} and {keys[1]} belong together: set both or neither"
    if lake.s3_ssl and (lake.s3_endpoint or "").startswith("http://"):
        yield (
            ("MODAK_S3_SSL", "MODAK_S3_ENDPOINT"),
            "MODAK_S3_SSL asks for TLS but MODAK_S3_ENDPOINT begins with http://: change one of them",
        )
    if lake.catalog_uri is None:
        for variable, value in (
            ("MODAK_CATALOG_WAREHOUSE", lake.catalog_warehouse),
            ("MODAK_CATALOG_TOKEN", lake.catalog_token),
        ):
            if value is not None:
                yield (
                    (variable, "MODAK_CATALOG_URI"),
                    f"{variable} has no effect without MODAK_CATALOG_URI: set that too, or neither",
                )


def _leader_and_http(settings: Settings) -> Iterator[Contradiction]:
    leader, http = settings.leader, settings.http
    if leader.lease_seconds <= leader.campaign_interval_seconds:
        yield (
            ("MODAK_LEASE_SECONDS", "MODAK_CAMPAIGN_INTERVAL_SECONDS"),
            "MODAK_LEASE_SECONDS must exceed MODAK_CAMPAIGN_INTERVAL_SECONDS, or the lease lapses between two tries",
        )
    if not http.loopback and http.api_token is None:
        yield (
            ("MODAK_HTTP_HOST", "MODAK_API_TOKEN"),
            f"MODAK_HTTP_HOST={http.host!r} lets other machines in: set MODAK_API_TOKEN, or listen on 127.0.0.1",
        )
    if http.api_token is not None and _same(http.api_token, http.api_read_token):
        yield (
            ("MODAK_API_TOKEN", "MODAK_API_READ_TOKEN"),
            "MODAK_API_READ_TOKEN equals MODAK_API_TOKEN, so who may read could also change: use two tokens",
        )
    if http.query_pg_user is None and http.query_pg_password.get_secret_value():
        yield _missing("MODAK_QUERY_PG_PASSWORD", "MODAK_QUERY_PG_USER")


def _stores(settings: Settings) -> Iterator[Contradiction]:
    measurements, entities = settings.measurements, settings.entities
    if measurements.enabled and measurements.root is None:
        yield _missing("MODAK_MEASUREMENTS_ENABLED", "MODAK_MEASUREMENTS_ROOT")
    if entities.enabled and entities.registry is None:
        yield _missing("MODAK_ENTITIES_ENABLED", "MODAK_ENTITIES_REGISTRY")
    if entities.pg_host is not None and entities.pg_db is None:
        yield _missing("MODAK_ENTITIES_PG_HOST", "MODAK_ENTITIES_PG_DB")
    if entities.max_backoff_ms < entities.base_backoff_ms:
        yield (
            ("MODAK_ENTITIES_MAX_BACKOFF_MS", "MODAK_ENTITIES_BASE_BACKOFF_MS"),
            "MODAK_ENTITIES_MAX_BACKOFF_MS must not be below MODAK_ENTITIES_BASE_BACKOFF_MS",
        )


def _missing(variable: str, needed: str) -> Contradiction:
    return (variable, needed), f"{variable} needs {needed}: set that too"


def _same(one: SecretStr, other: SecretStr | None) -> bool:
    return other is not None and one.get_secret_value() == other.get_secret_value()
