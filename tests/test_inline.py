"""Inline mode: kernels' bodies traced into compiled graphs, and never a stale choice from any cache."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import declines, each_op, primary_samples, tensors_in
from processes import run_python
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

import tskernel
from tskernel.dispatch.registry import KernelRegistry, Priority, register_kernel
from tskernel.library import Op, Sample
from tskernel.testing import clone_arguments, compare


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that keeps the text of the functionalized graphs."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.backend = aot_autograd(fw_compiler=self._keep, inference_compiler=self._keep)

    def _keep(self, module: torch.fx.GraphModule, _: Any) -> Any:
        self.seen.append(str(module.graph))
        return module.forward

    def compile(self, function: Callable[..., Any], *, dynamic: bool | None = True) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=self.backend)


def sample_for(op: Op, kernel: str) -> Sample | None:
    """Return the sample with the fewest sizes of 1 (constants to a tracer) and none of 0 that a kernel takes."""

    def sizes(sample: Sample) -> list[int]:
        return [s for v in sample.arguments.values() if isinstance(v, Tensor) for s in v.shape]

    fitting = [s for _, s in primary_samples(op) if 0 not in sizes(s) and declines(kernel, op, s, "") is None]
    return min(fitting, key=lambda s: sizes(s).count(1), default=None)


@each_op()
@pytest.mark.slow
def test_every_traceable_kernel_inlines_with_dynamic_sizes(op: Op) -> None:
    """The body alone is in the graph, for every form, and computes what the call computes."""
    for spec in KernelRegistry.get().list_kernels(mode=op.name):
        sample = sample_for(op, spec.name) if spec.traceable else None
        if sample is None:
            continue
        options = {k: v for k, v in sample.arguments.items() if not isinstance(v, Tensor)}

        def call(tensors: dict[str, Tensor], options: Any = options, name: str = spec.name) -> Any:
            result = op.front(**tensors, **options, override=name)
            return tensors if op.mutates else result

        graphs = Graphs()
        want, got = (
            {k: v for k, v in clone_arguments(sample.arguments).items() if isinstance(v, Tensor)} for _ in range(2)
        )
        if op.mutates:  # views of one storage cannot be written in a compiled graph that does not see them made
            got = {k: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v) for k, v in got.items()}
        for tensor in got.values():
            if tensor.dim():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        expected = call(want)
        with tskernel.inline():
            result = graphs.compile(call, dynamic=None)(got)
        assert graphs.seen and not any("tokenspeed" in g for g in graphs.seen), f"{spec.name} stayed an operator"
        flat = [[*v.values()] if isinstance(v, dict) else tensors_in(v) for v in (result, expected)]
        compare(*flat)


@pytest.mark.slow
def test_generated_code_has_no_operator_left() -> None:
    def layer(x: Tensor, residual: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        x = x * 1.0
        tskernel.fused_add_rmsnorm(x, residual, residual[0].clone())
        tskernel.store_kvcache(x[:, None], x[:, None], cache[0], cache[1], slots)
        return tskernel.silu_and_mul(x)

    def inputs() -> tuple[Tensor, ...]:
        x, residual = torch.linspace(-2, 2, 48).view(3, 16), torch.linspace(1, 2, 48).view(3, 16)
        return x, residual * 1.0, torch.zeros(2, 2, 4, 1, 16), torch.tensor([5, -1, 0])

    got, want = inputs(), inputs()
    with tskernel.inline():
        result, code = run_and_get_code(torch.compile(layer, fullgraph=True, dynamic=True), *got)
    assert code and not any("torch.ops.tokenspeed" in c for c in code)
    compare((result, *got), (layer(*want), *want))


def all_forms(q: Tensor, cu: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    tskernel.mha_prefill(q, q, q, cu, q.shape[0], out=out)
    return tskernel.mha_prefill(q, q, q, cu, q.shape[0], return_lse=True)


@pytest.mark.parametrize("tokens", [5, 1, 0])
def test_out_and_lse_forms_inline_also_without_tokens(tokens: int) -> None:
    q, cu = torch.randn(tokens, 2, 16), torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    out, want_out = torch.full((tokens, 2, 16), -7.0), torch.empty(tokens, 2, 16)
    want = all_forms(q, cu, want_out)
    graphs = Graphs()
    torch._dynamo.maybe_mark_dynamic(q, 0)
    with tskernel.inline():
        compare(graphs.compile(all_forms, dynamic=None)(q, cu, out), want)
    compare(out, want_out)
    assert not any("tokenspeed" in g for g in graphs.seen)


def add_constant(name: str, value: float, **options: Any) -> None:
    """Register a norm that gives a constant, so that a result tells which kernel made it."""
    options = {"traceable": True, "priority": Priority.PORTABLE - 1, **options}

    @register_kernel("norm", "rmsnorm", name=name, solution=name, **options)
    def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return torch.full_like(x, value)


def norm(x: Tensor) -> Tensor:
    return tskernel.rmsnorm(x, x[0])


@pytest.mark.usefixtures("registry")
def test_every_change_of_selection_is_followed() -> None:
    add_constant("one", 1.0)
    add_constant("two", 2.0)
    graphs, x = Graphs(), torch.randn(3, 8)
    compiled, plain = graphs.compile(norm), norm(x)
    with tskernel.inline():
        compare(compiled(x), plain)
        for _ in range(2):
            for kernel, value in (("one", 1.0), ("two", 2.0)):
                with tskernel.kernel_override("norm", "rmsnorm", kernel):
                    assert compiled(x).unique().tolist() == [value]
            compare(compiled(x), plain)
        assert len(graphs.seen) == 3, "going back to an earlier choice compiles nothing"
        add_constant("three", 3.0, priority=Priority.PLUGIN)
        assert compiled(x).unique().tolist() == [3.0]
        KernelRegistry.get().unregister("three")
        compare(compiled(x), plain)
        assert not any("tokenspeed" in g for g in graphs.seen)
    compare(compiled(x), plain)
    assert "tokenspeed.rmsnorm" in graphs.seen[-1], "outside the block the operator stays"


@pytest.mark.usefixtures("registry")
def test_a_call_with_its_own_override_is_inlined_too() -> None:
    add_constant("one", 1.0)
    graphs = Graphs()
    with tskernel.inline():
        got = graphs.compile(lambda x: (tskernel.rmsnorm(x, x[0], override="one"), norm(x)))(torch.randn(3, 8))
    assert got[0].unique().tolist() == [1.0] and got[1].unique().numel() > 1
    assert not any("tokenspeed" in g for g in graphs.seen)


@pytest.mark.usefixtures("registry")
def test_a_kernel_that_cannot_be_traced_stays_an_operator() -> None:
    add_constant("opaque", 4.0, traceable=False, priority=Priority.PLUGIN)
    graphs = Graphs()
    with tskernel.inline():
        assert graphs.compile(norm)(torch.randn(3, 8)).unique().tolist() == [4.0]
    assert "tokenspeed.rmsnorm" in graphs.seen[0]


@pytest.mark.usefixtures("registry")
def test_a_refused_choice_is_refused_when_it_runs() -> None:
    add_constant("elsewhere", 1.0, capability=tskernel.CapabilityRequirement(vendor="nvidia"))
    graphs = Graphs()
    with tskernel.inline(), pytest.raises(Exception, match="needs nvidia"):
        graphs.compile(lambda x: tskernel.rmsnorm(x, x[0], override="elsewhere"))(torch.randn(3, 8))


@pytest.mark.usefixtures("registry")
def test_another_threads_override_does_not_enter_this_threads_graph() -> None:
    add_constant("one", 1.0)
    opened, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tskernel.kernel_override("norm", "rmsnorm", "one"):
            opened.set()
            done.wait(60)

    thread, x = threading.Thread(target=hold), torch.randn(3, 8)
    plain, graphs = norm(x), Graphs()
    with tskernel.inline():
        thread.start()
        opened.wait(60)
        with contextlib.ExitStack() as stack:
            stack.callback(done.set)
            compare(graphs.compile(norm)(x), plain)
        thread.join()


# The bodies are library calls: nothing has to be compiled by a C++ compiler, which would take most of the time.
PLUGIN = """
from __future__ import annotations
import torch
from torch import Tensor
from tskernel.dispatch.registry import register_kernel
from plugin_package.helper import product


