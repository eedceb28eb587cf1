"""Time expert layers and their peers side by side, on the MoE rows of issue 5, in one run on the GPU at hand.

    python benchmarks/moe.py run OUT.json [--rows WORD ...] [--kernels WORD ...] [--limit SECONDS]
    python benchmarks/moe.py warm [--processes N] [--rows WORD ...]
    python benchmarks/moe.py list [--rows WORD ...]
    python benchmarks/moe.py report DATA.json [--to docs/benchmarks]

Every time is of routing and experts together. ``run`` records each registered kernel of ``moe_fused``, by override,
behind the router that is selected, and each peer, in a CUDA graph that walks over sets of tokens whose experts outgrow
the L2 cache, checks what each gave, outside the graph and in it, against the reference in float64 on the first and
last tokens, and lets the graphs take turns; medians are given. What is wrong or fails gets no time. ``warm`` compiles
our kernels and the peers' Triton ones first, in parallel processes that fill the cache on disk; each holds a model's
weights, up to 25 GB of them. Peers that are not installed are left out, which the result says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT / "src"), str(Path(__file__).parent)) if p not in sys.path]

import torch  # noqa: E402
from _moe_peers import contenders  # noqa: E402
from _moe_report import page, write  # noqa: E402
from _moe_rows import Arguments, Experts, Model, Row, check, expected, rows  # noqa: E402
from _side_by_side import Contender, arguments_of, call_once, race, release, run_rows, shares  # noqa: E402

from tskernel.library import ops  # noqa: E402

PACKAGES = ("torch", "triton", "flashinfer-python", "triton-kernels", "vllm")
MOST_PROCESSES = 4  # that hold weights at once
TRITON = ("/", "vllm", "triton_kernels")  # what the names of contenders that compile at first use hold
_last: list[Experts] = []


def experts_of(model: Model) -> Experts:
    """Return a model's weights; those of another model are given back first."""
    if not _last or _last[0].model != model:
        _last.clear()
        release()
        torch.manual_seed(0)
        _last.append(Experts(model))
    return _last[0]


def selected(experts: Experts, a: Arguments) -> str | None:
    """Return the kernel that a planned layer runs."""
    plan = experts.plan(None)
    return plan.kernel.name if plan.pinned else ops["moe_fused"].explain(**experts.call(a)).winner


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Time everything on one row."""
    experts = experts_of(row.model)
    torch.manual_seed(1)
    sets = row.sets(experts)
    want, quant = expected(experts, sets[0]), row.model.quant

    def once(contender: Contender) -> str:
        return check(contender.prepare(sets[0])(), want, quant)

    results = race(contenders(row, experts), sets, once, options, replayed=lambda got: check(got, want, quant))
    return {
        "row": row.name, "model": row.model.name, "quant": quant, "tokens": row.tokens, "sets": len(sets),
        **row.work(experts, sets), "selected": selected(experts, sets[0]), "results": results,
    }  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Time all rows."""
    print("\n".join(page(run_rows(rows(options.rows), lambda r: measure(r, options), PACKAGES, options))))


def warm(options: argparse.Namespace) -> None:
    """Compile what the rows need, in parallel processes."""
    options.processes = min(options.processes, MOST_PROCESSES)
    with shares(__file__, options) as share:
        for row in [] if share is None else rows(options.rows)[share]:
            experts = experts_of(row.model)
            compiled = {n: c for n, c in contenders(row, experts).items() if any(w in n for w in TRITON)}
            call_once(row, compiled, partial(row.make, experts))


def listing(options: argparse.Namespace) -> None:
    """Print the rows."""
    for row in rows(options.rows):
        m = row.model
        print(f"{row.name:48} {m.here} of {m.experts} experts, {m.expert_bytes / 1e6:.1f} MB each, top {m.top_k}")


def report(options: argparse.Namespace) -> None:
    """Write the page."""
    for path in write(json.loads(options.out.read_text()), options.to):
        print(path)


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line."""
    modes = {"run": run, "warm": warm, "list": listing, "report": report}
    options = arguments_of(__doc__, modes, ROOT / "docs/benchmarks", words)
    with torch.no_grad():
        options.function(options)


if __name__ == "__main__":
    main()
