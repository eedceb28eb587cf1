"""moe_combine: the weighted sum of each token's expert outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import FLOATS, Cost, Make, Sample, empty, expect_dim, expect_dtype, expect_shape, nbytes, op, wide
from tskernel.ops.moe._experts import check_ids, weighted_sum


@op(
    out=True,
    roles={"x": "expert_out"},
    traits={"top_k": 8, "hidden": 2048},
    shard={"tokens": {"expert_out": 0, "topk_weights": 0, "topk_ids": 0, "return": 0}},
)
def moe_combine(expert_out: Tensor, topk_weights: Tensor, topk_ids: Tensor | None = None) -> Tensor:
    """Return ``sum_k topk_weights[t, k] * expert_out[t, k]``.

    With ``topk_ids``, choices whose id is negative are left out: neither their row nor their weight is read, so either
    may be NaN. (``moe_experts`` writes zeros for every choice without a local expert, so ids are only needed for
    weights that may be NaN.)

    Shapes: ``expert_out [T, top_k, H]`` (any strides), ``topk_weights`` and ``topk_ids`` ``[T, top_k]`` -> ``[T, H]``.
    Dtypes: ``expert_out`` fp32, fp16 or bf16, the result alike; ``topk_weights`` fp32, fp16 or bf16; ``topk_ids``
    int32 or int64; the sum in fp32, one rounding.
    Raises: ValueError when the shapes do not fit.
    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.
    """
    used = None if topk_ids is None else topk_ids >= 0
    return weighted_sum(expert_out.to(wide(expert_out)), topk_weights, used).to(expert_out.dtype)


@moe_combine.check
def _(expert_out: Tensor, topk_weights: Tensor, topk_ids: Tensor | None) -> None:
    expect_dtype("expert_out", expert_out, FLOATS)
    expect_dim("expert_out", expert_out, 3)
    expect_shape("topk_weights", topk_weights, expert_out.shape[:2])
    expect_dtype("topk_weights", topk_weights, FLOATS)
    if topk_ids is not None:
        check_ids("topk_ids", topk_ids, expert_out.shape[0])
        expect_shape("topk_ids", topk_ids, expert_out.shape[:2])


@moe_combine.fake
def _(expert_out: Tensor) -> Tensor:
    return empty((expert_out.shape[0], expert_out.shape[2]), expert_out)


@moe_combine.trait_values
def _(expert_out: Tensor) -> dict[str, object]:
    return {"top_k": expert_out.shape[1], "hidden": expert_out.shape[2]}


@moe_combine.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (7, 4, 64), "one": (1, 1, 1), "odd": (3, 5, 77), "empty": (0, 2, 8)}.items():
        yield Sample(name, expert_out=make.randn(shape, dtype), topk_weights=make.rand(shape[:2], torch.float32))
    outputs = make.randn((4, 6, 40), dtype).transpose(0, 1)[:, :, 3:35]
    weights, ids = make.rand((4, 6), torch.float32).t(), make.randint(-1, 4, (6, 4), torch.int32)
    yield Sample("strided, some left out", expert_out=outputs, topk_weights=weights, topk_ids=ids)


@moe_combine.cost
def _(expert_out: Tensor) -> Cost:
    return Cost(
        bytes=nbytes(expert_out) + nbytes(expert_out) // max(expert_out.shape[1], 1), flops=2 * expert_out.numel()
    )
