"""quantize_int8 in C++: rows are read once, a whole tensor twice."""

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
    "quantize_int8",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
def quantize_int8(x: Tensor, *, granularity: str = "token") -> tuple[Tensor, Tensor]:
    """Launch kernels of csrc/quantize_*.cu."""
    data = lib.new(x.shape, x, torch.int8)
    if granularity == "tensor":
        return data, quantize_tensor(x, data)
    return data, measure(x, data, granularity, 1, False)
