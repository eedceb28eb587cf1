"""Shared fixtures: uninitialised memory is poisoned, selection state is restored."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

if "TSKERNEL_TEST_GATE" in os.environ:  # an extension that a test built aside, so that the tree stays clean
    found = importlib.util.spec_from_file_location("tskernel._gate", os.environ["TSKERNEL_TEST_GATE"])
    sys.modules["tskernel._gate"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules["tskernel._gate"])

import tskernel  # noqa: F401  defines torch.ops.tokenspeed
from tskernel.dispatch import policy
from tskernel.dispatch.registry import KernelRegistry

# The same examples on every machine and run: a failure in CI is one that anybody can repeat.
settings.register_profile("tskernel", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("tskernel")

if "TSKERNEL_TEST_PLATFORM" in os.environ:  # before the tests are collected: it changes which kernels there are
    from interpreted import declare

    declare(os.environ["TSKERNEL_TEST_PLATFORM"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many checks stand behind the passed tests that count them."""
    totals: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        totals.update({name: value for name, value in report.user_properties if isinstance(value, int)})
    for name, total in sorted(totals.items()):
        terminalreporter.write_line(f"{name}: {total}")


@pytest.fixture
def poison() -> Iterator[None]:
    """Fill every uninitialised allocation with NaN (integers: their largest value)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def registry() -> Iterator[KernelRegistry]:
    """Give the registry and put kernels, oracles and availability back afterwards."""
    found = KernelRegistry.get()
    kernels, by_mode = dict(found._kernels), dict(found._by_mode)
    yield found
    found._kernels, found._by_mode = kernels, by_mode
    policy._state.oracles.clear()
    policy.forget_unavailable()


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Run as a server does; tests of gradients switch it on."""
    with torch.no_grad():
        yield
