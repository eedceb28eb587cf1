"""quantize_fp8_dynamic in C++: rows and groups are read once, a whole tensor twice."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_quantize import measure, quantize_tensor
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.many_dims(x=x)


@register_kernel(
    "quantization",
    "quantize_fp8_dynamic",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
def quantize_fp8_dynamic(
    x: Tensor,
    *,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch kernels of csrc/quantize_*.cu."""
    data = lib.new(x.shape, x, dtype or torch.float8_e4m3fn)
    if granularity == "tensor":
        return data, quantize_tensor(x, data, ue8m0)
    if granularity != "block":
        return data, measure(x, data, granularity, group_size, ue8m0)
    *lead, rows, columns = x.shape
    scale = lib.new((*lead, -(-rows // group_size), -(-columns // group_size)), x, torch.float32)
    lib.native("quantize_groups")(x, data, scale, group_size, group_size, ue8m0)
    return data, scale
