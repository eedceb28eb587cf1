"""apply_rope_: rotary position embedding of queries and keys, in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, nbytes, op
from tskernel.ops.embedding._rope import check_rope, head_dim, rope_, rope_samples, rope_traits


@op(
    mutates=("q", "k"),
    roles=("q", "cos_sin_cache"),
    traits={"rotary_dim": 128, "head_dim": 128, "is_neox": True},
    shard={
        "tokens": {"positions": 0, "q": 0, "k": 0},
        "heads": {"q": 1, "k": 1},
    },
)
def apply_rope_(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    is_neox: bool = True,
    head_size: int | None = None,
) -> None:
    """Rotate ``q`` and ``k`` in place; everything else is as in ``apply_rope``.

    The channels behind ``rotary_dim``, and tokens whose position lies outside the cache, keep their values.
    ``q`` and ``k`` must not overlap in memory.

    Shapes: ``positions [T]``, ``q [T, Hq, D]``, ``k [T, Hkv, D]``, each written through its own strides,
    ``cos_sin_cache [max_pos, rotary_dim]`` with an even ``rotary_dim <= D``, 0 included; flat ``q [T, Hq * D]`` and
    ``k [T, Hkv * D]`` with ``head_size=D``.
    Dtypes: ``q`` and ``k`` fp32, fp16 or bf16, the same; ``cos_sin_cache`` any of these; ``positions`` int64 or int32;
    computed in fp32, one rounding.
    Raises: ValueError when shapes disagree, ``rotary_dim`` is odd or above D, or flat tensors come without
    ``head_size``.
    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864; the half split is that of GPT-NeoX.
    """
    rope_(positions, q, k, cos_sin_cache, is_neox, head_size)


@apply_rope_.check
def _(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, head_size: int | None) -> None:
    check_rope(positions, q, k, cos_sin_cache, head_size)


@apply_rope_.trait_values
def _(q: Tensor, cos_sin_cache: Tensor, is_neox: bool, head_size: int | None) -> dict[str, object]:
    return rope_traits(cos_sin_cache, is_neox, head_dim(q, head_size))


@apply_rope_.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for args in rope_samples(make, dtype):
        yield Sample(args.pop("name"), **args)


@apply_rope_.cost
def _(positions: Tensor, q: Tensor, k: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(q, k) + nbytes(positions), flops=3 * (q.numel() + k.numel()))
