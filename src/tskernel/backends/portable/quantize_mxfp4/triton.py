"""quantize_mxfp4 in Triton: one pass over blocks of 32 columns."""

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
    "quantization",
    "quantize_mxfp4",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the quantization of blocks."""
    data = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*x.shape[:-1], (x.shape[-1] + 31) // 32), dtype=torch.uint8, device=x.device)
    device.quantize(x, None, data, scales, how="unit", form="fp4", top=6.0, group=32, power=True, byte=True)
    return data, scales


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "width 4096", 4096, form="fp4", top=6.0, group=32, POWER=True, BYTE=True),
    ]
