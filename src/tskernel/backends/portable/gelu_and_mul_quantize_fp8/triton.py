"""gelu_and_mul_quantize_fp8 in Triton: the activation stays in registers until it is rounded, once."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable import _quantize_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


@register_kernel(
    "activation",
    "gelu_and_mul_quantize_fp8",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def gelu_and_mul_quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the quantization of activated units."""
    return device.quantize_activation(x, scale, "gelu", granularity, group_size, ue8m0, dtype)
