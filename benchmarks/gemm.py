"""Time matrix products and their peers side by side, on the GEMM rows of issue 5, in one run on the GPU at hand.

    python benchmarks/gemm.py run OUT.json [--rows WORD ...] [--kernels WORD ...] [--limit SECONDS]
    python benchmarks/gemm.py warm [--processes N] [--rows WORD ...]
    python benchmarks/gemm.py list [--rows WORD ...]
    python benchmarks/gemm.py report DATA.json [--to docs/benchmarks]

``run`` records each registered kernel of ``mm``, by override, and each peer in a CUDA graph that walks over more
copies of the operands than the L2 cache holds, checks what each gave, outside the graph and in it, against the
reference in float64 on the first and last rows, and lets the graphs take turns; medians are given. What is wrong or
fails gets no time. ``warm`` compiles our kernels first, in parallel processes that fill the cache on disk. Peers that
are not installed are left out, which the result says.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT / "src"), str(Path(__file__).parent)) if p not in sys.path]

import torch  # noqa: E402
from _gemm_peers import NO_WARM_UP, contenders  # noqa: E402
from _gemm_report import page, write  # noqa: E402
from _gemm_rows import Arguments, Row, rows  # noqa: E402
from _side_by_side import Contender, arguments_of, call_once, race, run_rows, shares  # noqa: E402
from torch import Tensor  # noqa: E402

from tskernel.library import ops  # noqa: E402
from tskernel.testing import compare, oracle  # noqa: E402

PACKAGES = ("torch", "triton", "flashinfer-python", "quack-kernels", "deep-gemm", "vllm")
COLD = 150 << 20  # bytes that a graph walks over: three times the L2 cache of an H200
MOST_SETS = 64
SAMPLE = 8  # rows at either end that are checked


def sampled(value: Tensor) -> Tensor:
    """Return the first and last rows."""
    return value if value.shape[0] <= 2 * SAMPLE else torch.cat((value[:SAMPLE], value[-SAMPLE:]))


def expected(arguments: Arguments) -> Tensor:
    """Return the first and last rows of the right result, in float64."""
    mine = dict(arguments)
    many = arguments["a"].shape[0]
    for name in ("a", "a_scale"):
        value = mine.get(name)
        if value is not None and value.shape[0] == many > 1:
            # indexing and cat know no fp8
            mine[name] = sampled(value.view(torch.uint8)).view(value.dtype) if value.itemsize == 1 else sampled(value)
    return oracle("mm", **mine)


def check(got: Tensor, want: Tensor) -> str:
    """Return what is wrong with a result, or nothing.

    Results are brought to unit root mean square, for which the table's absolute bounds are meant.
    """
    unit = want.square().mean().sqrt().clamp_min(1e-30)
    try:
        compare(sampled(got).double() / unit, want / unit, dtype=got.dtype)
    except AssertionError as error:
        return str(error)[:200]
    return ""


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Time everything on one row."""
    torch.manual_seed(0)
    sets = [row.make() for _ in range(max(2, min(MOST_SETS, math.ceil(COLD / row.bytes))))]
    want = expected(sets[0])

    def once(contender: Contender) -> str:
        return check(contender.prepare(sets[0])(), want)

    results = race(contenders(row), sets, once, options, replayed=lambda got: check(got, want))
    return {
        "row": row.name, "group": row.group, "format": row.format, "m": row.m, "n": row.n, "k": row.k,
        "bytes": row.bytes, "flops": row.flops, "floor_us": row.floor_us, "sets": len(sets),
        "selected": ops["mm"].explain(**sets[0]).winner, "results": results,
    }  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Time all rows."""
    print("\n".join(page(run_rows(rows(options.rows), lambda r: measure(r, options), PACKAGES, options))))


def warm(options: argparse.Namespace) -> None:
    """Compile what the rows need, in parallel processes."""
    with shares(__file__, options) as share:
        for row in [] if share is None else rows(options.rows)[share]:
            compiled = {n: c for n, c in contenders(row).items() if not n.startswith(NO_WARM_UP)}
            call_once(row, compiled, row.make)


def listing(options: argparse.Namespace) -> None:
    """Print the rows."""
    for row in rows(options.rows):
        print(f"{row.group:8} {row.name:36} {row.flops / 1e9:10.1f} GFLOP {row.bytes / 1e6:8.1f} MB")


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
