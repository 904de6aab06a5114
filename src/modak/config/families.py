"""Settings whose names are open-ended: `MODAK_CREDENTIALS_<REF>` and `MODAK_SPARK_CONF_<NAME>`.

The name of a Spark setting is spelled in letters, digits and underscores, because shells allow nothing else:
`_` stands for a dot and `__` for an underscore, and a name wholly in capitals is lowered. A name that contains a dot,
which container platforms allow, is taken as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from modak.config.models import CREDENTIALS_PREFIX, SPARK_CONF_PREFIX
from modak.config.pairs import Malformed, Pairs, SecretPairs, read_pairs

_REF = re.compile(r"[A-Z0-9_]+", re.ASCII)
_CONF = re.compile(r"spark\.[A-Za-z0-9_.-]+", re.ASCII)


def spark_conf_name(variable: str) -> str:
    """The Spark setting that a variable stands for: `…_SPARK_EXECUTOR_MEMORY` → `spark.executor.memory`."""
    rest = variable.removeprefix(SPARK_CONF_PREFIX)
    if "." in rest:
        return rest
    name = rest.replace("__", "\0").replace("_", ".").replace("\0", "_")
    return name if re.search(r"[a-z]", rest) else name.lower()


def read_spark_conf(given: Mapping[str, str], problems: list[str]) -> Pairs:
    """Collect the Spark settings; each wrong variable becomes a problem."""
    conf: dict[str, str] = {}
    origin: dict[str, str] = {}
    for variable in sorted(name for name in given if name.startswith(SPARK_CONF_PREFIX)):
        name = spark_conf_name(variable)
        if not _CONF.fullmatch(name):
            problems.append(
                f"{variable} stands for the Spark setting {name!r}: expected one that begins with spark., "
                f"for instance {SPARK_CONF_PREFIX}SPARK_EXECUTOR_MEMORY"
            )
        elif name in origin:
            problems.append(f"{variable} and {origin[name]} both stand for {name}: expected one of them")
        else:
            origin[name] = variable
            conf[name] = given[variable]
    return Pairs(conf)


def read_credentials(given: Mapping[str, str], problems: list[str]) -> dict[str, SecretPairs]:
    """Collect the credentials by reference; each wrong variable becomes a problem that does not show its value."""
    refs: dict[str, SecretPairs] = {}
    for variable in sorted(name for name in given if name.startswith(CREDENTIALS_PREFIX)):
        ref = variable.removeprefix(CREDENTIALS_PREFIX)
        if not _REF.fullmatch(ref):
            problems.append(f"{variable}: expected a reference in capitals, digits and _ after {CREDENTIALS_PREFIX}")
            continue
        try:
            refs[ref] = SecretPairs(read_pairs(given[variable]))
        except Malformed as wrong:
            problems.append(f"{variable} (value not shown): expected key=value;… ({wrong})")
    return refs
