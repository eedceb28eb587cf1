"""Host time of one eager call, and of the import, beside torch's own ways to register an operator.

Each row calls an operator whose kernel does nothing but return a ready tensor, and subtracts the time of calling that
kernel directly, so what is left is checking, dispatch and argument passing. ``custom_op`` and ``define`` register the
same schema with the same kernel through ``torch.library.custom_op`` and ``torch.library.Library``. Batches of the
compared calls and of the bare kernel take turns; the median of the differences is given, and the difference of the
fastest batches, which other work on the machine disturbs least. "Other look" calls with many shapes in turn: each is
recognised, but none is the one before. Where the C++ gate (csrc/gate) is built, "Python gate" is the same function
without it, in the same run. Nothing is subtracted from three kinds of rows: "gate" is the question alone whether a
kernel may be called directly, "allocating" a call whose result is allocated and whose kernel, in Python, does nothing,
"bound" a call of a kernel that is bound to an operator in C++ that does nothing. "New look" is a call like none before,
which is checked and selected. The import is timed with compiled bytecode, as an installed package has it.

    taskset -c 0 python benchmarks/overhead.py [--device cuda] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tskernel
from tskernel._torch.binding import calls as bind_to
from tskernel._torch.front import build_front
from tskernel._torch.gate import GATE
from tskernel._torch.guard import python_needs_dispatcher
from tskernel._torch.schema import REQUIRED
from tskernel.library import Op, ops

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "tskernel front": 1.0 if GATE is None else 0.5,
    "gate": 0.15,
    "torch.ops.tokenspeed": 4.5,
    "import over torch": 60_000.0,
}
CALLS, BATCHES = 1_000, 61
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
    best: float


@dataclass(frozen=True)
class Case:
    """One way to call an op: its arguments, those that are passed by position and those by keyword."""

    op: Op
    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    out: Tensor | None = None


def cases(device: str) -> list[Case]:
    """Return the calls: few arguments, many arguments left at their defaults, many arguments given."""
    half = {"dtype": torch.bfloat16, "device": device}
    q, cache = torch.zeros(8, 64, 128, **half), torch.zeros(64, 16, 8, 128, **half)
    k, cu = torch.zeros(8, 8, 128, **half), torch.tensor([0, 8], dtype=torch.int32, device=device)
    table = torch.zeros(8, 8, dtype=torch.int32, device=device)
    lens = torch.ones(8, dtype=torch.int32, device=device)
    options = {"window_left": 127, "logit_cap": 0.0, "softmax_scale": 0.1}
    x, residual, weight = torch.zeros(8, 4096, **half), torch.zeros(8, 4096, **half), torch.ones(4096, **half)
    return [
        Case(ops["rmsnorm"], (x, weight), {}),
        Case(ops["rmsnorm"], (x, weight), {}, torch.empty_like(x)),
        Case(ops["fused_add_rmsnorm"], (x, residual, weight, 1e-6), {}),
        Case(ops["mha_prefill"], (q, k, k.clone(), cu, 8), {}),
        Case(ops["mha_prefill"], (q, k, k.clone(), cu, 8), {**options, "is_causal": True, "cu_seqlens_kv": None}),
        Case(ops["mha_decode_with_kvcache"], (q, cache, cache.clone(), table, lens, 128), {}),
        Case(ops["mha_decode_with_kvcache"], (q, cache, cache.clone(), table, lens, 128, 1), options),
        Case(ops["mha_decode_with_kvcache"], (q, cache, cache.clone(), table, lens, 128), {}, torch.empty_like(q)),
    ]


def no_op(op: Op, result: Tensor | None, *extra: str, star: str = "*") -> Callable[..., Any]:
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


def routes(case: Case, result: Tensor | None) -> dict[str, Callable[..., Any]]:
    """Return the callables to compare, by name: ours, and the same schema and kernel through torch's own ways."""
    op, form = case.op, "out" if case.out is not None else ""
    schema = op.schemas[form]
    name, signature = f"{op.name}_{len(_libraries)}", schema[schema.index("(") :]
    extra = (*(["out=None"] if form else []), "override=None")
    kernel = no_op(op, result, *extra)
    # custom_op takes no keyword-only tensors.
    loose = signature.replace("*, ", "").replace("Tensor(a!) out", "Tensor(a!)? out=None")
    positional = no_op(op, result, *extra, star="")
    written = op.mutates or (("out",) if form else ())
    custom = torch.library.custom_op(f"bench::{name}", positional, mutates_args=written, schema=loose)
    library = torch.library.Library("benchdef", "FRAGMENT")
    library.define(f"{name}{signature}")
    library.impl(name, kernel, "CompositeExplicitAutograd")
    _libraries.append(library)
    python_gate = {} if GATE is None else {"tskernel front, Python gate": build_front(op, native=False)}
    return {
        "tskernel front": op.front,
        **python_gate,
        "torch.ops.tokenspeed": op.torch_op(form),
        "Library.define": getattr(torch.ops.benchdef, name).default,
        "custom_op": custom,
    }


