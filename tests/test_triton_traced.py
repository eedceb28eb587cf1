"""Triton bodies in graphs, traced with made-up CUDA tensors: what an AOTInductor package would carry is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tskernel
from tskernel import export

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Target:
    """What Triton asks a driver while it finds out what a kernel writes: nothing is compiled to the end or run."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def sm90() -> Iterator[None]:
    driver = pytest.importorskip("triton.runtime.driver", reason="traces Triton kernels").driver
    before = driver._active
    driver._active = Target()
    yield
    driver._active = before


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


CASES = {
    "attn_merge_state": Case(tskernel.attn_merge_state, states, [{"out", "lse"}]),
}


class Module(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)


def exported(case: Case, *, dynamic: bool) -> torch.export.ExportedProgram:
    """Export with a first dimension of 5, for any number from 2 on if dynamic."""
    shapes = ({0: torch.export.Dim("n", min=2, max=65536)},) * len(case.inputs(5)) if dynamic else None
    return torch.export.export(Module(case.call), case.inputs(5), dynamic_shapes=shapes and (shapes,))


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
