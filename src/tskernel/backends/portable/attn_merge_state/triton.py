"""attn_merge_state in Triton: one pass, a few rows per program."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.backends.portable import _attention_launch as flash
from tskernel.backends.portable import _attention_triton as device
from tskernel.dispatch.registry import Priority, register_kernel


def rejects(out_a: Tensor) -> str | None:
    """Return why the call does not fit, or None."""
    return None if out_a.dim() == 3 else f"out_a has {out_a.dim()} dimensions, this kernel takes 3"


@register_kernel(
    "attention",
    "attn_merge_state",
    capability=flash.CAPABILITY,
    traits={"head_dim_v": range(1, 1025)},
    priority=Priority.PERFORMANT,
    rejects=rejects,
)
def attn_merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge rows, a few per program."""
    rows, heads, width = out_a.shape
    out = torch.empty((rows, heads, width), dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=out_a.device)
    if out.numel() == 0:
        return out, lse
    a, b = flash.unit(out_a), flash.unit(out_b)
    padded = flash.pow2(width)
    block = max(1, 2048 // padded)
    strides = (*a.stride()[:2], *b.stride()[:2], *lse_a.stride(), *lse_b.stride())
    device._merge[(-(-rows * heads // block),)](
        a, lse_a, b, lse_b, out, lse, rows, heads, *strides, DV=width, D_V=padded, BLOCK=block, num_warps=4
    )
    return out, lse


def compile_cases(chip: flash.Chip) -> list[flash.Case]:
    """Return what cross-compilation tests build, for a chip."""
    return [flash.plain_case("D 128", "merge", {"DV": 128, "D_V": 128, "BLOCK": 16}, {"a", "b", "out"})]
