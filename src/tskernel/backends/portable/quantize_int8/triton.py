"""quantize_int8 in Triton: a row stays in registers between measuring and rounding."""

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
    "quantize_int8",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def quantize_int8(x: Tensor, *, granularity: str = "token") -> tuple[Tensor, Tensor]:
    """Launch the quantization of rows, two passes for a whole tensor."""
    data = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    shape = (*x.shape[:-1], 1) if granularity == "token" else (1,)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    how = "unit" if granularity == "token" else "tensor"
    device.quantize(x, None, data, scales, how=how, form="int8", top=127.0)
    return data, scales


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "token", 4096, form="int8", top=127.0),
    ]
