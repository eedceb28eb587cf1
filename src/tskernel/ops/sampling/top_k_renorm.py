"""top_k_renorm: keep the k most likely tokens of each row and make them sum to one."""

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
    effective_top_k,
    normalized,
    unsorted,
)


@op(
    out=True,
    roles=("probs",),
    traits={"vocab": 128256},
    shard={"batch": {"probs": 0, "top_k": 0, "return": 0}},
)
def top_k_renorm(probs: Tensor, top_k: Tensor) -> Tensor:
    """Keep exactly the ``top_k`` largest probabilities of each row, divide them by their sum and set the rest to 0.

    Equal probabilities are kept by lowest id. ``top_k <= 0`` or ``>= V`` keeps the whole row. NaN and negative entries
    count as 0; a row without mass gives zeros. The input is not changed.

    Shapes: ``probs [B, V]`` (any strides), ``top_k [B]`` -> ``[B, V]``, contiguous.
    Dtypes: ``probs`` fp32, fp16 or bf16, the result alike; ``top_k`` int32; the sum in fp32, one rounding.
    Raises: ValueError when V is 0 or ``top_k`` does not have B elements.
    """
    x = clean_probs(probs, wide(probs))
    _, ids = best_first(x)
    rank = torch.arange(x.shape[1], device=x.device)
    keep = unsorted(rank < effective_top_k(top_k, x.shape[1]), ids)
    return normalized(x, keep).to(probs.dtype).contiguous()


@top_k_renorm.check
def _(probs: Tensor, top_k: Tensor) -> None:
    check_rows("probs", probs)
    check_per_row("top_k", top_k, probs, torch.int32)


@top_k_renorm.fake
def _(probs: Tensor) -> Tensor:
    return empty(probs.shape, probs)


@top_k_renorm.trait_values
def _(probs: Tensor) -> dict[str, object]:
    return {"vocab": probs.shape[1]}


@top_k_renorm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, shape in {"ordinary": (4, 256), "one": (1, 1), "odd": (3, 769), "empty": (0, 64)}.items():
        probs = make.randn(shape, torch.float32).softmax(-1).to(dtype)
        yield Sample(name, probs=probs, top_k=make.randint(0, 40, shape[:1], torch.int32))
    probs = make.randn((128, 5), torch.float32).softmax(0).to(dtype).t()
    yield Sample("transposed", probs=probs, top_k=make.randint(-1, 200, (5,), torch.int32))


@top_k_renorm.cost
def _(probs: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(probs), flops=3 * probs.numel())
