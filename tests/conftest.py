"""Shared fixtures: uninitialised memory is poisoned, selection state is restored."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Give ``built_once(name, make)``: the file of that name, which ``make`` writes, made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make: Callable[[Path], object]) -> Path:
        path = folder / name
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                made = path.with_name(f"{name}.new")
                make(made)
                made.rename(path)  # a build that failed leaves nothing behind
        return path

    return get


@pytest.fixture(scope="session")
def aoti_program(built_once: Callable[..., Path]) -> Path:
    """The program of ``examples/aoti`` for the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("no host compiler")
    example = Path(__file__).parent.parent / "examples" / "aoti"
    found = importlib.util.spec_from_file_location("aoti_package", example / "package.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    def build(path: Path) -> None:
        command = module.build_command(path.parent, "cpu")
        command[command.index("-o") + 1] = str(path)
        subprocess.run(command, check=True)

    return built_once("aoti_program", build)