@register_kernel("norm", "rmsnorm", name="one", solution="one", priority=3, traceable=True)
def one(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return product(x)


@register_kernel("norm", "rmsnorm", name="two", solution="two", priority=3, traceable=True)
def two(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.mm(x, x.t())
"""
USE = """
import os, pathlib, sys
import torch, torch._dynamo.utils, torch._inductor.compile_fx  # what takes time, before the processes part

def use(override):
    os.environ["TOKENSPEED_KERNEL_OVERRIDE_NORM_RMSNORM"] = override
    import tskernel, plugin_package.kernels
    x = torch.arange(16.0).view(4, 4)
    with torch.no_grad(), tskernel.inline():
        result = torch.compile(tskernel.rmsnorm, fullgraph=True)(x, torch.ones(4))
    made = {"x x": x @ x, "x xt": x @ x.t(), "xt x": x.t() @ x}
    found = [name for name, value in made.items() if torch.equal(value, result)]
    print(found, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"], flush=True)

for override, product in (("one", "x @ x"), ("one", "x @ x"), ("two", "x @ x"), ("one", "x.t() @ x")):
    pathlib.Path(sys.argv[1], "plugin_package", "helper.py").write_text(f"def product(x): return {product}\\n")
    child = os.fork()
    if child == 0:
        use(override)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_shared_compile_cache_never_serves_another_choice(tmp_path: Path) -> None:
    """Four processes, one cache on disk: the same choice hits it; another override, or another source, does not."""
    package = tmp_path / "plugin_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text(PLUGIN)
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    first, again, other, changed = run_python(USE, str(tmp_path), path=tmp_path, **environment).splitlines()
    assert first == "['x x'] 0"
    assert again == "['x x'] 1", "the cache works at all"
    assert other == "['x xt'] 0", "another override"
    assert changed == "['xt x'] 0", "another source of what the kernel imports"
