"""The C++ gate and memory of calls (csrc/gate), built by the host compiler where it is not built already."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import primary_samples
from torch import Tensor

from tskernel._torch.binding import Constant
from tskernel._torch.execute import named
from tskernel._torch.gate import GATE, load
from tskernel._torch.runners import call_with
from tskernel.dispatch.ranking import reject_reason
from tskernel.dispatch.registry import KernelRegistry, KernelSpec
from tskernel.library import ops

ROOT = Path(__file__).resolve().parent.parent
X, W = torch.randn(3, 8), torch.rand(8)

built = pytest.mark.skipif(
    GATE is None, reason="run by test_the_extension_gives_the_same_answers where it is not built"
)


@pytest.mark.slow
@pytest.mark.skipif(GATE is not None, reason="it is built here: these tests, test_gate and test_route run with it")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no host compiler")
def test_the_extension_gives_the_same_answers(tmp_path: Path) -> None:
    """Build it aside and run the tests of gate and memory with it."""
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path / "o"),
    ]
    environment = {**os.environ, "TSKERNEL_BUILD": "gate"}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    (extension,) = tmp_path.glob("tskernel/_gate*.so")
    tests = [f"tests/{name}.py" for name in ("test_native_gate", "test_route", "test_gate")]
    environment = {**os.environ, "TSKERNEL_TEST_GATE": str(extension), "TSKERNEL_GATE": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1]


class Route:
    """An entry point with a memory, which counts its misses."""

    def __init__(self, kinds: str, **plan: Any) -> None:
        self.missed: list[tuple[Any, ...]] = []
        self.plan = plan
        self.memory = GATE.Memory(kinds, self.miss, True, False)

    def miss(self, *slots: Any) -> str:
        self.missed.append(slots)
        outputs = self.plan.get("outputs")
        self.remembered = self.memory.remember(slots, self.plan.get("function", self.run), outputs, None, None, ())
        return "missed"

    def run(self, *arguments: Any) -> Any:
        return arguments


@built
def test_options_are_compared_by_type_and_value() -> None:
    route = Route("TV")
    nan = float("nan")
    for value in (1, True, 1.0, "1", None, torch.float32, 0.0, -0.0, nan, 2**40, 2**70):
        assert route.memory(X, value) == "missed", value
        assert route.memory(X, value)[1] is value
    again = len(route.missed)
    assert route.memory(X, float("1")) == (X, 1.0) and route.memory(X, "".join(["1", ""])) == (X, "1")
    assert route.memory(X, 2**40 + 0) == (X, 2**40)
    assert len(route.missed) == again
    assert route.memory(X, int(str(2**70))) == "missed"  # beyond 64 bits: recognised only as the same object


@built
def test_sizes_are_not_compared_but_must_be_sizes() -> None:
    route = Route("TNM")
    assert route.memory(X, 1, None) == "missed"
    for pair in ((1, None), (0, 5), (2**40, 0)):
        assert route.memory(X, *pair) == (X, *pair)
    for pair in ((-1, None), (True, None), (1.0, None), (1, -2), (1, "2"), (2**64, None), (None, None)):
        assert route.memory(X, *pair) == "missed" and not route.remembered


@built
def test_tensors_are_compared_by_all_that_a_kernel_may_read() -> None:
    route = Route("TO")
    same = [(X, None), (X, W), (X, X)]
    other = [
        (X.double(), None),
        (X[:2], None),
        (X.t().contiguous().t(), None),
        (X.to(torch.int32).view(torch.float32).t(), None),
        (X[None], None),
        (X, X.clone()),
        (X[0, 0], None),
    ]
    for pair in same + other:
        assert route.memory(*pair) == "missed", pair
    for a, b in same + other:
        got = route.memory(a, b)
        assert got[0] is a and got[1] is b
    with torch.inference_mode():
        assert route.memory(X.clone(), None) == "missed"  # an inference tensor has other keys
    for bad in ((None, None), (X, 1.0), (X.to("meta"), None), (X.to_sparse(), None), (torch._neg_view(X), None)):
        assert route.memory(*bad) == "missed" and not route.remembered
    with torch.enable_grad():
        assert route.memory(X.clone().requires_grad_(), None) == "missed" and not route.remembered
    assert route.memory(torch.nn.Parameter(X), None) == "missed" and route.remembered


@built
def test_a_buffer_is_passed_on_and_returned() -> None:
    route, out = Route("TRX"), torch.empty(3)
    for given in ((X, None, True), (X, out, True), (X, None, False)):
        assert route.memory(*given) == "missed"
    assert route.memory(X, None, True) == (X,)
    assert route.memory(X, out, True) is out


@built
def test_results_are_allocated_from_their_look() -> None:
    for like in (X, X.t(), X.to(torch.bfloat16), torch.empty(0, 4), torch.empty_strided((2, 3), (8, 2))):
        filled: list[Tensor] = []
        route = Route("T", function=lambda x, out, found=filled: found.append(out), outputs=(like,))
        route.memory(X)
        first, second = route.memory(X), route.memory(X)
        assert (
            filled[0] is first and filled[1] is second and (first.data_ptr() != second.data_ptr() or not like.numel())
        )
        assert (first.shape, first.stride(), first.dtype) == (like.shape, like.stride(), like.dtype)
    two = Route("T", function=lambda x, a, b: None, outputs=(X, W))
    two.memory(X)
    assert [t.shape for t in two.memory(X)] == [X.shape, W.shape]


@built
def test_wrong_use_is_refused() -> None:
    for kinds in ("XT", "TRT", "Q", "T" * 60, "T" * 30):
        with pytest.raises(ValueError, match="kinds"):
            GATE.Memory(kinds, print, True, False)
    memory = GATE.Memory("TV", print, True, False)
    for call in (lambda: memory(X), lambda: memory(X, 1, 2), lambda: memory(X, value=1)):
        with pytest.raises(TypeError, match="expected 2 arguments by position"):
            call()
    refused = [
        ((X,), print, None, None, None, ()),
        ((X, 1), print, (1,), None, None, ()),
        ((X, 1), print, (), None, None, ()),
        ((X, 1), print, (X,) * 9, None, None, ()),
        ((X, 1), print, None, None, "tskernel::none_such", ()),
        ((X, 1), print, None, None, "aten::add", (0,)),
        ((X, 1), print, None, None, "aten::_assert_tensor_metadata", (7,)),
        ((X, 1), print, (X,), None, "aten::_assert_tensor_metadata", (0,)),
    ]
    for given in refused:
        with pytest.raises((TypeError, ValueError)):
            memory.remember(*given)
    assert len(memory) == 0


@built
def test_errors_of_kernels_and_operators_pass_through() -> None:
    def fails(*_: Any) -> None:
        raise KeyError("mine")

    for outputs in (None, (X,)):
        route = Route("T", function=fails, outputs=outputs)
        route.memory(X)
        with pytest.raises(KeyError, match="mine"):
            route.memory(X)
    memory = GATE.Memory("T", print, True, False)
    shapes = ((torch.float64,),)
    assert memory.remember((X,), print, None, None, "aten::_assert_tensor_metadata", (0, (None,), (None,), *shapes))
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        memory(X)


@built
def test_more_looks_than_it_keeps_and_forgetting() -> None:
    route = Route("TV")
    for _ in range(2):
        for i in range(1500):
            route.memory(X, i)
    assert 0 < len(route.memory) <= 1024
    route.memory.forget()
    assert len(route.memory) == 0
    assert route.memory(X, 1) == "missed"


@built
def test_nothing_is_leaked() -> None:
    class Marked:
        alive = 0

        def __init__(self) -> None:
            Marked.alive += 1

        def __del__(self) -> None:
            Marked.alive -= 1

        def __call__(self, *_: Any) -> None:
            return None

    route = Route("TV", function=Marked(), outputs=(X,))
    before = sys.getrefcount(None), sys.getrefcount(X)
    for i in range(50):
        for _ in range(3):
            route.memory(X, i % 5)
    assert sys.getrefcount(X) - before[1] <= 10  # the slots of five misses
    route.missed.clear()
    assert sys.getrefcount(X) == before[1] and abs(sys.getrefcount(None) - before[0]) < 50
    route.plan.clear()
    route.memory.forget()
    assert Marked.alive == 0
    route.plan["function"] = Marked()
    route.memory(X, 1)
    del route  # a cycle: the memory holds the bound method that holds it
    gc.collect()
    assert Marked.alive == 0


@built
def test_threads_call_and_forget_at_once() -> None:
    route, wrong = Route("TV"), []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            for i in range(20):
                got = route.memory(X, i)
                if got != "missed" and (got[0] is not X or got[1] != i):
                    wrong.append(got)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for _ in range(300):
        route.memory.forget()
        route.missed.clear()
    stop.set()
    for t in threads:
        t.join()
    assert not wrong


@pytest.fixture
def switch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_another_torch_or_a_switch_leaves_it_alone(switch: pytest.MonkeyPatch) -> None:
    class Extension:
        torch_version = torch.__version__.partition("+")[0]

    switch.setenv("TSKERNEL_GATE", "")
    switch.setitem(sys.modules, "tskernel._gate", Extension)
    assert load() is Extension
    switch.setattr(Extension, "torch_version", "2.11.9")
    with pytest.warns(RuntimeWarning, match=r"built for torch 2\.11\.9, and this is .*; the Python gate serves"):
        assert load() is None
    switch.setattr(Extension, "torch_version", torch.__version__.partition("+")[0])
    switch.setenv("TSKERNEL_GATE", "python")
    assert load() is None
    switch.setenv("TSKERNEL_GATE", "")
    switch.setitem(sys.modules, "tskernel._gate", None)  # what an import that cannot be found looks like
    assert load() is None


LOADS_ANOTHER = """
import os, sys, tskernel
from tskernel._torch.gate import load
tskernel.__path__.insert(0, sys.argv[1])
os.environ["TSKERNEL_GATE"] = ""
assert load() is None
"""


def test_an_extension_that_does_not_load_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "_gate.abi3.so").write_bytes(b"no library")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TSKERNEL_GATE": "python"}
    command = [sys.executable, "-c", LOADS_ANOTHER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and done.stderr.count("the C++ gate does not load") == 1, done.stderr


BOUND = [s for s in KernelRegistry.get().list_kernels() if hasattr(s.function, "binding")]


@pytest.mark.parametrize("spec", [pytest.param(s, id=s.name) for s in BOUND])
def test_a_binding_says_what_the_kernel_does(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator that the gate calls gets the very arguments that the kernel's code gives it."""
    recorded: list[tuple[Any, ...]] = []
    module = importlib.import_module(spec.function.__module__)
    monkeypatch.setattr(module.lib, "native", lambda name: lambda *given: recorded.append((name, *given)))
    binding, op = spec.function.binding, ops[spec.mode]
    compared = 0
    for _, sample in primary_samples(op):
        arguments = op.fill(sample.arguments)
        values = named(op, arguments, None)
        if reject_reason(spec, values) is not None:
            continue
        out = op.allocate(arguments) if spec.writes_out else None
        result = call_with(op, spec.function, arguments, **({"out": out} if spec.writes_out else {}))
        results = result if isinstance(result, tuple) else (result,)
        values |= {"out": out, **{f"return{i}": r for i, r in enumerate(results)}}
        want = [a.value if isinstance(a, Constant) else values[a] for a in binding.arguments]
        ((name, *got),) = recorded
        recorded.clear()
        assert binding.operator == f"tskernel_native::{name}" and len(got) == len(want)
        for a, b, source in zip(got, want, binding.arguments, strict=True):
            if b is None and source == "head_size":
                continue  # not an int: the gate leaves such a call to the kernel's code, which knows the size
            assert a is b or (not isinstance(a, Tensor) and a == b), source
        for r, like in zip(results, op.allocate(arguments) if len(results) > 1 else (), strict=False):
            assert (r.shape, r.stride(), r.dtype) == (like.shape, like.stride(), like.dtype)
        compared += 1
    assert compared
