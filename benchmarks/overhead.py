"""Host time of one eager call, and of the import, beside torch's own ways to register an operator.

Each row calls an operator whose kernel does nothing but return a ready tensor, and subtracts the time of calling that
kernel directly, so what is left is checking, dispatch and argument passing. ``custom_op`` and ``define`` register the
same schema with the same kernel through ``torch.library.custom_op`` and ``torch.library.Library``.

    taskset -c 0 python benchmarks/overhead.py [--device cuda] [--write]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tskernel
from tskernel._torch.schema import REQUIRED
from tskernel.library import Op, ops

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"tskernel front": 1.0, "torch.ops.tokenspeed": 4.5, "import over torch": 60_000.0}
CALLS, BATCHES = 5_000, 15
HEAVY = ("triton", "torch._dynamo", "torch._inductor", "torch.distributed.tensor")


@dataclass(frozen=True)
class Row:
    """One measurement in microseconds, net of the kernel."""

    op: str
    arguments: int
    given: int
    mode: str
    route: str
    microseconds: float


@dataclass(frozen=True)
class Case:
    """One way to call an op: its arguments, those that are passed by position and those by keyword."""

    op: Op
    positional: tuple[Any, ...]
    keywords: dict[str, Any]


def cases(device: str) -> list[Case]:
    """Return the calls: few arguments, many arguments left at their defaults, many arguments given."""
    half = {"dtype": torch.bfloat16, "device": device}
    q, cache = torch.zeros(8, 64, 128, **half), torch.zeros(64, 16, 8, 128, **half)
    k, cu = torch.zeros(8, 8, 128, **half), torch.tensor([0, 8], dtype=torch.int32, device=device)
    table = torch.zeros(8, 8, dtype=torch.int32, device=device)
    lens = torch.ones(8, dtype=torch.int32, device=device)
    options = {"window_left": 127, "logit_cap": 0.0, "softmax_scale": 0.1}
    return [
        Case(ops["rmsnorm"], (torch.zeros(8, 4096, **half), torch.ones(4096, **half)), {}),
        Case(ops["mha_prefill"], (q, k, k.clone(), cu, 8), {}),
        Case(ops["mha_prefill"], (q, k, k.clone(), cu, 8), {**options, "is_causal": True, "cu_seqlens_kv": None}),
        Case(ops["mha_decode_with_kvcache"], (q, cache, cache.clone(), table, lens, 128), {}),
        Case(ops["mha_decode_with_kvcache"], (q, cache, cache.clone(), table, lens, 128, 1), options),
    ]


def no_op(op: Op, result: Tensor, *extra: str, star: str = "*") -> Callable[..., Any]:
    """Return a function with the op's signature that returns a ready tensor; without ``star`` all by position."""
    params, n = op.signature.params, op.signature.positional
    required = {p.name for p in params if p.default is REQUIRED}
    texts = [p.name if p.name in required else f"{p.name}={p.default!r}" for p in params]
    keywords = [*texts[n:], *extra]
    namespace: dict[str, Any] = {"result": result}
    exec(
        f"def kernel({', '.join([*texts[:n], *([star] if keywords and star else []), *keywords])}): return result",
        namespace,
    )
    kernel = namespace["kernel"]
    kernel.__annotations__ = {p.name: p.annotation for p in params}
    kernel.__module__ = __name__
    return kernel


_libraries: list[torch.library.Library] = []


def routes(case: Case, result: Tensor) -> dict[str, Callable[..., Any]]:
    """Return the callables to compare, by name: ours, and the same schema and kernel through torch's own ways."""
    op, schema = case.op, case.op.schemas[""]
    name, signature = f"{op.name}_{len(_libraries)}", schema[schema.index("(") :]
    kernel = no_op(op, result, "override=None")
    # custom_op takes no keyword-only tensors.
    loose = signature.replace("*, ", "")
    positional = no_op(op, result, "override=None", star="")
    custom = torch.library.custom_op(f"bench::{name}", positional, mutates_args=(), schema=loose)
    library = torch.library.Library("benchdef", "FRAGMENT")
    library.define(f"{name}{signature}")
    library.impl(name, kernel, "CompositeExplicitAutograd")
    _libraries.append(library)
    return {
        "tskernel front": op.front,
        "torch.ops.tokenspeed": op.torch_op(),
        "Library.define": getattr(torch.ops.benchdef, name).default,
        "custom_op": custom,
    }


