"""apply_rope: rotary position embedding of queries and keys, into fresh tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tskernel.library import Cost, Make, Sample, empty, nbytes, op, wide
from tskernel.ops.embedding._rope import as_heads, check_rope, cos_sin, head_dim, rope, rope_samples, rope_traits


@op(
    roles=("q", "cos_sin_cache"),
    traits={"rotary_dim": 128, "head_dim": 128, "is_neox": True},
    shard={
        "tokens": {"positions": 0, "q": 0, "k": 0, "return": 0, "return1": 0},
        "heads": {"q": 1, "k": 1, "return": 1, "return1": 1},
    },
)
def apply_rope(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    is_neox: bool = True,
    head_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rotary_dim`` channels of every head of ``q`` and ``k`` by the angles of the token's position.

    A row of ``cos_sin_cache`` holds the ``rotary_dim / 2`` cosines of a position, then its sines. With ``is_neox``
    channel i is paired with channel ``i + rotary_dim / 2`` (half split), otherwise channel ``2i`` with ``2i + 1``
    (interleaved); a pair (a, b) becomes (a cos - b sin, b cos + a sin). The channels behind ``rotary_dim`` are copied
    bit by bit. A position outside the cache (the padding of a recorded graph, say) reads no memory and leaves its
    token as it is.

    Shapes: ``positions [T]``, ``q [T, Hq, D]``, ``k [T, Hkv, D]`` (any strides), ``cos_sin_cache [max_pos,
    rotary_dim]`` with an even ``rotary_dim <= D``, 0 included; flat ``q [T, Hq * D]`` and ``k [T, Hkv * D]`` with
    ``head_size=D`` -> two tensors shaped like ``q`` and ``k``, contiguous, never aliasing them.
    Dtypes: ``q`` and ``k`` fp32, fp16 or bf16, the same; ``cos_sin_cache`` any of these; ``positions`` int64 or int32;
    computed in fp32, one rounding.
    Raises: ValueError when shapes disagree, ``rotary_dim`` is odd or above D, or flat tensors come without
    ``head_size``.
    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864; the half split is that of GPT-NeoX.
    """
    cos, sin = cos_sin(positions, cos_sin_cache, wide(q))
    q_out = rope(as_heads(q, head_size), cos, sin, is_neox)
    k_out = rope(as_heads(k, head_size), cos, sin, is_neox)
    return q_out.view(q.shape), k_out.view(k.shape)


@apply_rope.check
def _(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, head_size: int | None) -> None:
    check_rope(positions, q, k, cos_sin_cache, head_size)


@apply_rope.fake
def _(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return empty(q.shape, q), empty(k.shape, k)


@apply_rope.trait_values
def _(q: Tensor, cos_sin_cache: Tensor, is_neox: bool, head_size: int | None) -> dict[str, object]:
    return rope_traits(cos_sin_cache, is_neox, head_dim(q, head_size))


@apply_rope.samples
def _(make: Make, dtype: torch.dtype) -> Iterator[Sample]:
    for args in rope_samples(make, dtype):
        yield Sample(args.pop("name"), **args)


@apply_rope.cost
def _(positions: Tensor, q: Tensor, k: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(q, k) + nbytes(positions), flops=3 * (q.numel() + k.numel()))
