"""How a model says which variable a field is read from: `setting("MODAK_…", default, "help")`.

The variable's name is the field's validation alias, so a model validates a part of the environment as it is, and an
error already names the variable. Everything that documents a setting is read off the same field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from modak.config.kinds import Kind


class Concern(BaseModel):
    """The settings of one concern. Frozen; unknown fields are refused; errors never repeat a value."""

    # Building a validator costs more than reading a default, so it is put off until a value has to be validated.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        hide_input_in_errors=True,
        defer_build=True,
    )


def setting(
    variable: str,
    default: object,
    help: str,  # noqa: A002
    *,
    factory: Callable[..., object] | None = None,
    shown: str | None = None,
    secret: bool = False,
) -> Any:
    """A field read from `variable`; `shown` is the default for people where the value itself would not tell."""
    extra: Any = {"shown": shown, "secret": secret}
    if factory is not None:
        return Field(default_factory=factory, validation_alias=variable, description=help, json_schema_extra=extra)
    return Field(default, validation_alias=variable, description=help, json_schema_extra=extra)


@dataclass(frozen=True)
class Declared:
    """One variable as its model declares it."""

    variable: str
    field: str
    kind: Kind
    default: str
    help: str
    secret: bool


def declared(model: type[Concern]) -> list[Declared]:
    """The variables of a model in the order of its fields."""
    return [_declared(name, info) for name, info in model.model_fields.items() if info.validation_alias]


def _declared(name: str, info: FieldInfo) -> Declared:
    extra = cast("dict[str, Any]", info.json_schema_extra)
    kind = next(part for part in info.metadata if isinstance(part, Kind))
    default = extra["shown"] or ("unset" if info.default is None else kind.show(info.default))
    return Declared(cast("str", info.validation_alias), name, kind, default, info.description or "", extra["secret"])
