"""qk_rmsnorm: rmsnorm of every query head and every key head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, expect, expect_dtype, expect_shape, nbytes, op, wide
from tskernel.ops.norm._math import check_rows, check_weight, normalize_rms


@op(
    roles=("q", "k"),
    traits={"hidden": 128, "contiguous": True},
    shard={
        "tokens": {"q": 0, "k": 0, "return": 0, "return1": 0},
        "heads": {"q": 1, "k": 1, "return": 1, "return1": 1},
    },
    vmap=("q", "k"),
)
def qk_rmsnorm(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Apply ``rmsnorm`` to each head of ``q`` with ``q_weight`` and to each head of ``k`` with ``k_weight``.

    Shapes: ``q [..., Hq, D]``, ``k [..., Hkv, D]`` (any strides: slices of one qkv tensor are fine), ``q_weight [D]``,
    ``k_weight [D]`` -> two tensors shaped like ``q`` and ``k``, contiguous, never aliasing them.
    Dtypes: ``q`` and ``k`` fp32, fp16 or bf16, the same; each weight like them or fp32; statistics and product in fp32,
    one rounding.
    Raises: ValueError when D is 0 or differs between ``q`` and ``k``, or so do leading dimensions, or a weight does
    not have D elements.
    Source: Henry et al. 2020, https://arxiv.org/abs/2010.04245, with the rmsnorm of Zhang & Sennrich 2019.
    """
    w = wide(q)
    q_out = normalize_rms(q.to(w), q_weight.to(w), eps).to(q.dtype).contiguous()
    k_out = normalize_rms(k.to(w), k_weight.to(w), eps).to(k.dtype).contiguous()
    return q_out, k_out


@qk_rmsnorm.check
def _(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
    check_rows("q", q)
    expect(q.dim() >= 2, "q.shape", "[..., heads, D]", tuple(q.shape))
    expect_shape("k", k, (*q.shape[:-2], None, q.shape[-1]))
    expect_dtype("k", k, (q.dtype,))
    check_weight("q_weight", q_weight, q)
    check_weight("k_weight", k_weight, k)


@qk_rmsnorm.fake
def _(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return empty(q.shape, q), empty(k.shape, k)


@qk_rmsnorm.trait_values
def _(q: Tensor, k: Tensor) -> dict[str, object]:
    return {"hidden": q.shape[-1], "contiguous": q.is_contiguous() and k.is_contiguous()}


@qk_rmsnorm.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for name, (t, hq, hk, d) in {
        "ordinary": (5, 4, 2, 64),
        "one": (1, 1, 1, 1),
        "odd": (3, 7, 1, 77),
        "empty": (0, 4, 2, 64),
    }.items():
        q, k = make.randn((t, hq, d), dtype), make.randn((t, hk, d), dtype)
        yield Sample(name, q=q, k=k, q_weight=make.randn((d,), dtype), k_weight=make.randn((d,), dtype))
    qkv = make.randn((5, 8, 64), dtype)
    weights = {"q_weight": make.randn((64,), torch.float32), "k_weight": make.randn((64,), torch.float32)}
    yield Sample("sliced", q=qkv[:, :4], k=qkv[:, 4:6], **weights, eps=1e-3)
    q, k = make.randn((64, 3, 5), dtype).permute(2, 1, 0), make.randn((2, 5, 1, 64), dtype)[1]
    yield Sample("permuted", q=q, k=k, **weights)


@qk_rmsnorm.cost
def _(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(q, k) + nbytes(q_weight, k_weight), flops=4 * (q.numel() + k.numel()))
