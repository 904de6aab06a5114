"""What the endpoints of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from modak.catalog.records import TableRecord
from modak.core.errors import Refused, UsageError
from modak.core.names import TableName
from modak.runtime.metrics import Fleet
from modak.runtime.pulse import Pulse
from modak.runtime.series import Series
from modak.runtime.web.auth import Guard
from modak.runtime.web.queries import Queries
from modak.tables.site import Site

API = "/api/v1"


@dataclass
class Context:
    """The site and everything that looks at it."""

    site: Site
    pulse: Pulse
    guard: Guard = field(init=False)
    fleet: Fleet = field(init=False)
    series: Series = field(init=False)
    queries: Queries = field(init=False)

    def __post_init__(self) -> None:
        settings = self.site.settings.http
        self.guard = Guard.of(settings)
        self.fleet = Fleet(self.site.dsn, self.pulse, self.site.clock)
        self.series = Series(self.site.dsn, self.pulse, self.site.clock)
        self.queries = Queries(self.site, settings.query_timeout_seconds, settings.query_max_rows)

    def table(self, text: str) -> TableRecord:
        """The registered table of a path: its number, or its name."""
        if text.isascii() and text.isdigit():
            number = int(text)
            found = next((each for each in self.site.reader.tables() if each.table_id == number), None)
        else:
            if "\0" in text:
                raise UsageError("usage.table_name", "A table name has no NUL character in it.")
            found = self.site.reader.table(TableName.parse(text))
        if found is None:
            raise Refused(
                "catalog.not_registered", f"{text} is not registered.", hint="GET /api/v1/tables lists what is."
            )
        return found
