"""The rotation that the rope ops share, its checks and its samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tskernel.library import FLOATS, Make, expect, expect_dim, expect_dtype, expect_shape, wide


def as_heads(x: Tensor, head_size: int | None) -> Tensor:
    """View flat rows ``[T, H * head_size]`` as ``[T, H, head_size]``; any strides can be viewed so."""
    if x.dim() == 3 or head_size is None:
        return x
    return x.unflatten(-1, (x.shape[-1] // head_size, head_size))


def cos_sin(positions: Tensor, cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine rows ``[T, 1, rotary_dim / 2]`` of each position; outside the cache: 1 and 0."""
    rows = positions.to(torch.int64)
    known = ((rows >= 0) & (rows < cache.shape[0])).view(-1, 1, 1)
    angles = cache.index_select(0, rows.clamp(0, cache.shape[0] - 1)).to(dtype).unsqueeze(1)
    half = cache.shape[1] // 2
    return torch.where(known, angles[..., :half], 1.0), torch.where(known, angles[..., half:], 0.0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Return the rotated leading ``rotary_dim`` channels of ``x [T, H, D]``, unrounded."""
    width = 2 * cos.shape[-1]
    h = x[..., :width].to(cos.dtype)
    if is_neox:
        a, b = h[..., : width // 2], h[..., width // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = h[..., 0::2], h[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rope(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Return ``x [T, H, D]`` with its leading channels rotated and the others as they are, contiguous."""
    tail = x[..., 2 * cos.shape[-1] :]
    return torch.cat((rotated(x, cos, sin, is_neox).to(x.dtype), tail), dim=-1).contiguous()


def rope_(positions: Tensor, q: Tensor, k: Tensor, cache: Tensor, is_neox: bool, head_size: int | None) -> None:
    """Rotate ``q`` and ``k`` in place; the channels behind ``rotary_dim`` are not written."""
    cos, sin = cos_sin(positions, cache, wide(q))
    for x in (as_heads(q, head_size), as_heads(k, head_size)):
        x[..., : cache.shape[1]].copy_(rotated(x, cos, sin, is_neox))


def head_dim(x: Tensor, head_size: int | None) -> int:
    """Return the size of one head."""
    return x.shape[-1] if head_size is None else head_size


def check_rope(positions: Tensor, q: Tensor, k: Tensor, cache: Tensor, head_size: int | None) -> None:
    """Check everything the rope ops have in common."""
    expect_dtype("q", q, FLOATS)
    expect_dtype("k", k, (q.dtype,))
    expect_dtype("positions", positions, (torch.int64, torch.int32))
    expect_dtype("cos_sin_cache", cache, FLOATS)
    check_flat_or_heads("q", q, head_size)
    check_flat_or_heads("k", k, head_size)
    expect_dim("k", k, q.dim())
    size = head_dim(q, head_size)
    if head_size is None:
        expect_shape("k", k, (None, None, size))
    expect(k.shape[0] == q.shape[0], "k.shape[0]", f"{q.shape[0]} tokens, as q", k.shape[0])
    expect_shape("positions", positions, (q.shape[0],))
    expect_dim("cos_sin_cache", cache, 2)
    expect(cache.shape[0] > 0, "cos_sin_cache.shape", "at least one position", tuple(cache.shape))
    expect(cache.shape[1] % 2 == 0, "cos_sin_cache.shape[1]", "an even rotary_dim", cache.shape[1])
    expect(cache.shape[1] <= size, "cos_sin_cache.shape[1]", f"at most the head size, {size}", cache.shape[1])


def check_flat_or_heads(name: str, x: Tensor, head_size: int | None) -> None:
    if head_size is None:
        expect(x.dim() == 3, f"{name}.shape", "[T, H, D], or flat with head_size given", tuple(x.shape))
        return
    expect(head_size > 0, "head_size", "at least 1", head_size)
    expect_dim(name, x, 2, 3)
    if x.dim() == 2:
        expect(x.shape[1] % head_size == 0, f"{name}.shape[1]", f"a multiple of head_size {head_size}", x.shape[1])
    else:
        expect_shape(name, x, (None, None, head_size))


def rope_traits(cache: Tensor, is_neox: bool, size: int) -> dict[str, object]:
    """Return the traits every rope op states."""
    return {"rotary_dim": cache.shape[1], "head_dim": size, "is_neox": is_neox}


def rope_samples(make: Make, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield named arguments of the rope ops, each with a ``name``; q and k own their storage."""
    sizes = {
        "ordinary": (5, 4, 2, 64, 64),
        "one": (1, 1, 1, 2, 2),
        "odd": (3, 7, 1, 77, 30),
        "empty": (0, 4, 2, 64, 64),
    }
    for name, (t, hq, hk, d, r) in sizes.items():
        for is_neox in (True, False):
            args = _rope_args(make, dtype, t, r) | {"is_neox": is_neox}
            yield {
                "name": f"{name}_{is_neox}",
                "q": make.randn((t, hq, d), dtype),
                "k": make.randn((t, hk, d), dtype),
                **args,
            }
    args = _rope_args(make, dtype, 5, 0)
    yield {"name": "no_rotary", "q": make.randn((5, 2, 8), dtype), "k": make.randn((5, 1, 8), dtype), **args}
    args = _rope_args(make, dtype, 5, 16)
    args["positions"] = args["positions"].to(torch.int32)
    flat = make.randn((5, 8 * 16), dtype)
    yield {"name": "flat", "q": flat[:, :64], "k": flat[:, 64:96], "head_size": 16, **args}
    qkv = make.randn((5, 8, 16), dtype)
    yield {"name": "sliced", "q": qkv[:, :4], "k": qkv[:, 4:6], "is_neox": False, **args}
    q, k = make.randn((16, 5, 4), dtype).permute(1, 2, 0), make.randn((5, 1, 40), dtype)[..., 3:19]
    args = _rope_args(make, torch.float32, 5, 8) | {"positions": make.tensor([0, -1, 10**6, 31, 2], torch.int64)}
    yield {"name": "strided", "q": q, "k": k, **args}


def _rope_args(make: Make, dtype: torch.dtype, tokens: int, rotary_dim: int) -> dict[str, Any]:
    angle = make.randn((32, rotary_dim // 2), torch.float32)
    cache = torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)
    return {"positions": make.randint(0, 32, (tokens,), torch.int64), "cos_sin_cache": cache}
