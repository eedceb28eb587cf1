"""Time the small ops and their peers side by side, on the rows of issue 4, in one run on the GPU at hand.

    python benchmarks/small_ops.py run OUT.json [--rows WORD ...] [--kernels WORD ...] [--limit SECONDS]
    python benchmarks/small_ops.py warm [--processes N] [--rows WORD ...]
    python benchmarks/small_ops.py host OUT.json
    python benchmarks/small_ops.py report DATA.json [--to docs/benchmarks]

``run`` records each registered kernel, by override, and each peer in a CUDA graph that walks over more inputs than the
L2 cache holds where that takes no more than 64 of them, checks what each gave against the reference on a sample of
rows, and lets the graphs take turns; medians are given. What is wrong or fails gets no time. ``warm`` compiles the
peers first, in parallel processes that fill the caches on disk. ``host`` times eager calls on the host. Peers that
are not installed are left out, which the result says.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT / "src"), str(Path(__file__).parent)) if p not in sys.path]

import torch  # noqa: E402
from _side_by_side import (  # noqa: E402
    Contender,
    Prepare,
    arguments_of,
    call_once,
    first_line,
    keeping,
    race,
    run_rows,
    shares,
)
from _small_peers import contenders, results  # noqa: E402
from _small_report import table, write  # noqa: E402
from _small_rows import DEVICE, Row, randn, rows  # noqa: E402
from _timing import Recorded, host_us, record  # noqa: E402

import tskernel  # noqa: E402
from tskernel.library import ops  # noqa: E402
from tskernel.testing import clone_arguments, compare  # noqa: E402

PACKAGES = ("torch", "triton", "flashinfer-python", "quack-kernels", "nvidia-cutlass-dsl", "vllm")
COLD = 150 << 20  # bytes that a graph walks over: three times the L2 cache of an H200
MOST_SETS = 64
SAMPLE = 8  # rows at either end that are checked


def sampled(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first and last rows of results."""
    return tuple(v if v.shape[0] <= 2 * SAMPLE else torch.cat((v[:SAMPLE], v[-SAMPLE:])) for v in values)


def check(row: Row, prepare: Prepare, want: tuple[Any, ...], arguments: dict[str, Any]) -> str:
    """Return what is wrong with one call on a copy of the arguments, or nothing."""
    mine = clone_arguments(arguments)
    got = results(row, mine, prepare(mine)())
    try:
        compare(sampled(got[: len(want)]), want)
    except AssertionError as error:
        return str(error)[:200]
    return ""


def expected(row: Row, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return the reference's results, of which a sample is checked."""
    mine = clone_arguments(arguments)
    op = ops[row.case.op]
    return sampled(results(row, mine, op.front(**mine, override=f"reference/{op.name}")))


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Time everything on one row."""
    torch.manual_seed(0)
    sets = [row.case.make(row.tokens) for _ in range(max(2, min(MOST_SETS, math.ceil(COLD / row.bytes))))]
    fresh = clone_arguments(sets[0])  # an op in place changes the others
    want = expected(row, fresh)

    def copies() -> dict[str, Recorded]:
        half = row.bytes // 2
        pairs = [[torch.empty(half, dtype=torch.uint8, device=DEVICE) for _ in range(2)] for _ in sets]
        return {"copy": record([keeping(a.copy_, b) for a, b in pairs])}

    listed = {n: Contender(p, "kernel" if "/" in n else "peer") for n, p in contenders(row).items()}
    results = race(listed, sets, lambda c: check(row, c.prepare, want, fresh), options, extra=copies)
    return {
        "row": row.name, "op": row.case.op, "tokens": row.tokens, "bytes": row.bytes, "sets": len(sets),
        "selected": ops[row.case.op].explain(**sets[0]).winner, "results": results,
    }  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Time all rows."""
    print("\n".join(table(run_rows(rows(options.rows), lambda r: measure(r, options), PACKAGES, options))))


def warm(options: argparse.Namespace) -> None:
    """Compile what the rows need, in parallel processes."""
    from torch._inductor.codecache import cache_dir

    with shares(__file__, options) as share:
        if share is None:
            # The configurations that Inductor chose while all of them were at work at once are not to be trusted.
            for file in Path(cache_dir()).rglob("*.best_config"):
                file.unlink()
            return
        for row in rows(options.rows)[share]:
            peers = {n: Contender(p) for n, p in contenders(row).items() if "/" not in n}
            call_once(row, peers, partial(row.case.make, row.tokens))
            torch._dynamo.reset()


def host_calls() -> dict[str, Callable[[], Any]]:
    """Return eager calls of a small rmsnorm, by every way there is here."""
    x, w = randn(8, 4096), torch.rand(4096, dtype=torch.bfloat16, device=DEVICE)
    out, residual, raw = tskernel.rmsnorm(x, w), randn(8, 4096), torch.ops.tokenspeed.rmsnorm.default
    calls: dict[str, Callable[[], Any]] = {
        "tskernel.rmsnorm": lambda: tskernel.rmsnorm(x, w),
        "tskernel.rmsnorm, out=": lambda: tskernel.rmsnorm(x, w, out=out),
        "tskernel.fused_add_rmsnorm": lambda: tskernel.fused_add_rmsnorm(out, residual, w),
        "torch.ops.tokenspeed.rmsnorm": lambda: raw(x, w),
        "F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (4096,), w, 1e-6),
        "torch.empty_like": lambda: torch.empty_like(x),
    }
    if hasattr(torch.ops.tskernel_native, "rmsnorm"):
        native = torch.ops.tskernel_native.rmsnorm.default
        calls["torch.ops.tskernel_native.rmsnorm, out"] = lambda: native(x, w, out, 1e-6)
    try:
        from flashinfer.norm import rmsnorm

        calls["flashinfer.norm.rmsnorm"] = lambda: rmsnorm(x, w, 1e-6)
        calls["flashinfer.norm.rmsnorm, out="] = lambda: rmsnorm(x, w, 1e-6, out=out)
    except ImportError:
        pass
    try:
        from vllm import _custom_ops as vllm

        calls["vllm rms_norm, out"] = lambda: vllm.rms_norm(out, x, w, 1e-6)
    except ImportError:
        pass
    return calls


def host(options: argparse.Namespace) -> None:
    """Time eager calls on the host, and the gate alone."""
    from tskernel._torch.gate import GATE

    found: dict[str, float | str] = {"gate": "C++" if GATE is not None else "Python"}
    with torch.inference_mode():
        for name, call in host_calls().items():
            try:
                found[name] = host_us(call, calls=300, batches=21)
            except Exception as error:
                found[name] = first_line(error)
            print(f"host us  {name:42} {found[name]}", flush=True)
        if GATE is not None:
            x = randn(8, 4096)
            found["gate alone, 2 tensors"] = host_us(lambda: GATE.needs_dispatcher(False, x, x), calls=3000)
            empty = host_us(lambda: None, calls=3000)
            print(f"host us  gate alone {found['gate alone, 2 tensors']:.3f}, of which the caller {empty:.3f}")
    options.out.write_text(json.dumps(found, indent=1))


def report(options: argparse.Namespace) -> None:
    """Write the page."""
    for path in write(json.loads(options.out.read_text()), options.to):
        print(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    modes = {"run": run, "warm": warm, "host": host, "report": report}
    options = arguments_of(__doc__, modes, ROOT / "docs/benchmarks", arguments)
    with torch.no_grad():
        options.function(options)


if __name__ == "__main__":
    main()
