"""Stand-ins for CUDA graphs and their times, so that the benchmarks' own code runs on a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import _side_by_side
import pytest
import torch
from _timing import Timing


class Graph:
    """A graph of calls, whose replay makes them again and writes what the first gave."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.first = calls[0]().clone()
        self.graph, self.calls, self.owners = self, len(calls), calls
        for call in calls[1:]:
            call()

    def replay(self) -> None:
        self.first.copy_(self.owners[0]())


def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls run where they would be recorded, and make up times, by place in the order of contenders."""

    def take_turns(entries: dict[str, Any], *_: Any, **__: Any) -> dict[str, Timing]:
        return {name: Timing(10.0 + i, 9.0, 20.0 + i, 5) for i, name in enumerate(entries)}

    monkeypatch.setattr(_side_by_side, "record", Graph)
    monkeypatch.setattr(_side_by_side, "take_turns", take_turns)
    monkeypatch.setattr(_side_by_side, "machine", lambda: {"bytes_per_s": 4e12, "flops_per_s": 7e14})
    monkeypatch.setattr(_side_by_side, "WARM_UP", 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")


def options(**changes: Any) -> argparse.Namespace:
    """Return what the command line gives."""
    return argparse.Namespace(**{"kernels": [], "rows": [], "budget": 0.1, "limit": float("inf"), **changes})
