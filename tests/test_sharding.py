"""DTensor: every declared sharding is right, and torch applies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import primary_samples, tensors_in
from processes import run_python
from torch import Tensor

from tskernel._torch.sharding import cut_dims, output_shapes
from tskernel.library import Op, Sample, ops
from tskernel.testing import clone_arguments, compare

RANKS = 2
STRATEGIES = [pytest.param(o, s, id=f"{o.name}-{s}") for o in ops.values() for s in o.shard]


def part(value: Any, dim: Any, rank: int) -> Any:
    return value if dim is None or not isinstance(value, Tensor) else value.tensor_split(RANKS, dim)[rank]


def cut_of(op: Op, name: str, sample: Sample, result: Any) -> dict[str, Any]:
    """Return what the strategy cuts for a sample; nothing where a rank would be left without a part."""
    shapes = {n: tuple(v.shape) for n, v in sample.arguments.items() if isinstance(v, Tensor)}
    strategy = cut_dims(op, op.shard[name], {**shapes, **output_shapes(op, "", result)}, RANKS)
    return strategy if all(shapes[n][d] >= RANKS for n, d in strategy.items() if n in shapes) else {}


def one_rank(op: Op, strategy: Mapping[str, Any], sample: Sample, rank: int) -> list[Tensor]:
    arguments = {k: part(v, strategy.get(k), rank) for k, v in clone_arguments(sample.arguments).items()}
    result = op.front(**arguments)
    return [arguments[n] for n in op.mutates] if op.mutates else tensors_in(result)


@pytest.mark.parametrize(("op", "name"), STRATEGIES)
def test_ranks_together_compute_the_whole(op: Op, name: str) -> None:
    """Cut the inputs as declared, call once per rank, and put the outputs together as declared."""
    checked = 0
    outputs = op.mutates or tuple("return" + (str(i) if i else "") for i in range(op.signature.num_returns))
    for _, sample in primary_samples(op):
        if "partial" in op.shard[name].values():  # each part is rounded before the sum: not while testing the rule
            sample.arguments["out_dtype"] = torch.float32
        whole = clone_arguments(sample.arguments)
        result = op.front(**whole)
        strategy = cut_of(op, name, sample, result)
        if not strategy:
            continue
        ranks = [one_rank(op, strategy, sample, rank) for rank in range(RANKS)]
        want = [whole[n] for n in op.mutates] if op.mutates else tensors_in(result)
        for output, parts, expected in zip(outputs, zip(*ranks, strict=True), want, strict=True):
            dim = strategy.get(output)
            if dim is None:
                for value in parts:
                    compare(value, expected)
            else:
                compare(sum(parts) if dim == "partial" else torch.cat(parts, dim), expected)
        checked += 1
    assert checked, "no sample can be cut"


SETUP = """
import sys, warnings
import torch, tskernel
assert not any("torch.distributed.tensor" in m for m in sys.modules), "the rules are to be loaded lazily"
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
assert "tskernel._torch.sharding" not in sys.modules
torch.set_grad_enabled(False)
mesh = init_device_mesh("cpu", (4,))

def cut(value, *placements):
    # The fake process group moves no data: take this rank's part by hand.
    local = value
    for p in placements:
        local = local.chunk(4, p.dim)[1].clone() if isinstance(p, Shard) else local
    return DTensor.from_local(local, mesh, placements, shape=value.shape, stride=value.stride())

def check(result, placement, whole):
    assert result.placements == (placement,), result.placements
    assert result.shape == whole.shape
    part = whole.chunk(4, placement.dim)[1] if isinstance(placement, Shard) else whole
    torch.testing.assert_close(result.to_local(), part)
"""
DTENSOR = """
x, r, w = torch.randn(8, 16), torch.randn(8, 16), torch.rand(16)
check(tskernel.rmsnorm(cut(x, Shard(0)), cut(w, Replicate())), Shard(0), tskernel.rmsnorm(x, w))
assert "tskernel._torch.sharding" in sys.modules
check(torch.ops.tokenspeed.rmsnorm(cut(x, Shard(0)), cut(w, Replicate())), Shard(0), tskernel.rmsnorm(x, w))

dx, dr = cut(x, Shard(0)), cut(r, Shard(0))
tskernel.fused_add_rmsnorm(dx, dr, cut(w, Replicate()))
tskernel.fused_add_rmsnorm(x, r, w)
check(dx, Shard(0), x)
check(dr, Shard(0), r)

q, k, v = torch.randn(6, 8, 16), torch.randn(6, 4, 16), torch.randn(6, 4, 16)
cu, sinks = torch.tensor([0, 2, 6], dtype=torch.int32), torch.randn(8)
got = tskernel.mha_prefill(
    *(cut(t, Shard(1)) for t in (q, k, v)), cut(cu, Replicate()), 4, sinks=cut(sinks, Shard(0)), return_lse=True
)
for g, whole in zip(got, tskernel.mha_prefill(q, k, v, cu, 4, sinks=sinks, return_lse=True)):
    check(g, Shard(1), whole)

a, b, bias = torch.randn(8, 16), torch.randn(12, 16), torch.randn(12)
check(tskernel.mm(cut(a, Shard(0)), cut(b, Replicate())), Shard(0), tskernel.mm(a, b))
columns = tskernel.mm(cut(a, Replicate()), cut(b, Shard(0)), bias=cut(bias, Shard(0)))
check(columns, Shard(1), tskernel.mm(a, b, bias=bias))

a, b = torch.randn(8, 16), torch.randn(12, 16)
row_parallel = [cut(a, Shard(1)), cut(b, Shard(1))]
part = tskernel.mm(*row_parallel)
assert part.placements == (Partial(),), part.placements
torch.testing.assert_close(part.to_local(), a.chunk(4, 1)[1] @ b.chunk(4, 1)[1].T)
assert tskernel.mm(*row_parallel, bias=cut(torch.randn(12), Replicate())).placements != (Partial(),), "bias four times"

cache = torch.zeros(2, 4, 4, 16)
dk, dv = cut(cache, Shard(2)), cut(cache, Shard(2))
slots = torch.tensor([0, 3, 5, -1, 7, 6])
tskernel.store_kvcache(cut(k, Shard(1)), cut(v, Shard(1)), dk, dv, cut(slots, Replicate()))
whole_k, whole_v = cache.clone(), cache.clone()
tskernel.store_kvcache(k, v, whole_k, whole_v, slots)
check(dk, Shard(2), whole_k)
check(dv, Shard(2), whole_v)
print("ok")
"""


def test_torch_applies_the_rules_to_dtensors() -> None:
    """On one rank of four: norms shard tokens, attention heads, a matrix product rows or columns, caches heads."""
    assert run_python(SETUP + DTENSOR).strip() == "ok"
