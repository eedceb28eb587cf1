"""What the pages of the benchmarks share: texts, tables, bounds and whether they are met."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Target(NamedTuple):
    """One bound on one row: ``value`` must be at most ``bound``."""

    what: str
    value: float | None
    bound: float

    @property
    def verdict(self) -> str:
        """What to print."""
        if self.value is None:
            return "not measured"
        return "met" if self.value <= self.bound else "MISSED"


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b where both are known."""
    return None if a is None or b is None else a / b


def us_text(us: float | None) -> str:
    """Return a time, or a dash."""
    return "-" if us is None else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def ratio_text(value: float | None) -> str:
    """Return a ratio, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def target_table(found: Sequence[tuple[str, Target]]) -> list[str]:
    """Return bounds by row name, missed ones first."""
    order = {"MISSED": 0, "not measured": 1, "met": 2}
    found = sorted(found, key=lambda x: order[x[1].verdict])
    counts = ", ".join(f"{sum(t.verdict == v for _, t in found)} {v}" for v in order)
    lines = [[name, t.what, ratio_text(t.value), f"<= {t.bound:.2f}", t.verdict] for name, t in found]
    return [counts + ".", "", *table(["row", "what", "measured", "target", ""], lines)]


def trouble(found: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return which results by row name could not be timed, and why; equal ones in one line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for name, r in found:
        lines.setdefault((r["name"], r.get("status", ""), r["note"].replace("|", "/")), []).append(name)
    if not lines:
        return ["Nothing."]
    cells = [
        [n, s, why, names[0] + (f" and {len(names) - 1} more" if names[1:] else "")]
        for (n, s, why), names in lines.items()
    ]
    return table(["contender", "", "why", "rows"], cells)


def save(data: dict[str, Any], page: Sequence[str], to: Path, stem: str) -> list[Path]:
    """Write a page and the data behind it, and return their paths."""
    to.mkdir(parents=True, exist_ok=True)
    text, raw = to / f"{stem}.md", to / f"{stem}.json"
    text.write_text("\n".join(page) + "\n")
    raw.write_text(json.dumps(data, indent=1) + "\n")
    return [text, raw]
