"""The page of the small-op benchmark: every row beside the best peer and a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _report import save

OURS = "/"  # what only the names of our kernels hold


class Line(NamedTuple):
    """One row: the kernel that is selected, the best peer, and the copy; None where it was not timed."""

    row: str
    kernel: str
    us: float | None
    peer: str
    peer_us: float | None
    copy_us: float

    @property
    def ratio(self) -> float | None:
        """Ours over the best peer."""
        return self.us / self.peer_us if self.us is not None and self.peer_us is not None else None


def lines(data: dict[str, Any]) -> Iterator[Line]:
    """Yield what the table shows."""
    for row in data["rows"]:
        timed = {r["name"]: r["us"] for r in row["results"] if "us" in r}
        peers = {n: us for n, us in timed.items() if OURS not in n and n != "copy"}
        peer = min(peers, key=lambda n: peers[n], default="-")
        yield Line(row["row"], row["selected"], timed.get(row["selected"]), peer, peers.get(peer), timed["copy"])


def _text(us: float | None) -> str:
    return "-" if us is None else f"{us:.2f}"


def table(data: dict[str, Any]) -> list[str]:
    """Return the rows as lines of markdown, and how many are no slower than the best peer."""
    found = list(lines(data))
    compared = [x.ratio for x in found if x.ratio is not None]
    text = [
        "| row | selected | us | best peer | us | ours / peer | copy / ours |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for x in found:
        share = "-" if x.us is None else f"{x.copy_us / x.us:.2f}"
        cells = [x.row, x.kernel, _text(x.us), x.peer, _text(x.peer_us), _text(x.ratio), share]
        text.append(f"| {' | '.join(cells)} |")
    return [*text, "", f"{sum(r <= 1.0 for r in compared)} of {len(compared)} rows at or below the best peer."]


def write(data: dict[str, Any], to: Path, stem: str = "small-ops-h200") -> list[Path]:
    """Write the page and the data behind it."""
    head = [
        "# Small ops beside their peers",
        "",
        f"{data['device']}; a copy of 2 GB reaches {data['bytes_per_s'] / 1e12:.2f} TB/s. "
        f"Packages: {', '.join(f'{n} {v}' for n, v in data['packages'].items())}.",
        "Microseconds per call in a CUDA graph, medians of replays in turn (`benchmarks/small_ops.py`).",
        "",
    ]
    failed = [f"- {r['row']}, {x['name']}: {x['note']}" for r in data["rows"] for x in r["results"] if x["note"]]
    missing = [f"- {x}" for x in data["left_out"]]
    parts = [*head, *table(data), *(["", "## Not timed", "", *failed, *missing] if failed or missing else [])]
    return save(data, parts, to, stem)
