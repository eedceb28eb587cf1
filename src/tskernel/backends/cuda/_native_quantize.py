"""What the native quantizing kernels share: their results, and which op of the library measures what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.cuda import _native as lib


def quantize_activation(
    x: Tensor,
    scale: Tensor | None,
    granularity: str,
    group_size: int,
    ue8m0: bool,
    dtype: torch.dtype | None,
    gate: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Quantize the activation of ``x [..., 2D]``.

    ``gate`` is its number and, where it has them, interleaved, alpha and limit.
    """
    *lead, columns = x.shape
    width = columns // 2
    data = lib.new((*lead, width), x, dtype or torch.float8_e4m3fn)
    if scale is not None:
        return data, quantize_scaled(x, scale, data, gate)
    return data, measure(x, data, granularity, group_size, ue8m0, gate)


def quantize_scaled(x: Tensor, scale: Tensor, data: Tensor, gate: tuple[Any, ...] = ()) -> Tensor:
    """Quantize into ``data`` by ``scale``; return a copy of it, which the kernel makes."""
    if data.numel() == 0:
        return scale.clone()
    copy = lib.new(scale.shape, scale)
    lib.native("quantize_scaled")(x, scale, data, copy, *gate)
    return copy


def measure(
    x: Tensor, data: Tensor, granularity: str, group_size: int, ue8m0: bool, gate: tuple[Any, ...] = ()
) -> Tensor:
    """Quantize into ``data`` by scales of every row or group of its columns; return the scales."""
    *lead, width = data.shape
    if granularity == "token":
        scale = lib.new((*lead, 1), x, torch.float32)
        lib.native("quantize_rows")(x, data, scale, ue8m0, *gate)
        return scale
    scale = lib.new((*lead, -(-width // group_size)), x, torch.float32)
    lib.native("quantize_groups")(x, data, scale, group_size, 1, ue8m0, *gate)
    return scale


def quantize_tensor(x: Tensor, data: Tensor, ue8m0: bool = False) -> Tensor:
    """Quantize into ``data`` by one measured scale; return it."""
    scale = lib.new((1,), x, torch.float32)
    if x.numel() == 0:
        return scale.fill_(2.0**-126)
    partials = lib.new((lib.PARTIALS,), x, torch.float32)
    lib.native("quantize_tensor")(x, data, scale, partials, ue8m0)
    return scale
