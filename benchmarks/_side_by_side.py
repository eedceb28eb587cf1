"""What the benchmarks of ops share: contenders that are checked, recorded and timed in turn, and rows one by one."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from _timing import Recorded, machine, record, take_turns

Arguments = dict[str, Any]
Call = Callable[[], Any]
Prepare = Callable[[Arguments], Call]
WARM_UP = 0.05  # seconds of replays before the graphs of a row take turns


class Contender(NamedTuple):
    """Something to time on a row.

    ``prepare`` gets a set of arguments and returns a call; what it makes before that is not timed. ``source`` is
    "kernel" (one of ours or a wrapped one, by override), "peer", "other" (the same result from other storage or with
    less exact sums) or "rate" (other arithmetic of the same size, which nothing checks).
    """

    prepare: Prepare
    source: str = "peer"


class Named(Protocol):
    """A row."""

    @property
    def name(self) -> str:
        """How the row is called in tables and on the command line."""
        ...


def first_line(error: BaseException) -> str:
    """Return an error as one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def keeping(function: Callable[..., Any], *given: Any, **options: Any) -> Call:
    """Return a call that holds what it returned last.

    So no two calls of a graph write to the same memory where they allocate.
    """
    held: list[Any] = [None]

    def call() -> Any:
        held[0] = function(*given, **options)
        return held[0]

    return call


def wanted(name: str, words: Sequence[str]) -> bool:
    """Return whether ``--kernels`` asks for a contender."""
    return not words or any(w in name for w in words)


def race(
    contenders: Mapping[str, Contender],
    sets: Sequence[Arguments],
    check: Callable[[Contender], str],
    options: argparse.Namespace,
    *,
    replayed: Callable[[Any], str] | None = None,
    extra: Callable[[], dict[str, Recorded]] = dict,
) -> list[dict[str, Any]]:
    """Time what gives the right result, each in a CUDA graph over all sets, the graphs in turn.

    ``check`` says what is wrong with a contender, or nothing: what is wrong or fails gets no time. ``replayed`` says
    what is wrong with what a graph's first call gave when the graph was replayed. ``extra`` records more graphs that
    take part.
    """
    recorded: dict[str, Recorded] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, contender in contenders.items():
        if not wanted(name, options.kernels):
            continue
        entry = found[name] = {"name": name, "source": contender.source, "note": ""}
        try:
            entry["note"] = "" if contender.source == "rate" else check(contender)
            if not entry["note"]:
                graph = record([contender.prepare(a) for a in sets])
                entry["note"] = "" if replayed is None or contender.source == "rate" else replay(graph, replayed)
            if not entry["note"]:
                recorded[name] = graph
        except Exception as error:
            entry["note"] = first_line(error)
            torch.cuda.synchronize()  # raises if the context is broken: nothing more can run in this process
    for name, graph in extra().items():
        recorded[name] = graph
        found[name] = {"name": name, "source": "other", "note": ""}
    began = time.perf_counter()
    while recorded and time.perf_counter() - began < WARM_UP:  # clocks fall while peers are compiled
        next(reversed(recorded.values())).graph.replay()
        torch.cuda.synchronize()
    for name, timing in take_turns(recorded, options.budget, least=5, most=15).items():
        found[name] |= timing._asdict()
    return list(found.values())


def replay(graph: Recorded, check: Callable[[Any], str]) -> str:
    """Clear the first result, replay, and return what is wrong with it."""
    graph.first.zero_()
    graph.graph.replay()
    torch.cuda.synchronize()
    return check(graph.first)


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of what is compared."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def show(found: dict[str, Any], said: set[str]) -> None:
    """Print one row in one line, and what went wrong and was not said yet."""
    timed = {r["name"]: r["us"] for r in found["results"] if "us" in r}
    print(f"{found['row']:44}", "  ".join(f"{n} {us:.2f}" for n, us in timed.items()), flush=True)
    for r in found["results"]:
        if r["note"] and f"{r['name']}: {r['note']}" not in said:
            said.add(f"{r['name']}: {r['note']}")
            print(f"    {r['name']}: {r['note']}", flush=True)


def run_rows(
    rows: Sequence[Any],
    measure: Callable[[Any], dict[str, Any]],
    packages: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Time all rows; write the file after each, so that what was measured stays if the next one breaks."""
    began = time.perf_counter()
    rates = machine()
    data: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(),
        "packages": package_versions(packages), **rates, "seconds": 0.0, "rows": [], "left_out": [],
    }  # fmt: skip
    print(f"copy {rates['bytes_per_s'] / 1e12:.2f} TB/s, {data['packages']}", flush=True)
    said: set[str] = set()
    for row in rows:
        if time.perf_counter() - began > options.limit:
            data["left_out"].append(f"{row.name}: out of time")
        else:
            try:
                data["rows"].append(measure(row))
                show(data["rows"][-1], said)
            except Exception as error:
                data["left_out"].append(f"{row.name}: {first_line(error)}")
                print(data["left_out"][-1], flush=True)
            release()
        data["seconds"] = round(time.perf_counter() - began, 1)
        options.out.write_text(json.dumps(data, indent=1))
    print(f"{len(data['rows'])} rows in {time.perf_counter() - began:.0f} s; left out: {data['left_out']}")
    return data


def release() -> None:
    """Give memory back between rows, and forget what was compiled for them."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def shares(file: str, options: argparse.Namespace) -> Iterator[slice | None]:
    """Yield this process's share of the rows, or None where the shares are done by processes that are started here."""
    if options.share >= 0:
        yield slice(options.share, None, options.processes)
        return
    command = [sys.executable, file, "warm", "--processes", str(options.processes), "--rows", *options.rows]
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    children = [subprocess.Popen([*command, "--share", str(i)], env=env) for i in range(options.processes)]
    for child in children:
        child.wait()
    yield None


def call_once(row: Named, contenders: Mapping[str, Contender], arguments: Callable[[], Arguments]) -> None:
    """Call each contender once, which compiles it."""
    for name, contender in contenders.items():
        try:
            contender.prepare(arguments())()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{row.name}, {name}: {first_line(error)}", flush=True)


def arguments_of(
    text: str | None, modes: Mapping[str, Callable[[argparse.Namespace], None]], to: Path, words: Sequence[str] | None
) -> argparse.Namespace:
    """Read the command line: a mode, for ``run`` and ``report`` a file, and options."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in modes.items():
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        if name not in ("warm", "list"):
            command.add_argument("out", type=Path)
        command.add_argument("--rows", nargs="*", default=[])
        command.add_argument("--kernels", nargs="*", default=[])
        command.add_argument("--budget", type=float, default=0.06, help="seconds of replays per row")
        command.add_argument("--limit", type=float, default=math.inf, help="seconds after which no row is begun")
        command.add_argument("--processes", type=int, default=12)
        command.add_argument("--share", type=int, default=-1, help=argparse.SUPPRESS)
        command.add_argument("--to", type=Path, default=to)
    return parser.parse_args(words)
