"""quantize_fp8_dynamic in Triton: what has one scale stays in registers between measuring and rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tskernel.backends.portable import _quantize_triton as device
from tskernel.backends.portable import _rows as host
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


def rejects(granularity: str, group_size: int) -> str | None:
    """Return why this call does not fit, or None."""
    if granularity == "block" and group_size > 128:
        return f"blocks of {group_size} rows and columns do not fit in registers, those of at most 128 do"
    return None


@register_kernel(
    "quantization",
    "quantize_fp8_dynamic",
    capability=host.CAPABILITY,
    signatures=formats(x=host.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
    rejects=rejects,
    traceable=True,
)
def quantize_fp8_dynamic(
    x: Tensor,
    *,
    granularity: str = "token",
    group_size: int = 128,
    ue8m0: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the quantization of units, two passes for a whole tensor."""
    chosen = dtype or torch.float8_e4m3fn
    return device.quantize_floats(x, granularity=granularity, group_size=group_size, ue8m0=ue8m0, dtype=chosen)


def compile_cases(chip: host.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [
        device.case(chip, "token", 7168, form="e4m3fn", top=448.0),
        device.case(chip, "group 128", 7168, form="e4m3fn", top=448.0, group=128, POWER=True),
        device.case(chip, "token, read twice", 28672, form="e5m2", top=57344.0),
        device.case(chip, "tensor", 4096, form="e5m2fnuz", top=57344.0, how="partials"),
        device.native_case(chip),
        device.block_case(chip),
    ]
