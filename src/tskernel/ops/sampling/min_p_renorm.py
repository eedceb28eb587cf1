"""min_p_renorm: drop the tokens far less likely than the best one and make the rest sum to one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op, wide
from tskernel.ops.sampling._filters import check_per_row, check_rows, clean_probs, normalized


@op(
    out=True,
    roles=("probs",),
    traits={"vocab": 128256},
    shard={"batch": {"probs": 0, "min_p": 0, "return": 0}},
)
def min_p_renorm(probs: Tensor, min_p: Tensor) -> Tensor:
    """Keep the tokens with ``p >= min_p * max(p)`` of each row, divided by their sum; the rest is 0.

    The test is scale-free: a row need not be normalised, and earlier renormalising changes nothing. ``min_p <= 0``
    keeps the whole row; ``min_p > 1`` acts like 1 and keeps the best token and its equals. NaN and negative entries
    count as 0; a row without mass gives zeros. The input is not changed.

    Shapes: ``probs [B, V]`` (any strides), ``min_p [B]`` -> ``[B, V]``, contiguous.
    Dtypes: ``probs`` fp32, fp16 or bf16, the result alike; ``min_p`` fp32; the product is compared unrounded (in fp64).
    Raises: ValueError when V is 0 or ``min_p`` does not have B elements.
    Source: Nguyen et al. 2024, https://arxiv.org/abs/2407.01082.
    """
    x = clean_probs(probs, wide(probs))
    best = x.amax(-1, keepdim=True).to(torch.float64)
    keep = x >= best * min_p.to(torch.float64).clamp(max=1.0).unsqueeze(1)
    return normalized(x, keep).to(probs.dtype).contiguous()


@min_p_renorm.check
def _(probs: Tensor, min_p: Tensor) -> None:
    check_rows("probs", probs)
    check_per_row("min_p", min_p, probs, torch.float32)


@min_p_renorm.fake
def _(probs: Tensor) -> Tensor:
    return empty(probs.shape, probs)


@min_p_renorm.trait_values
def _(probs: Tensor) -> dict[str, object]:
    return {"vocab": probs.shape[1]}


@min_p_renorm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (4, 256), "one": (1, 1), "odd": (3, 769), "empty": (0, 64)}.items():
        probs = make.randn(shape, torch.float32).softmax(-1).to(dtype)
        yield Sample(name, probs=probs, min_p=make.rand(shape[:1], torch.float32) * 0.3)
    probs = make.randn((128, 5), torch.float32).softmax(0).to(dtype).t()
    yield Sample("transposed", probs=probs, min_p=make.rand((5,), torch.float32) * 1.5)


@min_p_renorm.cost
def _(probs: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(probs), flops=3 * probs.numel())
