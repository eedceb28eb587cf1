"""The three routes of a public function: traced, direct to the kernel, and through torch.ops for everything else."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import each_op, primary_samples, tensors_in
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tskernel
from tskernel._torch import execute, front
from tskernel._torch.gate import GATE
from tskernel._torch.guard import python_needs_dispatcher
from tskernel.dispatch.registry import KernelRegistry, Priority, register_kernel
from tskernel.library import Op, ops
from tskernel.testing import clone_arguments, compare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")

X, W = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 1.5, 8)
routes: list[str] = []


def callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


@pytest.fixture(autouse=True)
def spy(registry: KernelRegistry) -> Iterator[None]:
    """Serve rmsnorm by a kernel that notes whether the function or the operator called it."""

    @register_kernel("norm", "rmsnorm", name="spy", priority=Priority.PLUGIN)
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        routes.append("operator" if "rmsnorm_impl" in callers() else "direct")
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    routes.clear()
    yield
    routes.clear()
    torch._dynamo.reset()


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class FunctionSubclass(Tensor):
    """Overrides by ``__torch_function__``."""

    seen: list[str] = []  # noqa: RUF012  of the class, as its hook is

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


class DispatchSubclass(Tensor):
    """Overrides by ``__torch_dispatch__`` and holds its data elsewhere."""

    seen: list[str] = []  # noqa: RUF012
    data_: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> DispatchSubclass:
        made = Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        made.data_ = data
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(function))
        return function(*[a.data_ if isinstance(a, DispatchSubclass) else a for a in args], **(kwargs or {}))


class Module(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return tskernel.rmsnorm(x, w)


NODE = "tokenspeed.rmsnorm.default"


def two(x: Tensor, w: Tensor) -> Tensor:
    """Take as many arguments as are given, as make_fx wants it."""
    return tskernel.rmsnorm(x, w)


def plain() -> None:
    tskernel.rmsnorm(X, W)
    assert routes == ["direct"]


def inference_mode() -> None:
    with torch.inference_mode():
        tskernel.rmsnorm(X, W)
        tskernel.rmsnorm(X.clone(), W)
    assert routes == ["direct", "direct"]


def parameter_without_grad() -> None:
    with torch.no_grad():
        tskernel.rmsnorm(X, nn.Parameter(W))
    assert routes == ["direct"]


def grad_mode_without_need() -> None:
    with torch.enable_grad():
        tskernel.rmsnorm(X, W)
    assert routes == ["direct"]


def dispatch_mode() -> None:
    with Seen() as mode:
        tskernel.rmsnorm(X, W)
    assert mode.names == [NODE] and routes == ["operator"]


def function_mode() -> None:
    with SeenFunctions() as mode:
        tskernel.rmsnorm(X, W)
    assert NODE in mode.names and routes == ["operator"]


def fake_mode() -> None:
    with FakeTensorMode() as mode:
        got = tskernel.rmsnorm(mode.from_tensor(X), mode.from_tensor(W))
    assert got.shape == X.shape and got.fake_mode is mode and not routes


def fake_outside_its_mode() -> None:
    mode = FakeTensorMode()
    got = tskernel.rmsnorm(mode.from_tensor(X), mode.from_tensor(W))
    assert got.fake_mode is mode and not routes


def make_fx_real() -> None:
    assert NODE in str(make_fx(two)(X, W).code) and routes == ["operator"]


def make_fx_symbolic() -> None:
    assert NODE in str(make_fx(two, tracing_mode="symbolic")(X, W).code) and not routes


def functionalize() -> None:
    compare(torch.func.functionalize(tskernel.rmsnorm)(X, W), tskernel.rmsnorm(X, W))
    assert routes == ["operator", "direct"]


def vmap() -> None:
    batch = torch.stack([X, 2 * X])
    got = torch.func.vmap(tskernel.rmsnorm, (0, None))(batch, W)
    assert routes == ["operator"]
    compare(got, torch.stack([tskernel.rmsnorm(x, W) for x in batch]))


def meta() -> None:
    assert tskernel.rmsnorm(X.to("meta"), W.to("meta")).is_meta and not routes


def function_subclass() -> None:
    FunctionSubclass.seen.clear()
    tskernel.rmsnorm(X.as_subclass(FunctionSubclass), W)
    assert NODE in FunctionSubclass.seen and routes == ["operator"]


def function_subclass_second() -> None:
    FunctionSubclass.seen.clear()
    tskernel.rmsnorm(X, W.as_subclass(FunctionSubclass))
    assert NODE in FunctionSubclass.seen and routes == ["operator"]


def dispatch_subclass() -> None:
    DispatchSubclass.seen.clear()
    compare(tskernel.rmsnorm(DispatchSubclass(X), W), tskernel.rmsnorm(X, W))
    assert DispatchSubclass.seen == [NODE] and routes == ["operator", "direct"]


def dispatch_subclass_second() -> None:
    DispatchSubclass.seen.clear()
    tskernel.rmsnorm(X, DispatchSubclass(W))
    assert DispatchSubclass.seen == [NODE] and routes == ["operator"]


def compiled() -> None:
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(module.graph))
        return module.forward

    torch.compile(tskernel.rmsnorm, fullgraph=True, backend=backend)(X, W)
    assert len(graphs) == 1 and NODE in graphs[0] and routes == ["operator"]


def exported() -> None:
    assert NODE in str(torch.export.export(Module(), (X, W), strict=False).graph) and not routes


def exported_strictly() -> None:
    assert NODE in str(torch.export.export(Module(), (X, W), strict=True).graph) and not routes


def needs_grad() -> None:
    with torch.enable_grad(), pytest.raises(RuntimeError, match=r"rmsnorm is inference-only and x requires grad"):
        tskernel.rmsnorm(X.clone().requires_grad_(), W)
    assert not routes


def autocast() -> None:
    """An op with an autocast rule goes where the rule is; one without has nothing to see there."""
    with Seen() as mode, torch.autocast("cpu", torch.bfloat16):
        got = tskernel.mm(X, W[None])
    assert got.dtype == torch.bfloat16 and "tokenspeed.mm.default" in mode.names
    with torch.autocast("cpu", torch.bfloat16):
        assert tskernel.mm(X, W[None]).dtype == torch.bfloat16
        assert tskernel.rmsnorm(X, W).dtype == torch.float32
    assert tskernel.mm(X, W[None]).dtype == torch.float32


def jit_trace() -> None:
    graph = torch.jit.trace(Module(), (X, W), check_trace=False).graph
    assert "tokenspeed::rmsnorm" in str(graph) and routes == ["operator"]


def negative_view() -> None:
    """A tensor whose memory holds the negated values: the dispatcher makes the true ones before a kernel reads them."""
    compare(tskernel.rmsnorm(torch._neg_view(X), W), -tskernel.rmsnorm(X, W))
    assert routes == ["operator", "direct"]


def default_device() -> None:
    with torch.device("cpu"):
        tskernel.rmsnorm(X, W)
    assert routes == ["operator"]


def other_thread_has_a_mode() -> None:
    opened, done = threading.Event(), threading.Event()

    def hold() -> None:
        with Seen():
            opened.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    opened.wait()
    tskernel.rmsnorm(X, W)
    done.set()
    thread.join()
    assert routes == ["direct"]


def functional_grad() -> None:
    """functorch's grad wraps its argument, which no kernel may see."""
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: the operator has no gradient
        torch.func.grad(lambda x: tskernel.rmsnorm(x, W).sum())(X)
    assert routes == ["operator"]


