"""silu_and_mul_quantize_fp8 in Triton: the activation stays in registers until it is rounded, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.portable import _quantize_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats

COMPILE_PARTS = ("gfx942",)  # another op compiles the program for all parts


@register_kernel(
    "activation",
    "silu_and_mul_quantize_fp8",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def silu_and_mul_quantize_fp8(
    x: Tensor,
    scale: Tensor | None = None,
    *,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the quantization of activated units."""
    return device.quantize_activation(x, scale, "silu", granularity, group_size, ue8m0, dtype)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "token, width 14336", 14336, form="e4m3fn", top=448.0, kind="silu"),
        device.case(chip, "group 128, by codes", 4096, form="e4m3fn", top=448.0, kind="silu", group=128),
    ]
