"""The rotation of the portable rope kernels: multiply-adds on the halves as they lie, without widening copies."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> None:
    """Write the rotated leading channels of ``x [T, H, D]`` to those of ``out``, which may be ``x``.

    fp32 ``cos`` and ``sin [T, 1, rotary_dim / 2]`` make type promotion compute in fp32; the copies round.
    """
    half = cos.shape[-1]
    even, odd = (slice(0, half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = x[..., even], x[..., odd]
    new_a = torch.addcmul(a * cos, b, sin, value=-1)
    new_b = torch.addcmul(b * cos, a, sin)
    out[..., even].copy_(new_a)
    out[..., odd].copy_(new_b)
