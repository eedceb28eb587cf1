"""Time every attention kernel and every peer side by side, on the rows of issue 3, in one run on the GPU at hand.

    python benchmarks/attention.py run OUT.json [--rows WORD ...] [--kernels WORD ...] [--budget SECONDS]
    python benchmarks/attention.py warm [--processes N] [--rows ...] [--kernels ...]
    python benchmarks/attention.py list [--rows ...]
    python benchmarks/attention.py report DATA.json [--to docs/benchmarks]

``run`` takes for each row the op as selected, each registered kernel by override, and the peers through their own
interfaces. Each is recorded in a CUDA graph that walks over more inputs than the L2 cache holds (decode), its result is
checked against the reference, and the graphs then take turns; medians are given. What is wrong gets no time. The work
is done in a child process: what crashes or hangs there is noted, left out, and the rest goes on. ``warm`` compiles our
kernels and FlashAttention-4's first, in parallel processes that fill the caches on disk. ``report`` writes the table
and the plots. See docs/benchmarks/README.md for the peers' packages.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

import torch  # noqa: E402
from _attention_inputs import Inputs, copies, expected, make, op_call  # noqa: E402
from _attention_peers import Contender, contenders, fitting, flashinfer_decode_wrapper, wraps_library  # noqa: E402
from _attention_rows import ROWS, Row, chosen  # noqa: E402
from _timing import Recorded, host_us, machine, record, take_turns  # noqa: E402

from tskernel.library import ops  # noqa: E402

TURNS = "all in turn"  # what is being tried when no single contender is
PACKAGES = ("torch", "triton", "tokenspeed-fa3", "flash-attn-4", "flashinfer-python", "nvidia-cutlass-dsl")


def wanted(contender: Contender, words: Sequence[str]) -> bool:
    """Return whether ``--kernels`` asks for a contender."""
    return not words or any(w in contender.name for w in words)


def first_line(error: BaseException) -> str:
    """Return an error as one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def release() -> None:
    """Give memory back between rows."""
    gc.collect()
    torch.cuda.empty_cache()


# one row


def measure(row: Row, faults: dict[str, str], options: argparse.Namespace, rates: dict[str, float]) -> dict[str, Any]:
    """Time everything on one row and return its record; ``faults`` are contenders to leave out, and why."""
    torch.manual_seed(0)
    sets = [make(row) for _ in range(copies(row))]
    winner, kernels = fitting(sets[0])
    want = expected(sets[0])
    recorded: dict[str, Recorded] = {}
    results: dict[str, dict[str, Any]] = {}
    for contender in [c for c in contenders(sets[0]) if wanted(c, options.kernels)]:
        entry: dict[str, Any] = {"name": contender.name, "source": contender.source, "status": "ok", "note": ""}
        if contender.source == "kernel":
            entry["library"] = wraps_library(contender.name)
        results[contender.name] = entry
        if contender.name in faults:
            entry |= {"status": "failed", "note": faults[contender.name]}
            continue
        mark(options, row.name, contender.name)
        try:
            graph = record([contender.prepare(x) for x in sets])
            graph.first.zero_()
            graph.graph.replay()
            torch.cuda.synchronize()
            wrong = want.check(contender.read(graph.first, row), contender.dtype)
        except Exception as error:
            entry |= {"status": "failed", "note": first_line(error)}
            print(f"  {contender.name}: {first_line(error)}", flush=True)
            torch.cuda.synchronize()  # raises if the context is broken: nothing more can run in this process
            release()
            continue
        if wrong:
            entry |= {"status": "WRONG", "note": wrong}
        else:
            recorded[contender.name] = graph
    mark(options, row.name, TURNS)
    for name, timing in take_turns(recorded, options.budget).items():
        results[name] |= timing._asdict()
    mark(options)
    declined = [
        {"name": name, "source": "kernel", "status": "declined", "note": why}
        for name, status, why in kernels
        if status == "rejected"
    ]
    return {
        "row": row.name, "group": row.group, "kind": row.kind, "width": row.width, "window": row.window,
        "flops": row.flops, "bytes": row.bytes, "floor_us": row.floor_us(**rates), "selected": winner,
        "results": [*results.values(), *declined],
    }  # fmt: skip


def show(found: dict[str, Any], row: Row) -> None:
    """Print one row's record."""
    print(f"{found['row']}   floor {found['floor_us']:.1f} us, selected {found['selected']}", flush=True)
    timed = sorted((r for r in found["results"] if "us" in r), key=lambda r: r["us"])
    for r in timed:
        spread = f"{r['best']:.1f}..{r['worst']:.1f} in {r['rounds']}"
        speed = f"{row.rate(r['us']):>13}  {r['us'] / found['floor_us']:6.2f} x floor"
        print(f"  {r['us']:10.1f} us  {speed}  {r['source']:8} {r['name']}  ({spread})")
    for r in found["results"]:
        if r["status"] in ("WRONG", "failed"):
            print(f"  {r['status']:>13}  {r['source']:8} {r['name']}: {r['note']}")
    sys.stdout.flush()


