"""gemma_rmsnorm: rmsnorm whose stored weight is an offset from one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op, wide
from tskernel.ops.norm._math import check_rows, check_weight, normalize_rms


@op(
    out=True,
    roles=("x",),
    traits={"hidden": 3072, "contiguous": True},
    shard={"tokens": {"x": 0, "return": 0}},
    vmap=("x",),
)
def gemma_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide each row of ``x`` by its root-mean-square, then multiply by ``1 + weight``.

    Shapes: ``x [..., H]`` (any strides), ``weight [H]`` -> ``[..., H]``, contiguous, never aliasing ``x``.
    Dtypes: ``x`` fp32, fp16 or bf16; ``weight`` like ``x`` or fp32; ``1 + weight``, statistics and product in fp32,
    one rounding.
    Raises: ValueError when H is 0, or ``weight`` does not have H elements.
    Source: Gemma Team 2024, https://arxiv.org/abs/2403.08295 (released models store the weight minus one).
    """
    w = wide(x)
    return normalize_rms(x.to(w), weight.to(w) + 1.0, eps).to(x.dtype).contiguous()


@gemma_rmsnorm.check
def _(x: Tensor, weight: Tensor) -> None:
    check_rows("x", x)
    check_weight("weight", weight, x)


@gemma_rmsnorm.fake
def _(x: Tensor) -> Tensor:
    return empty(x.shape, x)


@gemma_rmsnorm.trait_values
def _(x: Tensor) -> dict[str, object]:
    return {"hidden": x.shape[-1], "contiguous": x.is_contiguous()}


@gemma_rmsnorm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (7, 64), "one": (1, 1), "odd": (3, 5, 769), "empty": (0, 64)}.items():
        yield Sample(name, x=make.randn(shape, dtype), weight=make.randn(shape[-1:], dtype))
    yield Sample("transposed", x=make.randn((64, 7), dtype).t(), weight=make.randn((64,), dtype), eps=1e-3)
    yield Sample("sliced", x=make.randn((5, 3, 80), dtype)[:, 1:, 7:71], weight=make.randn((64,), torch.float32))


@gemma_rmsnorm.cost
def _(x: Tensor, weight: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(weight), flops=4 * x.numel())
