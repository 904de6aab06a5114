"""From the environment to `Settings`: every `MODAK_*` variable is known, well formed and coherent, or it is refused.

All problems are gathered and reported together, because a list of ten mistakes is one edit and ten restarts are not.
Values that may hold a secret are never repeated, in a message or in an exception that a message is chained to.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from modak.config.contradictions import contradictions
from modak.config.families import read_credentials, read_spark_conf
from modak.config.fields import Concern, Declared, declared
from modak.config.models import CREDENTIALS_PREFIX, SPARK_CONF_PREFIX
from modak.config.pairs import Malformed
from modak.config.places import POSTGRES_URL, local_uri, split_postgres_url
from modak.config.settings import Settings, concerns
from modak.core.errors import UsageError

PREFIX = "MODAK_"
FAMILIES = (CREDENTIALS_PREFIX, SPARK_CONF_PREFIX)
_SHOWN_CHARACTERS = 60
_Model = TypeVar("_Model", bound=Concern)


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check every setting; all problems are raised as one `UsageError`."""
    return read(environ)[0]


def read(environ: Mapping[str, str] | None = None) -> tuple[Settings, frozenset[str]]:
    """The settings, and the variables that were given (a blank one counts as unset)."""
    source = os.environ if environ is None else environ
    given = {name: value for name, value in source.items() if name.startswith(PREFIX) and value != ""}
    problems = _unknown(given)
    wrong: dict[str, str] = {}
    _split_credentials(given, wrong)
    models: dict[str, Any] = {name: _model(model, given, wrong) for name, model in concerns().items()}
    problems.extend(wrong.values())
    models["spark"] = models["spark"].model_copy(update={"conf": read_spark_conf(given, problems)})
    models["credentials"] = models["credentials"].model_copy(update={"refs": read_credentials(given, problems)})
    settings = _follow_home(Settings(**models), given)
    # A malformed variable was replaced by its default, so what it is involved in says nothing yet.
    problems.extend(text for about, text in contradictions(settings) if wrong.keys().isdisjoint(about))
    if problems:
        raise _refusal(problems)
    return settings, frozenset(given)


def _unknown(given: Mapping[str, str]) -> list[str]:
    known = [item.variable for model in concerns().values() for item in declared(model)]
    shapes = {name.removeprefix(PREFIX): name for name in (*known, *(family + "…" for family in FAMILIES))}
    problems: list[str] = []
    for name in sorted(set(given).difference(known)):
        if not name.startswith(FAMILIES):
            close = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), shapes, n=1)
            problems.append(f"{name} is not a setting" + (f": did you mean {shapes[close[0]]}?" if close else ""))
    return problems


def _split_credentials(given: dict[str, str], wrong: dict[str, str]) -> None:
    """Move user and password out of the Postgres URL into their own variables; those in the URL win."""
    text = given.pop("MODAK_PG_URL", None)
    if text is None:
        return
    try:
        url = split_postgres_url(text)
    except Malformed as error:
        wrong["MODAK_PG_URL"] = _sentence("MODAK_PG_URL (value not shown)", POSTGRES_URL.expects, error)
        return
    found = {"MODAK_PG_URL": url.address, "MODAK_PG_USER": url.user, "MODAK_PG_PASSWORD": url.password}
    given.update({name: value for name, value in found.items() if value is not None})


def _model(model: type[_Model], given: Mapping[str, str], wrong: dict[str, str]) -> _Model:
    known = {item.variable: item for item in declared(model)}
    values = {name: given[name] for name in known if name in given}
    if not values:
        # Defaults are right by test; building a validator for them would be most of the cost of a short command.
        return model.model_construct()
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = {str(each["loc"][0]): each for each in error.errors(include_url=False, include_input=False)}
        for variable in found.keys() & values.keys():
            reason = found[variable].get("ctx", {}).get("error")
            wrong[variable] = _malformed(known[variable], values[variable], reason)
    return model.model_validate({name: value for name, value in values.items() if name not in wrong})


def _malformed(item: Declared, value: str, reason: object) -> str:
    if item.secret or item.kind.confidential:
        return _sentence(f"{item.variable} (value not shown)", item.kind.expects, reason)
    text = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…"
    return _sentence(f"{item.variable}={text!r}", item.kind.expects, reason)


def _sentence(subject: str, expects: str, reason: object) -> str:
    detail = f" ({reason})" if isinstance(reason, Malformed) and str(reason) else ""
    return f"{subject}: expected {expects}{detail}"


def _follow_home(settings: Settings, given: Mapping[str, str]) -> Settings:
    """Places that default to a folder under `MODAK_HOME` follow it."""
    home = settings.home.path
    lake, measurements = settings.lake, settings.measurements
    if "MODAK_WAREHOUSE" not in given:
        lake = lake.model_copy(update={"warehouse": local_uri(home / "warehouse")})
    if "MODAK_MEASUREMENTS_TEMP_DIRECTORY" not in given:
        measurements = measurements.model_copy(update={"temp_directory": home / "compaction"})
    return replace(settings, lake=lake, measurements=measurements)


def _refusal(problems: list[str]) -> UsageError:
    if len(problems) == 1:
        message = problems[0] + ("" if problems[0].endswith("?") else ".")
    else:
        message = f"{len(problems)} settings are wrong:\n" + "\n".join(f"  - {problem}" for problem in problems)
    return UsageError("config.invalid", message, hint="docs/configuration.md lists every setting.")