# a whole run


def now_path(options: argparse.Namespace) -> Path:
    """Return the file that says what is being tried."""
    return Path(f"{options.out}.now")


def mark(options: argparse.Namespace, *what: str) -> None:
    """Note what is about to be tried, or that nothing is."""
    if what:
        now_path(options).write_text(json.dumps(what))
    else:
        now_path(options).unlink(missing_ok=True)


def run(options: argparse.Namespace) -> None:
    """Time all chosen rows in a child process, and start another one when a contender breaks it or hangs."""
    if options.child:
        time_rows(options)
        return
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    mark(options)
    words = [*sys.argv[1:], "--child"]
    while True:
        child = subprocess.Popen([sys.executable, __file__, *words])
        code, why = wait_for(child, options), "crashed or broke the CUDA context"
        if code == 0:
            return
        now = now_path(options)
        if not now.exists():
            raise SystemExit(f"attention.py: the run failed with code {code} outside of any contender")
        row, name = json.loads(now.read_text())
        if code == -signal.SIGKILL:
            why = f"gave no result within {options.patience:.0f} s"
        print(f"{row}: {name} {why}; going on without it", flush=True)
        result = json.loads(Path(options.out).read_text())
        result["faults"].append([row, name, why])
        Path(options.out).write_text(json.dumps(result, indent=1))
        mark(options)
        words += [] if "--resume" in words else ["--resume"]


def wait_for(child: subprocess.Popen[bytes], options: argparse.Namespace) -> int:
    """Return the child's exit code; kill it when one contender takes too long."""
    while child.poll() is None:
        time.sleep(0.2)
        with contextlib.suppress(FileNotFoundError):
            if time.time() - now_path(options).stat().st_mtime > options.patience:
                child.kill()
    return child.returncode


def time_rows(options: argparse.Namespace) -> None:
    """Time all chosen rows; write after each, so that an interrupted run leaves what it has."""
    began, out = time.monotonic(), Path(options.out)
    if options.resume:
        result = json.loads(out.read_text())
    else:
        result = {**about(), "machine": machine(), "rows": [], "host": [], "faults": [], "seconds": 0.0}
        print(json.dumps({k: v for k, v in result.items() if v}))
    spent, done = result["seconds"], {r["row"] for r in result["rows"]}

    def save() -> None:
        result["seconds"] = round(spent + time.monotonic() - began, 1)
        out.write_text(json.dumps(result, indent=1))

    def faults(row: str) -> dict[str, str]:
        return {name: why for where, name, why in result["faults"] if where == row}

    save()
    for row in chosen(options.rows):
        if row.name in done:
            continue
        if result["seconds"] > options.limit:
            print(f"out of time before {row.name}")
            result["out_of_time_before"] = row.name
            break
        known = faults(row.name)
        if TURNS in known:
            continue
        try:
            found = measure(row, known, options, result["machine"])
        except Exception as error:
            if now_path(options).exists():  # a contender broke the context
                raise
            print(f"{row.name}: {first_line(error)}")
            result["faults"].append([row.name, TURNS, first_line(error)])
            continue
        finally:
            release()
        show(found, row)
        result["rows"].append(found)
        save()
    if not options.no_host:
        result["host"] = host_times(options, faults(HOST.group))
    save()


