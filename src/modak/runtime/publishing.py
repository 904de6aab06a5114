"""Tables in a foreign Iceberg REST catalog (`MODAK_CATALOG_URI`): registered by metadata location after each commit.

Our commit is in our Postgres and needs nobody; the foreign catalog is told afterwards and may lag, never lead. What it
shows is always a state that was published here. A table that is there already is moved on by registering again with
`overwrite`; a catalog that does not know that word has the table taken out, without its files, and put in again.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from modak.catalog import publications
from modak.core.errors import ModakError, Refused
from modak.core.faults import reach
from modak.core.names import TableName
from modak.lake.model import LakeName
from modak.tables.site import Site

log = structlog.get_logger()

_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class ForeignCatalog:
    """The few calls of an Iceberg REST catalog that publication needs."""

    uri: str
    token: str | None = None
    warehouse: str | None = None

    def prefix(self) -> str:
        """Where the catalog wants its calls, as it says itself."""
        query = f"?{urllib.parse.urlencode({'warehouse': self.warehouse})}" if self.warehouse else ""
        _, said = self._call("GET", f"/v1/config{query}")
        given = {**said.get("defaults", {}), **said.get("overrides", {})}
        prefix = str(given.get("prefix", "")).strip("/")
        return f"/v1/{prefix}" if prefix else "/v1"

    def ensure_namespace(self, prefix: str, levels: Sequence[str]) -> None:
        """Make the namespace and those above it, where they are missing."""
        for depth in range(1, len(levels) + 1):
            body = {"namespace": list(levels[:depth]), "properties": {}}
            self._call("POST", f"{prefix}/namespaces", body, fine=(409,))

    def shows(self, prefix: str, levels: Sequence[str], table: str) -> str | None:
        """The metadata location that the catalog shows for a table, if it has it; empty: it cannot load what it has."""
        # 500 is what some catalogs say of an entry whose metadata file is gone.
        status, said = self._call("GET", f"{prefix}{_path(levels)}/tables/{_quoted(table)}", fine=(404, 500))
        return None if status == 404 else str(said.get("metadata-location", ""))

    def register(self, prefix: str, levels: Sequence[str], table: str, location: str, *, overwrite: bool) -> bool:
        """Register a table at a metadata location; False: the catalog refuses because the table is there."""
        body: dict[str, Any] = {"name": table, "metadata-location": location}
        if overwrite:
            body["overwrite"] = True
        status, _ = self._call("POST", f"{prefix}{_path(levels)}/register", body, fine=(409,))
        return status != 409

    def forget(self, prefix: str, levels: Sequence[str], table: str) -> None:
        """Take a table out of the catalog; its files stay."""
        self._call("DELETE", f"{prefix}{_path(levels)}/tables/{_quoted(table)}?purgeRequested=false", fine=(404,))

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, fine: Sequence[int] = ()
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.uri.rstrip("/") + path, data, headers, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
                raw = answer.read(_MOST_BYTES)
                return int(answer.status), json.loads(raw) if raw.strip() else {}
        except urllib.error.HTTPError as error:
            said = error.read(2_000).decode(errors="replace")
            if error.code in fine:
                return error.code, {}
            raise _refused(method, path, error.code, said) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ModakError(
                "publish.unreachable",
                f"The catalog of MODAK_CATALOG_URI cannot be reached: {reason}.",
                hint="It is tried again; the tables themselves are not affected.",
                retryable=True,
            ) from None


def foreign_catalog(site: Site) -> ForeignCatalog | None:
    """The catalog of `MODAK_CATALOG_URI`, if there is one."""
    lake = site.settings.lake
    if lake.catalog_uri is None:
        return None
    token = lake.catalog_token.get_secret_value() if lake.catalog_token else None
    return ForeignCatalog(lake.catalog_uri, token, lake.catalog_warehouse)


def publish(site: Site, name: TableName) -> str:
    """Bring the foreign catalog to the state of a table that is published here; returns its metadata location."""
    foreign = foreign_catalog(site)
    if foreign is None:
        raise Refused("publish.no_catalog", "MODAK_CATALOG_URI is not set.")
    with publications.turn(site.dsn, site.reader.state(name).table.lake) as conn:
        state = site.reader.state(name)
        location = state.cutline.metadata_location
        publications.intend(conn, state.table.table_id, foreign.uri)
        _show(foreign, state.table.lake, location)
        publications.note_published(conn, state.table.table_id, foreign.uri, location)
    log.info("publish.done", table=str(name), metadata=location)
    return location


def _show(foreign: ForeignCatalog, lake: LakeName, location: str) -> None:
    levels, table = lake.namespace, lake.name
    prefix = foreign.prefix()
    reach("publish.before_register")
    shown = foreign.shows(prefix, levels, table)
    if shown is None:
        foreign.ensure_namespace(prefix, levels)
        shown = location if foreign.register(prefix, levels, table, location, overwrite=False) else ""
    if shown != location and not foreign.register(prefix, levels, table, location, overwrite=True):
        foreign.forget(prefix, levels, table)
        reach("publish.forgotten")
        if not foreign.register(prefix, levels, table, location, overwrite=False):
            raise ModakError("publish.taken", f"Somebody else has put {lake} into the catalog.", retryable=True)
    reach("publish.after_register")


def _path(levels: Sequence[str]) -> str:
    return "/namespaces/" + _quoted("\x1f".join(levels))


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def _refused(method: str, path: str, status: int, said: str) -> ModakError:
    try:
        error = json.loads(said).get("error", {})
        detail = str(error.get("message") if isinstance(error, Mapping) else error)
    except ValueError:
        detail = said[:200]
    hint = "Check MODAK_CATALOG_TOKEN." if status in (401, 403) else "It is tried again with the next round."
    return ModakError(
        "publish.refused",
        f"The catalog of MODAK_CATALOG_URI answers {status} to {method} {path.partition('?')[0]}: {detail}",
        hint=hint,
        retryable=status >= 500 or status == 429,
    )
