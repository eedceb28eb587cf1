"""moe_fused by FlashInfer, whose kernel for Hopper is TensorRT-LLM's in CUTLASS: bf16, fp8 blocks, mxfp4 weights.

Read in flashinfer-python 0.7.4 (flashinfer/fused_moe/core.py, prepare.py, data/csrc/fused_moe/cutlass_backend). It
wants the up rows before the gate rows, and mxfp4 weights and scales in an order of its own with whole blocks of 128
columns; ``prepare`` sees to both once. Put right at the call: for many tokens it runs an expert that a token chose
twice only once, with the first weight, so such choices are merged, and ids out of range are sent behind the last
expert, which it skips. Its fused last step adds up with atomics, in any order, and is not used. It allocates its
workspace in the call.

Source: https://github.com/flashinfer-ai/flashinfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from tskernel.backends.cuda._vendor_gemm import UNMEASURED, compiled_call
from tskernel.dispatch.platform import CapabilityRequirement
from tskernel.dispatch.registry import register_kernel
from tskernel.dispatch.signature import formats
from tskernel.ops.moe._weights import FP8_BLOCK, MXFP4_BLOCK

_CAPABILITY: Final = CapabilityRequirement(
    vendor="nvidia",
    exactly=("sm90",),
    packages=(
        "flashinfer.fused_moe:cutlass_fused_moe",
        "flashinfer.fused_moe:interleave_moe_weights_for_sm90_mixed_gemm",
        "flashinfer.fused_moe:interleave_moe_scales_for_sm90_mixed_gemm",
    ),
)
_LAYOUT: Final = "flashinfer_cutlass"
_COLUMNS: Final = 128  # mxfp4 weights have whole blocks of so many
_ALIGNMENT: Final = 16  # bytes of a row
_ONE: Final = 127  # the ue8m0 byte of 1


def prepare(weights: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return a layer's weights with the up rows first; mxfp4 ones also padded and in the kernel's order."""
    made = {name: None if x is None else x.contiguous() for name, x in weights.items()}
    w13, w2 = made["w13"], made["w2"]
    packed = w13 is not None and w13.dtype is torch.uint8
    for name in ("w13", "w13_scale", "w13_bias"):
        if made[name] is not None:
            made[name] = _up_first(made[name])
    if packed and w2 is not None:
        hidden, inner = w2.shape[1], 2 * w2.shape[2]
        more = (-hidden % _COLUMNS, -inner % _COLUMNS)
        made |= _interleaved("w13", _padded_halves(made, more[1]), 0, more[0])
        made |= _interleaved("w2", made, more[0], more[1])
    return made