def batch(function: Callable[..., Any], case: Case) -> float:
    """Return the microseconds of one call, over one batch."""
    keywords = {**case.keywords, **({"out": case.out} if case.out is not None else {})}
    scope = {"f": function, "a": case.positional, "k": keywords}
    text = "f(*a, **k)" if keywords else "f(*a)"
    return timeit.timeit(text, globals=scope, number=CALLS) / CALLS * 1e6


@contextlib.contextmanager
def serving(op: Op, *, result: Tensor | None, out: bool, mode: str) -> Iterator[Callable[..., Any]]:
    """Serve an op by a kernel that does nothing, in inference_mode or no_grad, and give that kernel."""
    kernel = no_op(op, None if out else result, *(["out=None"] if out else []))
    tskernel.register_kernel(op.family, op.name, name="benchmark/no_op", priority=19)(kernel)
    try:
        with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
            yield kernel
    finally:
        tskernel.KernelRegistry.get().unregister("benchmark/no_op")


def measure(case: Case, mode: str) -> list[Row]:
    """Return the rows of a case: ours and torch's ways, in batches that take turns with those of the bare kernel."""
    op, out = case.op, case.out is not None
    result = None if op.mutates or out else torch.zeros(1)
    bare: list[float] = []
    with serving(op, result=result, out=out, mode=mode) as kernel:
        compared = routes(case, result)
        took: dict[str, list[float]] = {name: [] for name in compared}
        for function in compared.values():
            batch(function, case)
        for _ in range(BATCHES):
            bare.append(batch(kernel, case))
            for name, function in compared.items():
                took[name].append(batch(function, case))
    label, arguments = op.name + ("_out" if out else ""), len(op.arguments) + 1 + out
    given = len(case.positional) + len(case.keywords) + out
    return [Row(label, arguments, given, mode, name, *net(times, bare)) for name, times in took.items()]


def net(times: list[float], bare: list[float]) -> tuple[float, float]:
    """Return the median of the differences and the difference of the fastest."""
    return statistics.median(t - b for t, b in zip(times, bare, strict=True)), min(times) - min(bare)


def other_looks(mode: str, shapes: int) -> Row:
    """Return the row of calls that take so many shapes in turn."""
    op = ops["rmsnorm"]
    calls = [(torch.zeros(8, 64 * n), torch.ones(64 * n)) for n in range(1, shapes + 1)]
    text, rounds = "for a in calls: f(*a)", CALLS // shapes
    times: list[float] = []
    bare: list[float] = []
    with serving(op, result=torch.zeros(1), out=False, mode=mode) as kernel:
        for function, found in [(op.front, times), (kernel, bare)] * BATCHES:
            took = timeit.timeit(text, globals={"f": function, "calls": calls}, number=rounds)
            found.append(took / rounds / shapes * 1e6)
    return Row(op.name, len(op.arguments) + 1, 2, mode, f"other look, {shapes} shapes", *net(times, bare))


