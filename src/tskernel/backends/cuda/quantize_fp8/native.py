"""quantize_fp8 in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_quantize import quantize_scaled
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor, scale: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    if not scale.is_contiguous():
        return f"scale has strides {scale.stride()}: expected contiguous elements"
    return lib.many_dims(x=x)


@register_kernel(
    "quantization",
    "quantize_fp8",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
def quantize_fp8(x: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernel of csrc/quantize_scaled.cu."""
    data = lib.new(x.shape, x, dtype or torch.float8_e4m3fn)
    return data, quantize_scaled(x, scale, data)