def _up_first(x: Tensor | None) -> Tensor:
    if x is None:
        raise ValueError("tskernel: FlashInfer's weights: expected a Tensor, got None")
    plain = x.view(torch.uint8) if x.itemsize == 1 else x  # torch does not roll fp8
    return plain.roll(x.shape[1] // 2, 1).view(x.dtype)


def _padded_halves(weights: Mapping[str, Tensor | None], more: int) -> dict[str, Tensor | None]:
    """Return ``w13`` and what belongs to it with ``more`` rows behind the up rows and behind the gate rows."""
    made: dict[str, Tensor | None] = {}
    for name in ("w13", "w13_scale", "w13_bias"):
        x = weights[name]
        if x is not None:
            halves = [_more_rows(h, more, name) for h in x.chunk(2, 1)]
            x = torch.cat(halves, 1)
        made[name] = x
    return made


def _more_rows(x: Tensor, more: int, name: str) -> Tensor:
    x = x.view(torch.uint8) if x.itemsize == 1 else x
    sides = (0, more) if name.endswith("bias") else (0, 0, 0, more)
    return torch.nn.functional.pad(x, sides, value=_ONE if name.endswith("scale") else 0)


def _interleaved(name: str, weights: Mapping[str, Tensor | None], rows: int, columns: int) -> dict[str, Tensor | None]:
    """Return a weight with ``rows`` and ``columns`` more, its scale and its bias, in the kernel's order."""
    from flashinfer.fused_moe import (  # pyright: ignore[reportMissingImports]
        interleave_moe_scales_for_sm90_mixed_gemm,
        interleave_moe_weights_for_sm90_mixed_gemm,
    )

    weight, scale, bias = (weights[n] for n in (name, f"{name}_scale", f"{name}_bias"))
    if weight is None or scale is None:
        raise ValueError(f"tskernel: FlashInfer's weights: expected {name} and its scale, got None")
    pad = torch.nn.functional.pad
    weight = pad(weight, (0, columns // 2, 0, rows))
    scale = pad(scale.view(torch.uint8), (0, columns // MXFP4_BLOCK, 0, rows), value=_ONE)
    return {
        name: interleave_moe_weights_for_sm90_mixed_gemm(weight, "fp4"),
        f"{name}_scale": interleave_moe_scales_for_sm90_mixed_gemm(scale, MXFP4_BLOCK),
        f"{name}_bias": None if bias is None else pad(bias, (0, rows)),
    }


def rejects(
    x: Tensor,
    w2: Tensor,
    quant: str,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    a13_scale: Tensor | None,
    a2_scale: Tensor | None,
) -> str | None:
    """Return why FlashInfer cannot take the call, or None; weights may be prepared already."""
    if a13_scale is not None or a2_scale is not None:
        return "static activation scales are not passed on to FlashInfer"
    if (w13_bias is None) != (w2_bias is None):
        return "FlashInfer takes two biases or none"
    if w13_bias is not None and w2_bias is not None and {w13_bias.dtype, w2_bias.dtype} != {x.dtype}:
        return f"biases are {w13_bias.dtype} and {w2_bias.dtype}: FlashInfer takes them in the dtype of x, {x.dtype}"
    if quant == "fp8_block" and (activation != "silu" or w13_bias is not None):
        return "FlashInfer's fp8 blocks come with silu and without biases"
    step = {"fp8_block": FP8_BLOCK, "none": _ALIGNMENT // x.element_size()}.get(quant, 1)
    if x.shape[1] % step or w2.shape[2] % step:
        return f"H={x.shape[1]} and I={w2.shape[2]} must be multiples of {step}"
    return None


def merged(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return int32 ids and fp32 weights with each of a token's experts once, the rest at id ``experts``."""
    ids = ids.contiguous()
    known = (ids >= 0) & (ids < experts)
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    again = same.tril(-1).any(2)
    total = torch.where(same, weights.float().unsqueeze(1), 0.0).sum(2)
    return torch.where(known & ~again, ids, experts).int(), total


@register_kernel(
    "moe",
    "moe_fused",
    capability=_CAPABILITY,
    signatures=formats(x=torch.bfloat16, w=(torch.bfloat16, torch.float8_e4m3fn, torch.uint8)),
    traits={
        "quant": {"none", "fp8_block", "mxfp4"},
        "activation": {"silu", "swiglu_oai"},
        "weight_layout": {_LAYOUT},
        "expert_map": {False},
        "top_k": range(1, 2**31),
    },
    priority=UNMEASURED,
    rejects=rejects,
    weight_preprocessor=prepare,
)
def moe_fused(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    quant: str = "none",
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    a13_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    expert_map: Tensor | None = None,
    weight_layout: str = "plain",
    out: Tensor,
) -> None:
    """Merge choices, call FlashInfer, and drop the columns that were padded."""
    from flashinfer.fused_moe import cutlass_fused_moe  # pyright: ignore[reportMissingImports]

    if out.numel() == 0:
        return
    experts, width = w2.shape[0], w2.shape[1]
    ids, weights = merged(topk_ids, topk_weights, experts)
    tokens = x.contiguous() if width == x.shape[1] else torch.nn.functional.pad(x, (0, width - x.shape[1]))
    fits = width == x.shape[1] and out.is_contiguous() and out.data_ptr() % _ALIGNMENT == 0
    target = out if fits else torch.empty((x.shape[0], width), dtype=out.dtype, device=out.device)
    options: dict[str, Any] = {
        "quant_scales": [] if quant == "none" else [w13_scale, w2_scale], "output": target, "use_fused_finalize": False,
        "fc1_expert_biases": w13_bias, "fc2_expert_biases": w2_bias,
        "use_deepseek_fp8_block_scale": quant == "fp8_block", "use_w4_group_scaling": quant == "mxfp4",
    }  # fmt: skip
    if activation == "swiglu_oai":
        numbers = {"swiglu_alpha": swiglu_alpha, "swiglu_beta": 1.0, "swiglu_limit": swiglu_limit}
        options |= {n: torch.full((experts,), v, dtype=torch.float32, device=x.device) for n, v in numbers.items()}
    kind = ("moe_fused", x.device, quant, activation, tokens.shape, topk_ids.shape[1], experts)
    compiled_call("FlashInfer", kind, cutlass_fused_moe, tokens, ids, weights, w13, w2, x.dtype, **options)
    if target is not out:
        out.copy_(target[:, : x.shape[1]])