def gross(label: str, arguments: int, given: int, mode: str, calls: dict[str, Callable[[], Any]]) -> list[Row]:
    """Return a row for each of some calls that take turns, nothing subtracted."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
        for _ in range(BATCHES):
            for name, call in calls.items():
                took[name].append(timeit.timeit(call, number=CALLS) / CALLS * 1e6)
    return [Row(label, arguments, given, mode, n, statistics.median(t), min(t)) for n, t in took.items()]


def gates(case: Case, mode: str) -> list[Row]:
    """Return the rows of the question whether a call must go through the dispatcher."""
    tensors = [a for a in case.positional if isinstance(a, Tensor)]
    asked: dict[str, Callable[[], Any]] = {}
    if GATE is not None:
        asked["gate"] = functools.partial(GATE.needs_dispatcher, False, *tensors)
    asked["gate in Python"] = functools.partial(python_needs_dispatcher, tensors, autocast=False)
    return gross(case.op.name, len(case.op.arguments) + 1, len(tensors), mode, asked)


def whole_calls(device: str, mode: str) -> list[Row]:
    """Return the rows of calls with all that surrounds a kernel: a result that is allocated, an operator in C++."""
    x, weight = torch.zeros(8, 4096, device=device), torch.ones(4096, device=device)
    allocating = no_op(ops["rmsnorm"], None, "out=None")
    bound = no_op(ops["fused_add_rmsnorm"], None)
    # An operator of torch's own that does nothing when asked nothing.
    bind_to("aten::_assert_tensor_metadata", "x")(bound)
    rows = []
    for name, kernel, arguments in (("rmsnorm", allocating, (x, weight)), ("fused_add_rmsnorm", bound, (x, x, weight))):
        op, label = ops[name], "allocating" if kernel is allocating else "bound"
        tskernel.register_kernel(op.family, name, name="benchmark/whole", priority=19)(kernel)
        fronts = {label: op.front, **({} if GATE is None else {f"{label}, Python gate": build_front(op, native=False)})}
        calls = {n: functools.partial(f, *arguments) for n, f in fronts.items()}
        try:
            rows += gross(name, len(op.arguments) + 1, len(arguments), mode, calls)
        finally:
            tskernel.KernelRegistry.get().unregister("benchmark/whole")
    return rows


def new_look(case: Case, mode: str) -> Row:
    """Return the row of calls that look like none before: checked and selected each time."""
    times: list[float] = []
    with serving(case.op, result=torch.zeros(1), out=False, mode=mode):
        for _ in range(BATCHES * 10):
            tskernel.KernelRegistry.get().forget_calls()
            times.append(timeit.timeit(lambda: case.op.front(*case.positional), number=1) * 1e6)
    given, middle = len(case.positional), statistics.median(times)
    return Row(case.op.name, len(case.op.arguments) + 1, given, mode, "new look", middle, min(times))


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
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        for _ in range(processes + 1):  # the first one compiles
            command = [sys.executable, "-c", IMPORT.format(heavy=HEAVY)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            micros, device, *heavy = done.stdout.split()
            if device != "False" or heavy:
                raise RuntimeError(f"import tskernel: expected no device and no heavy package, got {device} {heavy}")
            times.append(float(micros))
    took = times[1:]
    return Row("import tskernel", 0, 0, "fresh process", "import over torch", statistics.median(took), min(took))


def report(rows: list[Row]) -> Table:
    """Return the table of all rows, with the target where there is one."""
    table = Table(title="host time per call, us, net of the kernel")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("op", "mode", "route") else "right")
    for r in rows:
        table.add_row(*cells(r))
    return table


COLUMNS = ("op", "arguments", "given", "mode", "route", "us", "best", "target")


def cells(r: Row) -> tuple[str, ...]:
    """Return a row as text."""
    target = str(TARGETS.get(r.route, ""))
    return r.op, str(r.arguments), str(r.given), r.mode, r.route, f"{r.microseconds:.2f}", f"{r.best:.2f}", target


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
    lines += [f"| {' | '.join(COLUMNS)} |", "| --- | --: | --: | --- | --- | --: | --: | --: |"]
    lines += [f"| {' | '.join(cells(r))} |" for r in rows]
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
    rows += gates(cases(options.device)[0], "inference_mode") + gates(cases(options.device)[5], "inference_mode")
    rows += whole_calls(options.device, "inference_mode")
    rows += [other_looks("inference_mode", shapes) for shapes in (4, 40)]
    rows += [
        new_look(case, "inference_mode") for case in cases(options.device) if not case.keywords and case.out is None
    ]
    where = environment(options.device)
    console = Console(width=140)
    console.print(where)
    console.print(report(rows))
    if options.write:
        write(rows, where)


if __name__ == "__main__":
    main()
