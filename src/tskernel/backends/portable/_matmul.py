"""What the plain torch GEMM kernels share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    probe = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return probe is None or bool(getattr(torch.ops.mkldnn, probe)())


def slow_on_cpu(x: Tensor) -> str | None:
    """Return a reason where the CPU has no instructions for products of ``x``'s 16-bit dtype."""
    if x.device.type != "cpu" or _cpu_multiplies(x.dtype):
        return None  # elsewhere torch emulates them: 8 times slower than fp32, measured on an AVX2 host
    return f"this CPU has no {str(x.dtype).removeprefix('torch.')} matrix instructions: fp32 is faster"


def other_bias(bias: Tensor | None, dtype: torch.dtype) -> str | None:
    """Return a reason unless ``bias`` has the dtype of the result, which is what torch adds before its one rounding."""
    return None if bias is None or bias.dtype == dtype else f"bias is {bias.dtype}, the result {dtype}"


def aligned(x: Tensor) -> Tensor:
    """Return ``x``, or a copy where it does not start at a multiple of 16 bytes.

    A start is no part of what selection remembers of a call (strides are), so ``rejects`` cannot look at it.
    """
    return x if x.storage_offset() * x.element_size() % 16 == 0 else x.clone()


def unaligned_rows(name: str, x: Tensor, bytes_: int) -> str | None:
    """Return a reason unless the rows of ``x`` are contiguous and a multiple of ``bytes_`` apart."""
    if x.stride(-1) == 1 and x.stride(-2) * x.element_size() % bytes_ == 0:
        return None
    return f"{name} has strides {tuple(x.stride())}: rows must be contiguous and a multiple of {bytes_} bytes apart"
