"""DeepGEMM: fp8 products with scales per 1 x 128 of ``a`` and 128 x 128 of ``b``, on Hopper.

Read in DeepGEMM 54e2261 (csrc/apis/gemm.hpp, csrc/apis/layout.hpp, deep_gemm/include/deep_gemm/scheduler/gemm.cuh).
It brings the scales of ``a`` into its own order itself. Its grouped product takes groups that start at whole blocks of
rows, usually 128, and reads on the device which group a block has, or that it has none: rows are moved to such places
and back here. The copy inside vLLM is left to vLLM: finding it would import vLLM.

Source: https://github.com/deepseek-ai/DeepGEMM.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tskernel.backends.cuda import _vendor_rows as rows
from tskernel.backends.cuda._vendor_gemm import compiled_call
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.signature import formats

_SM90: Final = {"vendor": "nvidia", "exactly": ("sm90",)}
# The name on the package index belongs to a stale source package: the attribute tells a working one.
CAPABILITY: Final = CapabilityRequirement(**_SM90, packages=("deep_gemm:fp8_gemm_nt",))
GROUPED: Final = CapabilityRequirement(**_SM90, packages=("deep_gemm:m_grouped_fp8_gemm_nt_contiguous",))
SIGNATURES: Final = formats(a=torch.float8_e4m3fn, b=torch.float8_e4m3fn, out=torch.bfloat16)
TRAITS: Final = {
    "quant": {"fp8_block"},
    "bias": {False},
    "alpha": {False},
    "k": range(128, 2**31, 128),
    "n": range(64, 2**31, 64),
}


def multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Write ``a @ b^T`` to ``out``; see mm."""
    import deep_gemm  # pyright: ignore[reportMissingImports]

    if out.numel() == 0:
        return
    target = rows.staged(out)
    kind = ("mm", a.device, a.shape, b.shape)
    left, right = (rows.aligned(a), a_scale), (rows.aligned(b), b_scale.contiguous())
    compiled_call("DeepGEMM", kind, deep_gemm.fp8_gemm_nt, left, right, target, disable_ue8m0_cast=True)
    if target is not out:
        out.copy_(target)


class Places(NamedTuple):
    """Where rows stand once each group starts at a whole block.

    ``place [T]`` is each row's, ``used [T]`` whether it has a group, ``group [P]`` the group of each place or -1.
    """

    place: Tensor
    used: Tensor
    group: Tensor


def places(offsets: Tensor, total: int, block: int) -> Places:
    """Return the places of ``total`` rows whose groups end at ``offsets [E]``.

    There is room for every group's last block being almost empty, and for an even number of blocks: the kernel looks
    at a block's neighbour. Rows of no group share the place behind the last one.
    """
    groups = offsets.shape[0]
    room = -(-min(total * block, total + groups * (block - 1)) // (2 * block)) * 2 * block
    starts = torch.nn.functional.pad(offsets, (1, 0))[:groups]
    ends = ((offsets - starts + (block - 1)).div(block, rounding_mode="floor") * block).cumsum(0)
    shift = torch.nn.functional.pad(ends, (1, 0))[:groups] - starts
    row = torch.arange(total, device=offsets.device)
    owner = torch.searchsorted(offsets, row, right=True)
    used = owner < groups
    place = torch.where(used, row + shift[owner.clamp(max=groups - 1)], room)
    group = torch.searchsorted(ends, torch.arange(room, device=offsets.device), right=True)
    return Places(place, used, torch.where(group < groups, group, -1).int())


def multiply_groups(
    a: Tensor, b: Tensor, offsets: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor
) -> None:  # fmt: skip
    """Write each group's product to ``out``; see grouped_mm."""
    import deep_gemm  # pyright: ignore[reportMissingImports]

    if out.numel() == 0:
        return
    (total, k), n = a.shape, b.shape[1]
    found = places(offsets, total, block_rows(deep_gemm))
    room = found.group.shape[0]
    moved = torch.empty((room + 1, k), dtype=torch.uint8, device=a.device)
    moved.index_copy_(0, found.place, a.view(torch.uint8))
    scales = torch.empty((room + 1, a_scale.shape[1]), dtype=torch.float32, device=a.device)
    scales.index_copy_(0, found.place, a_scale)
    y = torch.empty((room, n), dtype=torch.bfloat16, device=a.device)
    compiled_call(
        "DeepGEMM", ("grouped_mm", a.device, room, b.shape), deep_gemm.m_grouped_fp8_gemm_nt_contiguous,
        (moved[:room].view(a.dtype), scales[:room]), (rows.aligned(b), b_scale.contiguous()), y, found.group,
        disable_ue8m0_cast=True,
    )  # fmt: skip
    result = y.index_select(0, found.place.clamp(max=room - 1))
    torch.where(found.used.unsqueeze(1), result, result.new_zeros(()), out=out)


def block_rows(library: Any) -> int:
    """Return the rows of a block, by the name that the version has for it."""
    ask = getattr(library, "get_mk_alignment_for_contiguous_layout", None)
    return int((ask or library.get_m_alignment_for_contiguous_layout)())
