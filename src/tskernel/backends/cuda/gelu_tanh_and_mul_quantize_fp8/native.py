"""gelu_tanh_and_mul_quantize_fp8 in C++: the activation stays in registers until it is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.cuda import _native as lib
from tskernel.backends.cuda._native_quantize import quantize_activation
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(x: Tensor) -> str | None:
    """Return why this call does not fit, or None."""
    return lib.many_dims(x=x)


@register_kernel(
    "activation",
    "gelu_tanh_and_mul_quantize_fp8",
    capability=lib.CAPABILITY,
    signatures=formats(x=lib.FLOATS),
    priority=Priority.PERFORMANT,
    traceable=True,
    rejects=rejects,
)
def gelu_tanh_and_mul_quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch a kernel of csrc/quantize_*.cu."""
    gate = (lib.ACTIVATIONS["gelu_tanh"],)
    return quantize_activation(x, scale, granularity, group_size, ue8m0, dtype, gate)
