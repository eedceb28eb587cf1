"""Prepared launches give the CUDA driver, byte for byte, what Triton gives it; and plans are found again."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tskernel.backends.plans import Plans

FOLDER = Path(__file__).parent / "fake_cuda"
CHECKS = [line[4 : line.index("(")] for line in (FOLDER / "checks.py").read_text().splitlines() if "def check_" in line]


@functools.lru_cache(maxsize=1)
def results() -> dict[str, str]:
    """Run all checks in one process of their own: they put a made-up driver in the place of CUDA's."""
    sys.path.insert(0, str(FOLDER))
    from driver import build

    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        env = {**os.environ, "LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder}
        env = {k: v for k, v in env.items() if k not in ("TRITON_INTERPRET", "TSKERNEL_TEST_PLATFORM")}
        done = subprocess.run([sys.executable, FOLDER / "checks.py"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_prepared(name: str) -> None:
    pytest.importorskip("triton")
    assert not results()[name], results()[name]


def look(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def test_a_plan_is_found_by_how_tensors_look() -> None:
    plans, x, y = Plans[str](), look(4, 8), look(3)
    assert plans.find(("a",), (x, None, y)) is None
    assert plans.keep(("a",), (x, None, y), "plan") == "plan"
    assert plans.find(("a",), (look(4, 8), None, look(3))) == "plan"
    for options, tensors in (
        (("b",), (x, None, y)),
        (("a",), (x, y, None)),
        (("a",), (x, None, look(5))),
        (("a",), (look(4, 9), None, y)),
        (("a",), (look(8, 4).t(), None, y)),
        (("a",), (x.double(), None, y)),
        (("a",), (x, None, y.to("meta"))),
        (("a",), (x, y, y)),
    ):
        assert plans.find(options, tensors) is None
    plans.clear()
    assert plans.find(("a",), (x, None, y)) is None


def test_looks_of_one_shape_and_one_tensor_twice() -> None:
    plans, x = Plans[int](), look(4)
    plans.keep((), (x, x), 1)
    plans.keep((), (x, look(4)), 2)
    for n in range(5, 9):
        plans.keep((), (x, look(n)), n)
    assert plans.find((), (x, x)) == 1
    assert plans.find((), (x, look(4))) == 2
    assert plans.find((), (x, look(7))) == 7


def test_plans_do_not_grow_without_bound() -> None:
    plans = Plans[int]()
    for n in range(3000):
        plans.keep((n,), (look(1),), n)
    assert len(plans._seen) <= 1024