def python_dispatcher() -> None:
    """The state in which tracers run fakes."""
    if GATE is None:  # a remembered look masks this key, as torch's guard object does
        KernelRegistry.get().forget_calls()
    with enable_python_dispatcher():
        tskernel.rmsnorm(X, W)
    assert routes == ["operator"]


CONTEXTS: list[Callable[[], None]] = [
    negative_view,
    default_device,
    other_thread_has_a_mode,
    functional_grad,
    python_dispatcher,
    plain,
    inference_mode,
    parameter_without_grad,
    grad_mode_without_need,
    dispatch_mode,
    function_mode,
    fake_mode,
    fake_outside_its_mode,
    make_fx_real,
    make_fx_symbolic,
    functionalize,
    vmap,
    meta,
    function_subclass,
    function_subclass_second,
    dispatch_subclass,
    dispatch_subclass_second,
    compiled,
    exported,
    exported_strictly,
    needs_grad,
    autocast,
    jit_trace,
]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "repeated"])
@pytest.mark.parametrize("context", [pytest.param(c, id=c.__name__) for c in CONTEXTS])
def test_route_in_every_context(context: Callable[[], None], warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also right after plain calls with the very same tensors, whose look the function remembers.

    Where the C++ gate is built it and the Python gate give the same answers.
    """
    both = front.needs_dispatcher

    def agreeing(tensors: Any, *, autocast: bool) -> bool:
        answer = python_needs_dispatcher(tensors, autocast=autocast)
        if GATE is not None:
            assert GATE.needs_dispatcher(autocast, *tensors) == answer
        assert both(tensors, autocast=autocast) == answer
        return answer

    monkeypatch.setattr(front, "needs_dispatcher", agreeing)
    for _ in range(3 if warm else 0):
        for function in (tskernel.rmsnorm, torch.ops.tokenspeed.rmsnorm):
            function(X, W)
        tskernel.mm(X, W[None])
    routes.clear()
    context()


def test_what_a_context_ran_is_not_remembered_outside() -> None:
    for _ in range(3):
        with Seen():
            tskernel.rmsnorm(X, W)
    tskernel.rmsnorm(X, W)
    assert routes == ["operator"] * 3 + ["direct"]


@each_op()
def test_function_and_operator_pick_the_same_kernel(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    picked: list[tuple[str, str]] = []
    real = execute.make_runner

    def noting(op: Op, spec: Any, form: str) -> Any:
        picked.append((spec.name, form))
        return real(op, spec, form)

    monkeypatch.setattr(execute, "make_runner", noting)
    compared = 0
    for _, sample in primary_samples(op):
        for override in (None, "reference"):
            KernelRegistry.get().forget_calls()
            picked.clear()
            first = op.front(**clone_arguments(sample.arguments), override=override)
            second = op.torch_op()(**clone_arguments(sample.arguments), override=override)
            half = len(picked) // 2
            assert picked[:half] == picked[half:], sample.name
            compared += half
            compare(tensors_in(first), tensors_in(second), exact=True)
    assert compared


@pytest.mark.parametrize("op", [pytest.param(o, id=o.name) for o in ops.values() if o.vmap])
def test_vmap_equals_a_loop(op: Op) -> None:
    for _, sample in primary_samples(op):
        names = [n for n in op.vmap if isinstance(sample.arguments.get(n), Tensor)]
        rest = {k: v for k, v in sample.arguments.items() if k not in names}
        batches = [torch.stack([sample.arguments[n], sample.arguments[n].flip(0)]) for n in names]

        def call(*tensors: Tensor, names: Any = names, rest: Any = rest) -> Any:
            return op.front(**dict(zip(names, tensors, strict=True)), **rest)

        got = tensors_in(torch.func.vmap(call)(*batches))
        want = [tensors_in(call(*[b[i] for b in batches])) for i in range(2)]
        compare(got, [torch.stack(pair) for pair in zip(*want, strict=True)])
