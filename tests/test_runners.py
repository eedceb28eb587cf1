"""What a runner remembers of its first call: how the output looks, and nothing that a later call may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import each_op, primary_samples
from torch import Tensor

import tskernel
from tskernel._torch import runners
from tskernel.dispatch.spec import KernelSpec, argument_names
from tskernel.library import Op, ops


def look(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


@each_op()
def test_a_later_output_looks_like_the_one_that_the_op_allocates(op: Op) -> None:
    for _, sample in primary_samples(op):
        arguments = op.fill(sample.arguments)
        first = op.allocate(arguments)
        if isinstance(first, Tensor):
            again = runners._allocator(op, arguments, first)(arguments)
            assert look(again) == look(first)
            assert again.untyped_storage()._cdata != first.untyped_storage()._cdata


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut out of a wider buffer"])
def test_outputs_of_repeated_calls_are_contiguous_and_apart(cut: bool) -> None:
    wide = torch.randn(3, 2, 48)
    x = wide[..., 8:40] if cut else wide
    results = [tskernel.silu_and_mul(x) for _ in range(3)]
    assert all(r.is_contiguous() for r in results)
    assert len({r.data_ptr() for r in results}) == 3


def test_an_output_whose_size_no_look_covers_is_worked_out_for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ops["mha_decode_with_kvcache"]

    def sized(q: Tensor, max_seqlen_k: int) -> Tensor:
        return q.new_empty(max_seqlen_k)

    assert "max_seqlen_k" in op.dynamic and "max_seqlen_k" in argument_names(sized)
    monkeypatch.setattr(op, "_raw_hooks", {**op._raw_hooks, "fake": sized})
    place = op.signature.index("max_seqlen_k")

    def allocate(arguments: Sequence[Any]) -> Tensor:
        return sized(arguments[0], arguments[place])

    monkeypatch.setattr(op, "allocate", allocate)
    _, sample = next(iter(primary_samples(op)))
    arguments = list(op.fill(sample.arguments))
    make = runners._allocator(op, arguments, op.allocate(arguments))
    arguments[place] += 5
    assert make(arguments).shape == (arguments[place],)


def test_a_kernel_writes_rows_of_consecutive_elements_wherever_the_caller_wants_them() -> None:
    """``out`` may have any strides: a kernel that writes dense rows must not touch what lies between its elements."""
    seen: list[tuple[int, ...]] = []

    def kernel(x: Tensor, *, out: Tensor) -> None:
        seen.append(out.stride())
        out.as_strided(out.shape, (out.stride(0), 1)).copy_(2 * x)  # what `out + column` addresses

    spec = KernelSpec("test/out", "activation", "silu_and_mul", "test", "cpu", kernel, writes_out=True)
    run = runners.make_runner(ops["silu_and_mul"], spec, "out")
    x, wide = torch.randn(3, 4), torch.full((3, 8), -7.0)
    run(x, wide[:, ::2])
    assert torch.equal(wide[:, ::2], 2 * x) and bool((wide[:, 1::2] == -7).all())
    run(x, wide[:, :4])
    assert torch.equal(wide[:, :4], 2 * x) and bool((wide[:, 5::2] == -7).all())
    assert seen == [(4, 1), (8, 1)]
