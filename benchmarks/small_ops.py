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
import gc
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(ROOT / "src"), str(Path(__file__).parent)) if p not in sys.path]

import torch  # noqa: E402
from _small_peers import Prepare, contenders, keeping, results  # noqa: E402
from _small_report import table, write  # noqa: E402
from _small_rows import DEVICE, Row, randn, rows  # noqa: E402
from _timing import Recorded, host_us, machine, record, take_turns  # noqa: E402

import tskernel  # noqa: E402
from tskernel.library import ops  # noqa: E402
from tskernel.testing import clone_arguments, compare  # noqa: E402

PACKAGES = ("torch", "triton", "flashinfer-python", "quack-kernels", "nvidia-cutlass-dsl", "vllm")
COLD = 150 << 20  # bytes that a graph walks over: three times the L2 cache of an H200
MOST_SETS = 64
SAMPLE = 8  # rows at either end that are checked


def first_line(error: BaseException) -> str:
    """Return an error as one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


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
    recorded: dict[str, Recorded] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, prepare in contenders(row).items():
        if options.kernels and not any(w in name for w in options.kernels):
            continue
        entry = found[name] = {"name": name, "note": ""}
        try:
            entry["note"] = check(row, prepare, want, fresh)
            if not entry["note"]:
                recorded[name] = record([prepare(a) for a in sets])
        except Exception as error:
            entry["note"] = first_line(error)
            torch.cuda.synchronize()  # raises if the context is broken: nothing more can run in this process
    half = row.bytes // 2
    pairs = [[torch.empty(half, dtype=torch.uint8, device=DEVICE) for _ in range(2)] for _ in sets]
    recorded["copy"] = record([keeping(a.copy_, b) for a, b in pairs])
    found["copy"] = {"name": "copy", "note": ""}
    for name, timing in take_turns(recorded, options.budget, least=5, most=15).items():
        found[name] |= timing._asdict()
    return {
        "row": row.name, "op": row.case.op, "tokens": row.tokens, "bytes": row.bytes, "sets": len(sets),
        "selected": ops[row.case.op].explain(**sets[0]).winner, "results": list(found.values()),
    }  # fmt: skip


def show(found: dict[str, Any], said: set[str]) -> None:
    """Print one row in one line, and what went wrong and was not said yet."""
    timed = {r["name"]: r["us"] for r in found["results"] if "us" in r}
    print(f"{found['row']:44}", "  ".join(f"{n} {us:.2f}" for n, us in timed.items()), flush=True)
    for r in found["results"]:
        if r["note"] and f"{r['name']}: {r['note']}" not in said:
            said.add(f"{r['name']}: {r['note']}")
            print(f"    {r['name']}: {r['note']}", flush=True)


def package_versions() -> dict[str, str]:
    """Return the versions of what is compared."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def run(options: argparse.Namespace) -> None:
    """Time all rows; write the file after each, so that what was measured stays if the next one breaks."""
    began = time.perf_counter()
    rates = machine()
    data: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "packages": package_versions(), "bytes_per_s": rates["bytes_per_s"],
        "rows": [], "left_out": [],
    }  # fmt: skip
    print(f"copy {rates['bytes_per_s'] / 1e12:.2f} TB/s, {data['packages']}", flush=True)
    said: set[str] = set()
    for row in rows(options.rows):
        if time.perf_counter() - began > options.limit:
            data["left_out"].append(row.name)
            continue
        try:
            data["rows"].append(measure(row, options))
            show(data["rows"][-1], said)
        except Exception as error:
            data["left_out"].append(f"{row.name}: {first_line(error)}")
            print(data["left_out"][-1], flush=True)
        gc.collect()
        torch._dynamo.reset()
        options.out.write_text(json.dumps(data, indent=1))
    print(f"{len(data['rows'])} rows in {time.perf_counter() - began:.0f} s; left out: {data['left_out']}")
    print("\n".join(table(data)))


def warm(options: argparse.Namespace) -> None:
    """Compile what the rows need, in parallel processes."""
    from torch._inductor.codecache import cache_dir

    if options.share < 0:
        command = [sys.executable, __file__, "warm", "--processes", str(options.processes), "--rows", *options.rows]
        env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        children = [subprocess.Popen([*command, "--share", str(i)], env=env) for i in range(options.processes)]
        for child in children:
            child.wait()
        # The configurations that Inductor chose while all of them were at work at once are not to be trusted.
        for file in Path(cache_dir()).rglob("*.best_config"):
            file.unlink()
        return
    for row in rows(options.rows)[options.share :: options.processes]:
        for name, prepare in contenders(row).items():
            if "/" in name:
                continue
            try:
                prepare(row.case.make(row.tokens))()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{row.name}, {name}: {first_line(error)}", flush=True)
        torch._dynamo.reset()


def host_calls() -> dict[str, Callable[[], Any]]:
    """Return eager calls of a small rmsnorm, by every way there is here."""
    x, w = randn(8, 4096), torch.rand(4096, dtype=torch.bfloat16, device=DEVICE)
    out, residual, raw = torch.empty_like(x), randn(8, 4096), torch.ops.tokenspeed.rmsnorm.default
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in {"run": run, "warm": warm, "host": host, "report": report}.items():
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        if name != "warm":
            command.add_argument("out", type=Path)
        command.add_argument("--rows", nargs="*", default=[])
        command.add_argument("--kernels", nargs="*", default=[])
        command.add_argument("--budget", type=float, default=0.06, help="seconds of replays per row")
        command.add_argument("--limit", type=float, default=math.inf, help="seconds after which no row is begun")
        command.add_argument("--processes", type=int, default=12)
        command.add_argument("--share", type=int, default=-1, help=argparse.SUPPRESS)
        command.add_argument("--to", type=Path, default=ROOT / "docs/benchmarks")
    options = parser.parse_args(arguments)
    with torch.no_grad():
        options.function(options)


if __name__ == "__main__":
    main()
