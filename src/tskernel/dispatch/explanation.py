"""What a selection says of itself, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """One kernel in an explanation.

    ``status`` is "selected", "fits" (would serve if the ones above did not) or "rejected".
    """

    name: str
    solution: str
    backend: str
    priority: int
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """Which kernel serves a request and why each other one does not."""

    op: str
    platform: str
    formats: str
    traits: Mapping[str, object]
    override: tuple[str, str] | None
    winner: str | None
    candidates: tuple[Candidate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        traits = ", ".join(f"{k}={v}" for k, v in self.traits.items())
        lines = [
            f"{self.op} on {self.platform}: {self.winner or 'no kernel'}",
            f"  formats: {self.formats}",
            f"  traits: {traits or 'none'}",
        ]
        if self.override:
            lines.append(f"  override: {self.override[0]} by {self.override[1]}")
        width = max((len(c.name) for c in self.candidates), default=0)
        lines += [f"  {c.status:<8} {c.name:<{width}} p{c.priority:<2} {c.reason}".rstrip() for c in self.candidates]
        return "\n".join(lines)
