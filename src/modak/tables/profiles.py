"""From storage profiles to keys: settings, the profile's config and its credentials, laid over each other.

The default S3 access of the settings comes first, the profile's own config goes over it, and
`MODAK_CREDENTIALS_<REF>` over both; a blank value there takes an inherited key away. Pure: the credentials are those
that the settings hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modak.catalog.records import Profile
from modak.config import Settings
from modak.config.pairs import Malformed, Pairs
from modak.config.places import read_warehouse
from modak.core.errors import Refused, UsageError
from modak.storage.access import Key
from modak.storage.properties import unknown
from modak.storage.uri import normal

PREFIXES = ("s3.", "client.", "gcs.", "adls.", "io.")
"""What a profile's config may set: properties of Iceberg's file IO."""
_SHORT = {
    "endpoint": "s3.endpoint",
    "region": "client.region",
    "path-style": "s3.path-style-access",
}
"""Short names for what nearly every S3-compatible server needs."""


def place_of(text: str) -> str:
    """A warehouse as the catalog keeps it."""
    try:
        return read_warehouse(text)
    except Malformed as error:
        # What comes before an @ may be a secret.
        shown = "" if "@" in text else f" {text!r}"
        raise UsageError(
            "usage.warehouse",
            f"The warehouse{shown} is not a place for a lake{f': {error}' if str(error) else ''}.",
            hint="As --warehouse use a folder, s3://, gs:// or abfs://.",
        ) from None


def properties_of(given: Mapping[str, str], root: str) -> dict[str, str]:
    """A profile's config as the catalog keeps it: only properties of the root's file IO, and no secret."""
    found = Pairs({_SHORT.get(key, key): value for key, value in given.items()})
    for key in found:
        if "\0" in found[key] or not key.startswith(PREFIXES):
            raise UsageError(
                "usage.config",
                f"The config {key!r} is no property of Iceberg's file IO, or its value is no text.",
                hint=f"They begin with {', '.join(PREFIXES)}: for instance s3.endpoint.",
            )
        if found.hides(key):
            raise UsageError(
                "usage.config",
                f"The config {key!r} looks like a secret, and the catalog keeps none.",
                hint=f"Put {key}=… into MODAK_CREDENTIALS_<REF> and name the reference with --credentials.",
            )
    if (odd := unknown(root, found)) is not None:
        raise UsageError("usage.config", f"The config {odd.name!r} is no property of {root}.", hint=odd.hint)
    return dict(found)


def key_of(settings: Settings, profile: Profile) -> Key:
    """The root of a profile with what opens it."""
    root = normal(profile.warehouse or settings.lake.warehouse)
    base = {**default_access(settings, root), **profile.config}
    if profile.credentials_ref is None:
        return _key(root, base, _owner(profile, "MODAK_S3_ACCESS_KEY" if "s3.access-key-id" in base else None))
    variable = settings.credentials.variable(profile.credentials_ref)
    try:
        together = settings.credentials.merged(profile.credentials_ref, base)
    except Refused:
        return Key(root, base, missing=variable)
    return _key(root, together, _owner(profile, variable))


def _key(root: str, props: Mapping[str, str], owner: str) -> Key:
    odd = unknown(root, props)
    if odd is None:
        return Key(root, props, owner=owner)
    return Key(root, props, wrong=f"there is no property {odd.name}.", instead=odd.hint, owner=owner)


def _owner(profile: Profile, variable: str | None) -> str:
    """Where a person finds the key of a profile."""
    return f"the profile {profile.name}, from {variable or 'the own chain of the provider'}"


def keys_of(settings: Settings, profiles: Iterable[Profile]) -> dict[int, Key]:
    """The keys of all profiles, by their ids."""
    return {profile.profile_id: key_of(settings, profile) for profile in profiles}


def default_access(settings: Settings, root: str) -> dict[str, str]:
    """What `MODAK_S3_*` and `MODAK_LAKE_PROPS` say about the store of a root."""
    lake = settings.lake
    prefix = "iceberg.catalog."
    given = {key.removeprefix(prefix): value for key, value in lake.props.items() if key.startswith(prefix)}
    if not root.startswith("s3:"):
        return given
    found = {
        "s3.endpoint": lake.s3_endpoint_url,
        "s3.access-key-id": lake.s3_access_key.get_secret_value() if lake.s3_access_key else None,
        "s3.secret-access-key": lake.s3_secret_key.get_secret_value() if lake.s3_secret_key else None,
        "client.region": lake.s3_region,
        "s3.path-style-access": "true" if lake.s3_endpoint else None,
    }
    return {key: value for key, value in found.items() if value} | given
