"""quantize_fp8 in Triton: one pass, by a scale for all or for each row."""

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
    "quantize_fp8",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    traceable=True,
)
def quantize_fp8(x: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Launch the quantization of spans of columns."""
    dtype = dtype or torch.float8_e4m3fn
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(scale.shape, dtype=torch.float32, device=x.device)
    (form, top), native = host.FP8[dtype], host.is_native(dtype, x.device)
    how = "one" if scale.dim() <= 1 else "row"
    device.quantize(x, scale.contiguous(), data, scales, how=how, form=form, top=top, native=native)
    return data.view(dtype), scales


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "row", 4096, form="e4m3fnuz", top=240.0, how="row"),
    ]