def batch(function: Callable[..., Any], case: Case) -> float:
    """Return the microseconds of one call, over one batch."""
    scope = {"f": function, "a": case.positional, "k": case.keywords}
    text = "f(*a, **k)" if case.keywords else "f(*a)"
    return timeit.timeit(text, globals=scope, number=CALLS) / CALLS * 1e6


def measure(case: Case, mode: str) -> list[Row]:
    """Return the rows of a case: medians over batches that are interleaved with those of the bare kernel."""
    registry = tskernel.KernelRegistry.get()
    result = torch.zeros(1)
    kernel = no_op(case.op, result)
    tskernel.register_kernel(case.op.family, case.op.name, name="benchmark/no_op", priority=19)(kernel)
    context = torch.inference_mode() if mode == "inference_mode" else torch.no_grad()
    try:
        with context:
            compared = routes(case, result)
            net: dict[str, list[float]] = {name: [] for name in compared}
            for function in compared.values():
                function(*case.positional, **case.keywords)
            for _ in range(BATCHES):
                bare = batch(kernel, case)
                for name, function in compared.items():
                    net[name].append(batch(function, case) - bare)
    finally:
        registry.unregister("benchmark/no_op")
    arguments = len(case.op.arguments) + 1
    given = len(case.positional) + len(case.keywords)
    return [Row(case.op.name, arguments, given, mode, n, statistics.median(t)) for n, t in net.items()]


IMPORT = """
import sys, time, torch
start, cpu = time.perf_counter(), time.process_time()
import tskernel
took = time.perf_counter() - start, time.process_time() - cpu
heavy = [m for m in {heavy!r} if m in sys.modules]
print(min(took) * 1e6, torch.cuda.is_initialized(), ",".join(heavy))
"""


def import_time(processes: int = 9) -> Row:
    """Return the median time of importing tskernel after torch, in fresh processes.

    Raises: RuntimeError when the import initialises a device or loads a heavy package.
    """
    times = []
    for _ in range(processes):
        code = IMPORT.format(heavy=HEAVY)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        micros, device, *heavy = done.stdout.split()
        if device != "False" or heavy:
            raise RuntimeError(f"import tskernel: expected no device and no heavy package, got {device} {heavy}")
        times.append(float(micros))
    return Row("import tskernel", 0, 0, "fresh process", "import over torch", statistics.median(times[1:]))


def report(rows: list[Row]) -> Table:
    """Return the table of all rows, with the target where there is one."""
    table = Table(title="host time per call, us, net of the kernel")
    for column in ("op", "arguments", "given", "mode", "route", "us", "target"):
        table.add_column(column, justify="right" if column in ("arguments", "given", "us", "target") else "left")
    for r in rows:
        target = TARGETS.get(r.route)
        table.add_row(r.op, str(r.arguments), str(r.given), r.mode, r.route, f"{r.microseconds:.2f}", str(target or ""))
    return table


def environment(device: str) -> dict[str, str]:
    """Return what the figures depend on."""
    cpu = next((s.split(":")[1] for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s), "?")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": cpu.strip(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tskernel": tskernel.__version__,
    }


def write(rows: list[Row], where: dict[str, str]) -> None:
    """Write data and table under docs/benchmarks."""
    stem = ROOT / "docs" / "benchmarks" / ("overhead" if where["device"] == "cpu" else "overhead-gpu-host")
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(
        json.dumps({"environment": where, "rows": [asdict(r) for r in rows]}, indent=1)
    )
    head = ", ".join(f"{k} {v}" for k, v in where.items())
    lines = [f"# Host time per call\n\n{__doc__.split('    taskset')[0].strip()}\n\n{head}.\n"]
    lines += ["| op | arguments | given | mode | route | us | target |", "| --- | --: | --: | --- | --- | --: | --: |"]
    for r in rows:
        cells = (r.op, r.arguments, r.given, r.mode, r.route, f"{r.microseconds:.2f}", TARGETS.get(r.route, ""))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Measure, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/overhead.{json,md}")
    options = parser.parse_args()
    rows = [import_time()]
    for case in cases(options.device):
        for mode in ("inference_mode", "no_grad"):
            rows += measure(case, mode)
    where = environment(options.device)
    console = Console(width=140)
    console.print(where)
    console.print(report(rows))
    if options.write:
        write(rows, where)


if __name__ == "__main__":
    main()
