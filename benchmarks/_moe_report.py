"""The page of the MoE benchmark, and which of issue 5's targets a run meets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _gemm_report import Found, digest, everything, head, summary, tail
from _report import Target, ratio, save

FEW = 16
PEERS = {"vllm": ("none", "fp8_block"), "triton_kernels": ("none", "mxfp4")}


def targets(found: Found, bytes_per_s: float) -> Iterator[Target]:
    """Yield what issue 5 asks of a row."""
    row = found.row
    for peer, quants in PEERS.items():
        if row["quant"] in quants:
            yield Target(f"selected / {peer}", ratio(found.selected, found.us.get(peer)), 1.0)
    if row["tokens"] <= FEW:
        copied = 1e6 * row["weight_bytes"] / bytes_per_s
        yield Target("selected / copy of the active weights' bytes", ratio(found.selected, copied), 1 / 0.7)
    if row["tokens"] == 8192 and row["quant"] == "none":
        yield Target("selected / cuBLAS, as many operations", ratio(found.selected, found.best_us("rate")), 1 / 0.75)


def page(data: dict[str, Any]) -> list[str]:
    """Return the page."""
    rows = [digest(r) for r in data["rows"]]
    text = head(data, "Mixture of experts", "moe.py")
    text += [
        "", "From router logits to the weighted sum. Bytes are those of the active experts' weights, tokens and "
        "results; experts are equally likely.",
    ]  # fmt: skip
    for model in dict.fromkeys(f.row["model"] for f in rows):
        chosen = [f for f in rows if f.row["model"] == model]
        text += ["", f"## {model}", "", *summary(chosen), "", "All times:", "", *everything(chosen)]
    return text + tail(data, [(f.row["row"], t) for f in rows for t in targets(f, data["bytes_per_s"])])


def write(data: dict[str, Any], to: Path, stem: str = "moe-h200") -> list[Path]:
    """Write the page and the data behind it."""
    return save(data, page(data), to, stem)
