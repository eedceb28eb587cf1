"""attn_merge_state in Triton: one pass, a few rows per program."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from tskernel.backends.lazy_triton import is_traced, traced
from tskernel.backends.plans import Plans
from tskernel.backends.portable import _attention_launch as flash
from tskernel.backends.portable import _attention_triton as device
from tskernel.backends.triton_launch import Prepared, prepare
from tskernel.dispatch.registry import Priority, register_kernel

_plans: Final = Plans[Prepared]()


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
    traceable=True,
)
def attn_merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge rows, a few per program."""
    rows, heads, width = out_a.shape
    out = torch.empty((rows, heads, width), dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=out_a.device)
    tensors = (flash.unit(out_a), lse_a, flash.unit(out_b), lse_b, out, lse)
    if is_traced(out_a):
        grid, arguments, options = _launch(*tensors)
        traced(device._merge)[grid](*arguments, **options)
    elif out.numel():
        launch = _plans.find((), tensors)
        if launch is None:
            grid, arguments, options = _launch(*tensors)
            launch = _plans.keep((), tensors, prepare(device._merge, grid, *arguments, **options))
        launch(*tensors)
    return out, lse


def _launch(
    a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, int]]:
    """Return grid, arguments and options of the launch. A program whose rows are none writes nothing."""
    (rows, heads), width = out.shape[:2], int(out.shape[2])
    padded = flash.pow2(width)
    block = max(1, 2048 // padded)
    strides = (*a.stride()[:2], *b.stride()[:2], *lse_a.stride(), *lse_b.stride())
    grid = (torch.sym_max(1, (rows * heads + block - 1) // block),)
    constants = {"DV": width, "D_V": padded, "BLOCK": block, "num_warps": 4}
    return grid, (a, lse_a, b, lse_b, out, lse, rows, heads, *strides), constants


def compile_cases(chip: flash.Chip) -> list[flash.Case]:
    """Return what cross-compilation tests build, for a chip."""
    return [flash.plain_case("D 128", "merge", {"DV": 128, "D_V": 128, "BLOCK": 16}, {"a", "b", "out"})]
