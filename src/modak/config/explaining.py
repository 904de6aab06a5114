"""Every setting for people: what is in force and where it comes from, and the reference page in `docs/`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import SecretStr

from modak.config.families import spark_conf_name
from modak.config.fields import Concern, Declared, declared
from modak.config.models import CREDENTIALS_PREFIX, SPARK_CONF_PREFIX
from modak.config.pairs import MASK
from modak.config.read import read
from modak.config.settings import Settings, concerns

_CREDENTIALS_HELP = "Credentials that storage profiles refer to by name."
_SPARK_CONF_HELP = "A Spark setting."
_TITLES = {
    "home": "Home",
    "postgres": "Postgres",
    "lake": "Lake",
    "credentials": "Credentials of storage profiles",
    "tiering": "Tiering",
    "corrections": "Corrections",
    "mirror": "Mirroring",
    "leader": "Leadership",
    "maintenance": "Lake maintenance",
    "http": "HTTP and console",
    "load": "Stream Load",
    "spark": "Spark",
    "log": "Logs",
    "measurements": "Measurement stores",
    "entities": "Entity stores",
}
_INTRODUCTION = """\
# Configuration

Modak is configured by environment variables. All of them have defaults that work on one machine: with nothing set,
Modak starts its own Postgres and keeps the lake in a local folder.

- A blank variable counts as unset.
- A variable that begins with `MODAK_` and is not listed here is refused, with the name that was probably meant. So is a
  malformed value. All mistakes are reported at once, and the command ends with exit code 2 before anything is done.
- Sizes are written `256MiB` or `1GiB` (1024s), `128MB` (1000s), or as a number of bytes.
- `~` stands for the home folder. A local lake is known as `file:///absolute/path`.
- Passwords, keys and tokens are never shown, in logs, errors or listings.

This page is generated: `python -m modak.config docs/configuration.md`.
"""
_CREDENTIALS_TEXT = """\
`MODAK_CREDENTIALS_<REF>` holds `key=value` pairs with `;` between. They are laid over the config of a storage profile
that refers to them; a blank value removes a key that the profile has. The reference is written in capitals, with `_`
for every other character: a profile that names `prod-s3` reads `MODAK_CREDENTIALS_PROD_S3`. A `;` inside a value is
written `\\;`, and `\\` is written `\\\\`.

    MODAK_CREDENTIALS_PROD_S3='s3.access-key-id=AKIA…;s3.secret-access-key=…;s3.session-token='
"""
_SPARK_TEXT = """\
`MODAK_SPARK_CONF_<NAME>` sets any Spark setting. In the name `_` stands for a dot and `__` for an underscore. A name
wholly in capitals is lowered; one with small letters keeps its case, for settings such as
`spark.driver.extraJavaOptions`. A name that contains a dot is taken as it stands, for platforms that allow it and for
settings with a hyphen.

    MODAK_SPARK_CONF_SPARK_EXECUTOR_MEMORY=4g
    MODAK_SPARK_CONF_spark_driver_extraJavaOptions=-XX:+UseZGC
    env 'MODAK_SPARK_CONF_spark.sql.catalog.other.cache-enabled=false' modak-worker run
"""
_EXTRA = {"credentials": _CREDENTIALS_TEXT, "spark": _SPARK_TEXT}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as a person may see it."""

    name: str
    value_for_display: str
    source: Literal["environment", "default"]
    secret: bool
    help: str
    concern: str


def explain(environ: Mapping[str, str] | None = None) -> list[Setting]:
    """Every setting in force, masked for display; a wrong environment is refused as by `load`."""
    settings, given = read(environ)
    listed: list[Setting] = []
    for concern, model in concerns().items():
        part = getattr(settings, concern)
        listed.extend(_setting(concern, part, item, given) for item in declared(model))
        listed.extend(_family(concern, settings, given))
    return listed


def _setting(concern: str, part: Concern, item: Declared, given: frozenset[str]) -> Setting:
    value = getattr(part, item.field)
    given_here = item.variable in given
    return Setting(
        item.variable,
        _shown(value, item),
        "environment" if given_here else "default",
        item.secret,
        item.help,
        concern,
    )


def _shown(value: Any, item: Declared) -> str:
    if value is None:
        return item.default if item.default.startswith("unset") else "unset"
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else "empty"
    return item.kind.show(value) or (item.default if item.default.startswith("empty") else "empty")


def _family(concern: str, settings: Settings, given: frozenset[str]) -> list[Setting]:
    found: list[Setting] = []
    if concern == "credentials":
        for ref, pairs in settings.credentials.refs.items():
            found.append(
                Setting(CREDENTIALS_PREFIX + ref, pairs.shown(), "environment", True, _CREDENTIALS_HELP, concern)
            )
    if concern == "spark":
        for variable in sorted(name for name in given if name.startswith(SPARK_CONF_PREFIX)):
            name = spark_conf_name(variable)
            secret = settings.spark.conf.hides(name)
            value = MASK if secret else settings.spark.conf[name]
            found.append(Setting(variable, value, "environment", secret, _SPARK_CONF_HELP, concern))
    return found


def document() -> str:
    """The reference page of all settings, in Markdown."""
    parts = [_INTRODUCTION]
    for concern, model in concerns().items():
        parts.append(f"## {_TITLES[concern]}\n")
        parts.append(inspect.cleandoc(model.__doc__ or "") + "\n")
        rows = [
            f"| `{item.variable}` | {_cell(item.default)} | {_expects(item)} | {item.help.replace('|', '&#124;')} |"
            for item in declared(model)
        ]
        if rows:
            parts.append("\n".join(["| variable | default | value | meaning |", "|---|---|---|---|", *rows]) + "\n")
        if concern in _EXTRA:
            parts.append(_EXTRA[concern])
    return "\n".join(parts)


def _cell(default: str) -> str:
    if default.partition(" (")[0] in ("unset", "empty", "the tiering lag"):
        return default
    return f"`{default}`"


def _expects(item: Declared) -> str:
    return "secret" if item.secret else item.kind.expects.replace("|", "&#124;").replace("*", r"\*")
