"""What the norm ops share: the row statistics and the checks of a row and its weight."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.checks import FLOATS, expect, expect_dtype, expect_shape


def normalize_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight`` over the last dimension; both arguments are already in the dtype to compute in."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def check_rows(name: str, x: Tensor) -> None:
    """Check that ``x`` has rows of at least one column in a floating dtype."""
    expect_dtype(name, x, FLOATS)
    expect(x.dim() > 0, f"{name}.shape", "at least one dimension", tuple(x.shape))
    expect(x.shape[-1] > 0, f"{name}.shape", "at least one column", tuple(x.shape))


def check_weight(name: str, weight: Tensor | None, x: Tensor) -> None:
    """Check a per-column parameter: as long as a row, in the dtype of ``x`` or fp32."""
    expect_shape(name, weight, (x.shape[-1],))
    expect_dtype(name, weight, (x.dtype, torch.float32))
