"""moe_combine in Triton: one program adds up a token's choices, always in their order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tskernel.backends.portable import _moe as moe
from tskernel.dispatch.registry import Priority, register_kernel
from tskernel.dispatch.signature import formats


@register_kernel(
    "moe",
    "moe_combine",
    capability=moe.CAPABILITY,
    signatures=formats(x=moe.FLOAT_DTYPES),
    priority=Priority.PORTABLE + 2,
)
def moe_combine(expert_out: Tensor, topk_weights: Tensor, topk_ids: Tensor | None = None, *, out: Tensor) -> None:
    """Launch a program per token and span of columns; choices that are left out are not read."""
    if out.numel() > 0:
        used = "all" if topk_ids is None else "negative"
        moe.combine(expert_out, topk_weights, out, used=used, ids=topk_ids)


def compile_cases(chip: moe.Chip) -> list[Any]:
    """Return what cross-compilation tests build, for a chip."""
    return [moe.combine_case(chip, "width 2880", 2880, used="negative")]
