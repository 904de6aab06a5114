"""The form every benchmark shares: a table for people, then one JSON object as the very last line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Line:
    """One contestant in one condition."""

    who: str
    rows_per_second: float
    per_cpu_second: float | None = None
    peak_rss_mb: float | None = None


@dataclass
class Report:
    """What a benchmark found; rates are rows per second."""

    bench: str
    ours: float
    rivals: dict[str, float]
    limit: float
    peak_rss_mb: float
    per_cpu_second: float
    lines: list[Line] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    """Those of further cases, beside the ones of `ours` to its rivals and the limit."""
    more: dict[str, object] = field(default_factory=dict)

    def publish(self) -> None:
        """Print the table and the JSON line, and keep the JSON."""
        table = Table(title=f"{self.bench}: rows per second")
        for column in ("who", "rows/s", "rows per CPU-second", "peak RSS MB"):
            table.add_column(column, justify="left" if column == "who" else "right")
        for line in self.lines:
            table.add_row(
                line.who, *(_number(v) for v in (line.rows_per_second, line.per_cpu_second, line.peak_rss_mb))
            )
        ratios = {f"vs_{name}": round(self.ours / rate, 3) for name, rate in self.rivals.items() if rate}
        ratios |= {name: round(ratio, 3) for name, ratio in self.ratios.items()}
        console = Console()
        console.print(table)
        for name, ratio in ratios.items():
            console.print(f"ours is {ratio:.2f} times {name.removeprefix('vs_')}", highlight=False)
        if self.limit:
            ratios["vs_limit"] = round(self.ours / self.limit, 3)
            console.print(f"ours is {ratios['vs_limit']:.0%} of the limit", highlight=False)
        result = {
            "bench": self.bench,
            "ours": round(self.ours),
            "rivals": {name: round(rate) for name, rate in self.rivals.items()},
            "limit": round(self.limit),
            "ratios": ratios,
            "peak_rss_mb": round(self.peak_rss_mb),
            "per_cpu_second": round(self.per_cpu_second),
            **self.more,
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.bench}.json").write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result), flush=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