def about() -> dict[str, Any]:
    """Return the date, the device and the versions."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions["torch"] = torch.__version__
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": versions,
    }


# the host's part of a small call


HOST = Row("host", "decode", 1, 1, 1, 64, 8, 128)


def host_times(options: argparse.Namespace, faults: dict[str, str]) -> list[dict[str, Any]]:
    """Time eager decode calls of one request with one token, outside a graph."""
    found: list[dict[str, Any]] = []
    for name, prepare in host_calls(make(HOST)):
        if options.kernels and not any(w in name for w in options.kernels):
            continue
        if name in faults:
            found.append({"name": name, "note": faults[name]})
            continue
        mark(options, HOST.group, name)
        try:
            found.append({"name": name, "us": host_us(prepare())})
        except Exception as error:
            torch.cuda.synchronize()
            found.append({"name": name, "note": first_line(error)})
        print(f"host {name}: {found[-1].get('us', found[-1].get('note'))}", flush=True)
    mark(options)
    return found


def host_calls(x: Inputs) -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    """Yield a name and a function that prepares the call."""
    name, arguments = op_call(x)
    op = ops[name]
    given = {k: v for k, v in arguments.items() if v is not None}
    out = torch.empty_like(x.q)
    yield "tskernel", lambda: lambda: op.front(**given)
    yield "tskernel, out=", lambda: lambda: op.front(**given, out=out)
    yield "torch.ops.tokenspeed", lambda: functools.partial(op.torch_op(), **given)
    for kernel, status, _ in fitting(x)[1]:
        if status != "rejected":
            yield f"override {kernel}", lambda k=kernel: lambda: op.front(**given, override=k)

    for contender in contenders(x):
        if contender.source == "peer":
            yield contender.name, functools.partial(contender.prepare, x)

    def planned() -> Callable[[], Any]:
        wrapper, plan = flashinfer_decode_wrapper(x)

        def both() -> Any:
            plan()
            return wrapper.run(x.q, (x.k, x.v))

        return both

    yield "flashinfer with plan()", planned


# compiling ahead


def tasks(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return (contender, rows) for what compiles: rows of one kind and width share compiled kernels."""
    groups: dict[tuple[str, str, int], list[str]] = {}
    for row in chosen(options.rows):
        x = make(row)
        for contender in contenders(x):
            ours = contender.source == "kernel" and not wraps_library(contender.name)
            if (ours or contender.name.startswith("fa4")) and wanted(contender, options.kernels):
                groups.setdefault((contender.name, row.kind, row.width), []).append(row.name)
        del x
        release()
    return sorted(((name, rows) for (name, _, _), rows in groups.items()), key=lambda t: -len(t[1]))


def compile_rows(options: argparse.Namespace) -> None:
    """Call one contender once on each row."""
    for row in (r for r in ROWS if r.name in options.rows):
        x = make(row)
        contender = next(c for c in contenders(x) if c.name == options.contender)
        try:
            contender.prepare(x)()
        except Exception as error:
            print(f"{row.name}: {first_line(error)}")
        torch.cuda.synchronize()
        x = contender = None
        release()


def compile_in_child(task: tuple[str, list[str]], limit_s: float) -> str:
    """Compile one task in a process of its own, which may crash or hang; return what to print."""
    began, (name, rows) = time.monotonic(), task
    command = [sys.executable, __file__, "compile", name, "--rows", *rows]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        told = done.stdout.strip() + (f"\n{done.stderr.strip()[-300:]}" if done.returncode else "")
    except subprocess.TimeoutExpired:
        told = f"stopped after {limit_s:.0f} s"
    head = f"{time.monotonic() - began:6.1f} s  {name}, {len(rows)} rows"
    return "\n          ".join([head, *told.strip().splitlines()])


def warm(options: argparse.Namespace) -> None:
    """Fill the compile caches with several processes."""
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        for line in pool.map(functools.partial(compile_in_child, limit_s=options.limit), tasks(options)):
            print(line, flush=True)
    print(f"warm after {time.monotonic() - began:.0f} s")


def listing(options: argparse.Namespace) -> None:
    """Print the rows."""
    for row in chosen(options.rows):
        print(f"{row.group:8} {row.name:50} {row.flops / 1e9:10.1f} GFLOP {row.bytes / 1e6:10.1f} MB")


def report(options: argparse.Namespace) -> None:
    """Write the table and the plots of a run."""
    from _attention_report import write

    for path in write(json.loads(Path(options.data).read_text()), Path(options.to)):
        print(path)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modes = made.add_subparsers(required=True)

    def mode(name: str, function: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        one = modes.add_parser(name, help=(function.__doc__ or "").splitlines()[0])
        one.set_defaults(function=function)
        return one

    one = mode("run", run)
    one.add_argument("out", help="the JSON file to write")
    one.add_argument("--budget", type=float, default=0.8, help="seconds of replays per row")
    one.add_argument("--limit", type=float, default=480.0, help="seconds after which no further row is begun")
    one.add_argument("--patience", type=float, default=120.0, help="seconds after which one contender is given up")
    one.add_argument("--resume", action="store_true", help="go on with what OUT has")
    one.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    one.add_argument("--no-host", action="store_true", help="leave out the host times")
    two = mode("warm", warm)
    two.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    two.add_argument("--limit", type=float, default=200.0, help="seconds after which one process is given up")
    helper = mode("compile", compile_rows)
    helper.add_argument("contender")
    helper.add_argument("--rows", nargs="*", default=[])
    three = mode("list", listing)
    for m in (one, two, three):
        m.add_argument("--rows", nargs="*", default=[], help="groups, or parts of row names")
    for m in (one, two):
        m.add_argument("--kernels", nargs="*", default=[], help="parts of contenders' names")
    four = mode("report", report)
    four.add_argument("data", help="what run wrote")
    four.add_argument("--to", default=str(ROOT / "docs/benchmarks"))
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Run one of the modes."""
    options = parser().parse_args(words)
    options.function(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
