"""Padded attention through torch's scaled_dot_product_attention, with the meaning that the attention ops have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tskernel.ops.attention._layout import Paged


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend row i of ``q [B, L, Hq, D]`` to rows 0 to i of ``k [B, L, Hkv, D]`` and ``v [B, L, Hkv, Dv]``."""
    return _sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, scale).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attend ``q [B, Lq, Hq, D]`` where ``seen [B, Lq, Lk]``; a row that sees no key gives 0.

    k and v must be finite in sequences where some row sees a key: a masked NaN is not harmless.
    """
    some = seen.any(-1, keepdim=True)
    # Backends differ on rows without a key: show those all keys and drop what comes of it.
    mask = (seen | ~some).unsqueeze(1)
    out = _sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scale).transpose(1, 2)
    return torch.where(some.unsqueeze(-1), out, 0)


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Do as ``attend`` for few rows: the query heads of one KV head become rows, so that its keys are read once."""
    group = q.shape[2] // k.shape[2]
    rows = q.unflatten(2, (k.shape[2], group)).transpose(2, 3).flatten(1, 2)  # [B, Lq * G, Hkv, D]
    out = attend(rows, k, v, seen.repeat_interleave(group, 1), scale)
    return out.unflatten(1, (q.shape[1], group)).transpose(2, 3).flatten(2, 3)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    width, value_width = q.shape[-1], v.shape[-1]
    if value_width < width:  # the fused kernels take one width
        v = pad(v, (0, width - value_width))
    q, k, v = aligned(q), aligned(k), aligned(v)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=bool(q.shape[1] != k.shape[1])
    )
    return out[..., :value_width]


def aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor whose rows do not start on 16 bytes: CUDA's fused kernels fault on such a view."""
    if torch.compiler.is_compiling():
        return tensor  # Inductor aligns the inputs of attention itself
    step = max(16 // tensor.element_size(), 1)
    if tensor.storage_offset() % step or any(stride % step for stride in tensor.stride()[:-1]):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def live_tokens(paged: Paged, lengths: Tensor, first: Tensor | int) -> Tensor:
    """Return the slot of every key in gathered pages, ``[batch * longest]``.

    Keys outside ``first`` to the length, whose memory may hold NaN, stand for the nearest live one: the mask gives them
    weight 0, and a finite value times 0 is 0. That is cheaper than to overwrite them.
    """
    key = torch.arange(paged.longest, device=lengths.device)
    token = torch.maximum(key, first.unsqueeze(1)) if isinstance(first, Tensor) else key
    token = torch.minimum(token, lengths.to(torch.int64).unsqueeze(1) - 1).clamp(min=0)
    start = torch.arange(paged.batch, device=lengths.device).unsqueeze(1) * paged.longest
    return (start + token).flatten()


def gather_tokens(paged: Paged, cache: Tensor, tokens: Tensor) -> Tensor:
    """Return the keys or values at ``live_tokens``, ``[batch, longest, heads, width]``."""
    return paged.gather(cache).flatten(0, 1).index_select(0, tokens).unflatten(0, (paged.batch, paged.longest))
