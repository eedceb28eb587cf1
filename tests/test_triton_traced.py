"""Triton bodies in graphs, traced with made-up CUDA tensors: what an AOTInductor package would carry is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import tskernel
from tskernel import export
from tskernel.backends.portable import _attention_launch as flash
from tskernel.dispatch.platform import PlatformInfo, forget_platforms, set_platform

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Target:
    """What Triton asks a driver while it finds out what a kernel writes: nothing is compiled to the end or run."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.runtime.driver", reason="traces Triton kernels").driver
    monkeypatch.setattr(driver, "_active", Target())
    monkeypatch.setattr(flash, "chip_of", lambda _: flash.Chip(False, 227 << 10))
    monkeypatch.setattr(flash, "multiprocessors", lambda _: 132)


@pytest.fixture(autouse=True)
def no_number_of_a_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sizes that are symbols refuse True and False as numbers, as they do in torch 2.11."""

    def strict(name: str) -> Callable[..., Any]:
        plain = getattr(torch.SymInt, name)

        def operate(self: torch.SymInt, other: Any) -> Any:
            if isinstance(other, (bool, torch.SymBool)):
                raise TypeError(f"{name} of a symbol and {other}")
            return plain(self, other)

        return operate

    for name in ("add", "sub", "mul", "floordiv", "radd", "rsub", "rmul", "rfloordiv"):
        monkeypatch.setattr(torch.SymInt, f"__{name}__", strict(f"__{name}__"))


class Case(NamedTuple):
    """A call, its inputs on the made-up device, and which arguments of its launches are written."""

    call: Callable[..., Any]
    inputs: Callable[[int], tuple[Tensor, ...]]
    launches: list[set[str]]


def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def states(n: int) -> tuple[Tensor, ...]:
    lse = torch.float32
    return make(n, 4, 64), make(n, 4, dtype=lse), make(n, 4, 64), make(n, 4, dtype=lse)


def integers(*shape: int) -> Tensor:
    return make(*shape, dtype=torch.int32)


def paged(n: int) -> tuple[Tensor, ...]:
    return make(n, 8, 64), make(4 * n, 16, 2, 64), make(4 * n, 16, 2, 64), integers(n, 4), integers(n)


def latent(n: int) -> tuple[Tensor, ...]:
    return make(n, 1, 16, 576), make(4 * n, 64, 1, 576), integers(n, 4), integers(n)


def packed(n: int) -> tuple[Tensor, ...]:
    return make(n, 8, 64), make(n, 2, 64), make(n, 2, 64), integers(n)


def decode(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Any:
    return tskernel.mha_decode_with_kvcache(q, k, v, table, lengths, 65536, return_lse=True)


def extend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, cu: Tensor) -> Any:
    return tskernel.mha_extend_with_kvcache(q, cu, k, v, table, lengths, q.shape[0], table.shape[1] * 16)


def prefill(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Any:
    return tskernel.mha_prefill(q, k, v, cu, q.shape[0], window_left=7, logit_cap=30.0)


def mla_decode(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Any:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128}
    return tskernel.mla_decode_with_kvcache(q, cache, table, lengths, 65536, **sizes)


def mla_extend(q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, cu: Tensor) -> Any:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128}
    return tskernel.mla_extend_with_kvcache(q.select(1, 0), cache, table, lengths, cu, q.shape[0], 256, **sizes)


def mla_prefill(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Any:
    return tskernel.mla_prefill(q, q, q.narrow(-1, 0, 32), cu, cu, q.shape[0], q.shape[0])


PARTS, JOINED = {"work"}, {"out", "lse"}
CASES = {
    "attn_merge_state": Case(tskernel.attn_merge_state, states, [{"out", "lse"}]),
    "mha_decode_with_kvcache": Case(decode, paged, [PARTS, JOINED]),
    "mha_extend_with_kvcache": Case(extend, lambda n: (*paged(n), integers(n + 1)), [{"out"}]),
    "mha_prefill": Case(prefill, packed, [{"out"}]),
    "mla_decode_with_kvcache": Case(mla_decode, latent, [PARTS, {"out"}]),
    "mla_extend_with_kvcache": Case(mla_extend, lambda n: (*latent(n), integers(n + 1)), [{"out"}]),
    "mla_prefill": Case(mla_prefill, packed, [{"out"}]),
}


class Module(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)


def exported(case: Case, *, dynamic: bool) -> torch.export.ExportedProgram:
    """Export with a first dimension of 5, for any number from 2 on if dynamic."""
    inputs, n = case.inputs(5), torch.export.Dim("n", min=2, max=4096)
    sizes = {5: n, 6: n + 1, 20: 4 * n}
    shapes = tuple({0: sizes[x.shape[0]]} for x in inputs) if dynamic else None
    return torch.export.export(Module(case.call), inputs, dynamic_shapes=shapes and (shapes,))


def launches(program: torch.export.ExportedProgram) -> list[Any]:
    name = "triton_kernel_wrapper_functional"
    return [n for n in program.graph.nodes if n.op == "call_function" and name in str(n.target)]


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_body_is_in_the_graph_and_writes_its_results_only(name: str, dynamic: bool) -> None:
    case = CASES[name]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        program = exported(case, dynamic=dynamic)
    program = export.bind(program, "sm90", overrides={name: "triton"})
    assert [b.inlined for b in export.bindings(program)] == [True]
    constraints = str(program.range_constraints)
    with mode:
        program = program.run_decompositions({}, decompose_custom_triton_ops=True)
    found = launches(program)
    assert not [n for n in program.graph.nodes if "tokenspeed" in str((n.target, n.args))]
    assert [set(n.kwargs["tensors_to_clone"]) for n in found] == case.launches
    assert str(program.range_constraints) == constraints, "the body asked for a size"
    for node in program.graph.nodes:
        if dynamic and node.op == "placeholder":
            assert isinstance(node.meta["val"].shape[0], torch.SymInt), "the body fixed a size"


@pytest.fixture
def made_up_device(sm90: None) -> Iterator[None]:
    set_platform(torch.device("cuda", 0), PlatformInfo.named("sm90"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    forget_platforms()


@pytest.mark.usefixtures("made_up_device")
@pytest.mark.parametrize("name", CASES)
def test_inline_mode_traces_the_body_also_where_every_size_is_a_symbol(name: str) -> None:
    case, seen, mode = CASES[name], [], FakeTensorMode(allow_non_fake_inputs=True)

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(module.graph)
        return module.forward

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    compiled = torch.compile(Module(case.call), fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad(), tskernel.inline(), tskernel.kernel_override("attention", name, "triton"), mode:
        for rows in (5, 9):
            compiled(*case.inputs(rows))
    (graph,) = seen  # a second number of rows compiles nothing
    assert not [n for n in graph.nodes if "tokenspeed" in str((n.target, n.args))]
    found = [n for n in graph.nodes if "triton_kernel_wrapper_functional" in str(n.target)]
    assert [set(n.kwargs["tensors_to_clone"]) for n in found] == case.launches
