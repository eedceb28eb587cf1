"""top_p_renorm: keep the nucleus of each row and make it sum to one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op, wide
from tskernel.ops.sampling._filters import (
    best_first,
    check_per_row,
    check_rows,
    clean_probs,
    normalized,
    shortest_prefix,
    unsorted,
)


@op(
    out=True,
    roles=("probs",),
    traits={"vocab": 128256},
    shard={"batch": {"probs": 0, "top_p": 0, "return": 0}},
)
def top_p_renorm(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the shortest best-first prefix of each row with at least ``top_p`` of its mass, divided by its sum.

    ``top_p`` is a share of the sum of the row, so rows need not be normalised. Equal probabilities are ranked by
    lowest id. ``top_p >= 1`` keeps the whole row and ``top_p <= 0`` the best token alone. NaN and negative entries
    count as 0; a row without mass gives zeros. The input is not changed.

    Shapes: ``probs [B, V]`` (any strides), ``top_p [B]`` -> ``[B, V]``, contiguous.
    Dtypes: ``probs`` fp32, fp16 or bf16, the result alike; ``top_p`` fp32; prefix sums in fp64, the division in fp32.
    Raises: ValueError when V is 0 or ``top_p`` does not have B elements.
    Source: Holtzman et al. 2020, https://arxiv.org/abs/1904.09751.
    """
    x = clean_probs(probs, wide(probs))
    values, ids = best_first(x)
    keep = unsorted(shortest_prefix(values, top_p), ids)
    return normalized(x, keep).to(probs.dtype).contiguous()


@top_p_renorm.check
def _(probs: Tensor, top_p: Tensor) -> None:
    check_rows("probs", probs)
    check_per_row("top_p", top_p, probs, torch.float32)


@top_p_renorm.fake
def _(probs: Tensor) -> Tensor:
    return empty(probs.shape, probs)


@top_p_renorm.trait_values
def _(probs: Tensor) -> dict[str, object]:
    return {"vocab": probs.shape[1]}


@top_p_renorm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (4, 256), "one": (1, 1), "odd": (3, 769), "empty": (0, 64)}.items():
        probs = make.randn(shape, torch.float32).softmax(-1).to(dtype)
        yield Sample(name, probs=probs, top_p=make.rand(shape[:1], torch.float32))
    probs = make.randn((128, 5), torch.float32).softmax(0).to(dtype).t()
    yield Sample("transposed", probs=probs, top_p=make.rand((5,), torch.float32) * 1.5)


@top_p_renorm.cost
def _(probs: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(probs), flops=4 * probs.numel())
