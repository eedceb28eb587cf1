"""What an attention call must at least move and multiply, from metadata alone: lengths are taken at their bound."""

from __future__ import annotations

from torch import Tensor

from tskernel.checks import nbytes
from tskernel.library import Cost


def ragged_cost(q: Tensor, k: Tensor, v: Tensor, batch: int, is_causal: bool) -> Cost:
    """Return the cost of packed attention, as if all sequences were equally long; causal pairs count once."""
    rows, heads, width = q.shape
    pairs = rows * k.shape[0] // max(1, batch)
    flops = 2 * pairs * heads * (width + v.shape[2])
    out = rows * heads * v.shape[2] * q.element_size()
    return Cost(bytes=nbytes(q, k, v) + out, flops=flops // 2 if is_causal else flops)


def paged_cost(q: Tensor, batch: int, keys: int, key_bytes: int, value_width: int) -> Cost:
    """Return the cost of attention over ``keys`` cached tokens of ``key_bytes`` per sequence; ``q [..., H, D]``."""
    width = q.shape[-1]
    rows = q.numel() // width
    out = rows * value_width * q.element_size()
    return Cost(bytes=nbytes(q) + out + batch * keys * key_bytes, flops=2 * rows * keys * (width + value_width))


def token_bytes(*caches: Tensor) -> int:
    """Return how many bytes one token takes in the caches ``[pages, page_size, heads, width]``."""
    return sum(c.shape[2] * c.shape[3] * c.element_size() for c in caches)
