"""Times of CUDA graphs that take turns, and of calls on the host."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST_US = 300.0  # a graph is made about this long, or starting it would count
MOST_US = 60_000.0  # what is slow enough needs no walk over all inputs
SLOW = 5.0  # what is this many times slower than the fastest gets three rounds only


class Timing(NamedTuple):
    """Microseconds of one call over the rounds."""

    us: float
    best: float
    worst: float
    rounds: int


class Recorded(NamedTuple):
    """A CUDA graph of ``calls`` calls, what the first of them returned, and the calls, whose memory it uses."""

    graph: torch.cuda.CUDAGraph
    calls: int
    first: Tensor
    owners: Sequence[Callable[[], Tensor]]


def record(calls: Sequence[Callable[[], Tensor]]) -> Recorded:
    """Record all calls in turn, as often as makes the graph long enough, after runs that compile and time one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls[:4]:
            call()
        end.record()
    end.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    # Outside a graph the host's time counts too: what looks short may be shorter still.
    each = 1e3 * start.elapsed_time(end) / len(calls[:4])
    count = len(calls) if each * len(calls) < MOST_US else max(1, int(MOST_US / each))
    if each * count < LEAST_US:
        count *= math.ceil(LEAST_US / (each * count))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = calls[0]()
        for i in range(1, count):
            calls[i % len(calls)]()
    return Recorded(graph, count, first, calls)


def replay_us(recorded: Recorded) -> float:
    """Return the time of one call in one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    recorded.graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / recorded.calls


def take_turns(entries: dict[str, Recorded], budget_s: float, least: int = 7, most: int = 25) -> dict[str, Timing]:
    """Replay the graphs in turn, so that all see the same clocks, and return each one's median."""
    once = {name: replay_us(r) for name, r in entries.items()}  # the second replay of each: the first was the check
    fastest = min(once.values(), default=0.0)
    slow = {name for name, us in once.items() if us > SLOW * fastest}
    whole = sum(us * entries[name].calls for name, us in once.items() if name not in slow)
    rounds = int(min(most, max(least, 1e6 * budget_s / max(whole, 1.0))))
    times: dict[str, list[float]] = {name: [] for name in entries}
    for turn in range(rounds):
        for name, recorded in entries.items():
            if turn < 3 or name not in slow:
                times[name].append(replay_us(recorded))
    return {name: Timing(statistics.median(t), min(t), max(t), len(t)) for name, t in times.items()}


def machine() -> dict[str, float]:
    """Return what a copy of 2 GB and a bf16 product of 8192 x 8192 matrices reach here: the rates of the floor."""
    x = torch.randint(256, (1 << 30,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for _ in range(200):  # clocks rise with load: without it the copy alone reached 2.7 of 4.3 TB/s
        a @ b
    entries = {
        "copy": record([lambda: y.copy_(x)]),
        "product": record([lambda: a @ b]),
    }
    times = take_turns(entries, 0.3)
    return {
        "bytes_per_s": 2 * x.numel() / times["copy"].us * 1e6,
        "flops_per_s": 2 * 8192**3 / times["product"].us * 1e6,
    }


def host_us(call: Callable[[], Any], calls: int = 100, batches: int = 15) -> float:
    """Return how long one call keeps the host; the device is idle before each batch."""
    for _ in range(5):
        call()
    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - began) / calls)
    torch.cuda.synchronize()
    return statistics.median(times)
