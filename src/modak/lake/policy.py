"""What a maintenance policy is made of, whatever the lake's format: keys with a kind, a default and bounds.

The format plugin says which keys there are (`lake/iceberg/policy.py`); nothing outside of it knows their meaning but
the passes that read them. Standard library only, so that `modak-worker policy` starts in a blink.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from modak.core.errors import UsageError

Kind = Literal["flag", "number", "columns"]
Value = bool | int | str

_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """One setting of a policy."""

    name: str
    kind: Kind
    default: Value | None
    """None: the worker's setting `setting` decides."""
    meaning: str
    least: int = 0
    most: int = 1_000_000_000
    """No number that makes sense is larger, and a larger one would overflow somewhere."""
    setting: str | None = None
    """The name of the fleet-wide setting in the concern `maintenance`."""

    def parse(self, text: str) -> Value:
        """A value as typed; refuses another kind and what makes no sense."""
        match self.kind:
            case "flag":
                if text.lower() not in ("true", "false"):
                    raise UsageError("usage.set", f"{self.name} takes true or false, not {text!r}.")
                return text.lower() == "true"
            case "number":
                if not _NUMBER.fullmatch(text):
                    raise UsageError("usage.set", f"{self.name} takes a whole number, not {text!r}.")
                return self._checked(int(text))
            case "columns":
                return ",".join(part for part in (name.strip() for name in text.split(",")) if part)

    def check(self, value: object) -> Value:
        """A value as it stands in the catalog, which anybody may have written."""
        if self.kind == "flag" and isinstance(value, bool):
            return value
        if self.kind == "number" and type(value) is int and self.least <= value <= self.most:
            return value
        if self.kind == "columns" and isinstance(value, str):
            return value
        raise UsageError(
            "policy.value",
            f"{self.name} cannot be {value!r}.",
            hint=f"Mend it with: modak-worker policy --table … --unset {self.name}",
        )

    def _checked(self, value: int) -> int:
        if value < self.least:
            raise UsageError("usage.set", f"{self.name} must be at least {self.least}, not {value}.")
        if value > self.most:
            raise UsageError("usage.set", f"{self.name} must be at most {self.most}, not {value}.")
        return value


def key_of(keys: Mapping[str, PolicyKey], name: str) -> PolicyKey:
    """The key of a name; an unknown one is refused with the nearest that there is."""
    if name not in keys:
        near = difflib.get_close_matches(name, keys, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(keys)}."
        raise UsageError("usage.set", f"There is no policy key {name!r}.", hint=hint)
    return keys[name]


def keys_of(lake_format: str) -> Mapping[str, PolicyKey]:
    """The keys that a format's plugin understands."""
    if lake_format != "iceberg":
        raise UsageError("policy.format", f"There is no lake format {lake_format!r}.", hint="Known: iceberg.")
    from modak.lake.iceberg.policy import KEYS

    return KEYS


@dataclass(frozen=True, slots=True)
class Together:
    """Two keys whose values make sense alone and perhaps not together."""

    one: str
    other: str
    clash: Callable[[Any, Any], bool]
    says: str


_TOGETHER = (
    Together(
        "snapshot_max_count",
        "snapshot_min_retained",
        operator.lt,
        "snapshot_max_count ({}) cannot be below snapshot_min_retained ({}).",
    ),
    Together(
        "rewrite_sort_columns",
        "rewrite_zorder_columns",
        lambda one, other: bool(one and other),
        "A table is either sorted (by {}) or z-ordered (by {}).",
    ),
    Together(
        "rewrite_max_input_files",
        "rewrite_min_input_files",
        operator.lt,
        "rewrite_max_input_files ({}) cannot be below rewrite_min_input_files ({}).",
    ),
)


def check_together(policy: Mapping[str, Any], own: Collection[str], changed: Collection[str]) -> None:
    """Refuse values that make no sense together, of which a change has made one and the table itself has one."""
    for each in _TOGETHER:
        keys = (each.one, each.other)
        values = [policy[key] for key in keys]
        if not each.clash(*values) or not set(keys) & set(changed) or not set(keys) & set(own):
            # Defaults that do not go together are the fleet's, and no reason to refuse a table anything.
            continue
        defaults = [key for key in keys if key not in own]
        hint = "Set both in one command, or unset one."
        if defaults:
            hint = f"{defaults[0]} is not the table's own but the default: set both in one command."
        raise UsageError("usage.set", each.says.format(*values), hint=hint)
