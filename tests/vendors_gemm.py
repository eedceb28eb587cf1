"""Stand-ins for vendor libraries of matrix products and experts, in the manner of vendors.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vendors import GARBAGE, RECORDED, modules, need, need_rows, with_signature

from tskernel.ops.moe._activations import activate
from tskernel.ops.moe._weights import expert_weights, quantized_values

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
BLOCK = 128
ROWS = 8  # of a block of DeepGEMM's grouped product (really 128; less makes for shorter tests)
FEW = 4  # tokens whose choices FlashInfer counts one by one (really 256)
DEFAULT = object()  # of arguments that are not passed


def blocks(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
    """Return ``x @ w^T`` of fp8 numbers, block by block of K, in fp32."""
    need(x.dtype == w.dtype == FP8 and x_scale.dtype == w_scale.dtype == torch.float32, "dtypes")
    total = torch.zeros(x.shape[0], w.shape[0])
    for b in range(x.shape[1] // BLOCK):
        part = slice(b * BLOCK, (b + 1) * BLOCK)
        each = w_scale[:, b].repeat_interleave(BLOCK)[: w.shape[0]]
        total += (x[:, part].float() @ w[:, part].float().t()) * x_scale[:, b : b + 1] * each
    return total


# DeepGEMM


def _deep_checks(a: dict[str, Any], n: int, k: int) -> None:
    (x, x_scale), (_, w_scale), d = a["a"], a["b"], a["d"]
    need_rows(a=x, d=d)
    need(d.dtype == BF16 and d.shape == (x.shape[0], n) and a["disable_ue8m0_cast"], "d")
    need(x_scale.shape == (x.shape[0], -(-k // BLOCK)) and x.shape[1] == k, "a's scales")
    need(w_scale.shape[-2:] == (-(-n // BLOCK), -(-k // BLOCK)) and w_scale.is_contiguous(), "b's scales")
    need(all(a[r] is None for r in ("recipe", "recipe_a", "recipe_b")) and a["compiled_dims"] == "nk", "recipes")


def _deep_product(**a: Any) -> None:
    (x, x_scale), (w, w_scale) = a["a"], a["b"]
    need_rows(b=w)
    _deep_checks(a, *w.shape)
    a["d"].copy_(blocks(x, x_scale, w, w_scale))


def _deep_groups(**a: Any) -> None:
    """Multiply whole blocks of rows by the group of their first row; blocks of no group stay unwritten."""
    (x, x_scale), (w, w_scale), group = a["a"], a["b"], a["grouped_layout"]
    need(w.is_contiguous() and group.is_contiguous() and group.dtype == torch.int32, "layouts")
    need(group.shape == (x.shape[0],) and not a["use_psum_layout"], "grouped_layout")
    need(x.shape[0] % (2 * ROWS) == 0, "illegal memory access: the block beside the last one")
    _deep_checks(a, *w.shape[1:])
    a["d"].fill_(GARBAGE)
    for first in range(0, x.shape[0], ROWS):
        part, g = slice(first, first + ROWS), int(group[first])
        need(-1 <= g < w.shape[0], "illegal memory access: group")
        if g >= 0:
            a["d"][part] = blocks(x[part], x_scale[part], w[g], w_scale[g]).to(BF16)


@contextmanager
def deep_gemm() -> Iterator[None]:
    """Install ``deep_gemm``."""
    recorded = RECORDED["deep_gemm 54e2261"]
    bodies = {"fp8_gemm_nt": _deep_product, "m_grouped_fp8_gemm_nt_contiguous": _deep_groups}
    contents: dict[str, Any] = {n: with_signature(recorded[n], body) for n, body in bodies.items()}
    with modules(deep_gemm={**contents, "get_mk_alignment_for_contiguous_layout": lambda: ROWS}):
        yield


# FlashInfer: fp8 blocks


def memory(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Read memory from where a tensor starts, whatever its own shape and strides are."""
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    held = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    need(reach <= held, "illegal memory access")
    return x.as_strided(shape, strides)


def _flashinfer_product(**a: Any) -> Tensor:
    """Read contiguous operands and scales column by column, columns padded to four rows; write contiguous bf16."""
    (m, k), (n, _) = a["input"].shape, a["weight"].shape
    need(k % BLOCK == 0 and n % 64 == 0 and a["weight"].shape[1] == k, "K and N")
    need(a["weight_scale"].shape == (-(-n // BLOCK), k // BLOCK) and a["out"].shape == (m, n), "shapes")
    x, w = (memory(t, tuple(t.shape), (k, 1)) for t in (a["input"], a["weight"]))
    scale = memory(a["input_scale"], (m, k // BLOCK), (1, -(-m // 4) * 4))
    w_scale = memory(a["weight_scale"], tuple(a["weight_scale"].shape), (k // BLOCK, 1))
    memory(a["out"].view(BF16), (m, n), (n, 1)).copy_(blocks(x, scale, w, w_scale))
    return a["out"]


# FlashInfer: experts


def interleave_weights(weight: Tensor, quant_type: str = "fp4") -> Tensor:
    """Give packed numbers an order of their own: here each row backwards."""
    need(weight.dtype == torch.uint8 and weight.dim() == 3 and quant_type == "fp4", "weights")
    return weight.contiguous().flip(2)


def interleave_scales(scales: Tensor, group_size: int = 32) -> Tensor:
    """Fold scales of 64 rows by 128 columns into 16 times 16 bytes."""
    need(scales.dtype == torch.uint8 and group_size == 32, "scales")
    e, rows, groups = scales.shape
    need(rows % 64 == 0 and groups % 4 == 0, "rows and columns of scales")
    folded = scales.reshape(e, rows // 64, 64, groups // 4, 4).transpose(2, 3)
    return folded.reshape(e, rows // 64, groups // 4, 16, 16)


def _unfolded(scales: Tensor) -> Tensor:
    e, high, wide = scales.shape[:3]
    return scales.reshape(e, high, wide, 64, 4).transpose(2, 3).reshape(e, high * 64, wide * 4)


def _numbers(a: dict[str, Any]) -> tuple[str, Tensor, Tensor]:
    """Return the format and both weights as plain numbers."""
    w13, w2, scales = a["fc1_expert_weights"], a["fc2_expert_weights"], a["quant_scales"]
    every = torch.arange(w13.shape[0])
    if a["use_w4_group_scaling"]:
        need(w13.dtype == torch.uint8 and len(scales) == 2 and scales[0].dim() == 5, "packed weights")
        parts = [(w.flip(2), _unfolded(s)) for w, s in zip((w13, w2), scales, strict=True)]
        need(2 * w13.shape[2] % 128 == 0 and 2 * w2.shape[2] % 128 == 0, "whole blocks of columns")
        return "mxfp4", *(expert_weights(w, s, "mxfp4", every, torch.float32) for w, s in parts)
    if a["use_deepseek_fp8_block_scale"]:
        need(w13.dtype == w2.dtype == FP8 and len(scales) == 2, "fp8 weights")
        need(w13.shape[2] % BLOCK == 0 and w2.shape[2] % BLOCK == 0, "whole blocks")
        parts = zip((w13, w2), scales, strict=True)
        return "fp8_block", *(expert_weights(w, s, "fp8_block", every, torch.float32) for w, s in parts)
    need(w13.dtype == w2.dtype == BF16 and scales == [], "weights")
    need(w13.shape[2] % 8 == 0 and w2.shape[2] % 8 == 0, "hidden_size must be divisible")
    return "none", w13.float(), w2.float()


def _experts(**a: Any) -> Tensor:
    """Run experts with the up rows first.

    Ids out of range are skipped, and so is an expert's second choice by a token if there are many.
    """
    x, ids, weights, out = a["input"], a["token_selected_experts"], a["token_final_scales"], a["output"]
    need(x.dtype == BF16 and x.is_contiguous() and out.is_contiguous() and out.dtype == BF16, "input and output")
    need(ids.dtype == torch.int32 and weights.dtype == torch.float32, "token_selected_experts and their scales")
    need(ids.is_contiguous() and weights.is_contiguous() and ids.shape == weights.shape, "routing")
    need(a["activation_type"] is DEFAULT and a["ep_size"] == a["tp_size"] == 1, "activation and ranks")
    need(a["use_fused_finalize"] is False and a["output_dtype"] == BF16, "finalize")
    quant, w13, w2 = _numbers(a)
    need(x.shape[1] == w13.shape[2] == w2.shape[1] == out.shape[1] and w13.shape[1] == 2 * w2.shape[2], "sizes")
    bias = a["fc1_expert_biases"], a["fc2_expert_biases"]
    need(all(b is None or (b.dtype == BF16 and b.is_contiguous()) for b in bias), "biases")
    alpha, beta, limit = (a[f"swiglu_{n}"] for n in ("alpha", "beta", "limit"))
    for given in (alpha, beta, limit):
        need(given is None or given.shape == (w13.shape[0],), "numbers of swiglu")
    out.zero_()
    for t, chosen in enumerate(ids.tolist()):
        total = torch.zeros(x.shape[1])
        for k, e in enumerate(chosen):
            if len(ids) > FEW and e in chosen[:k]:
                continue
            if not 0 <= e < w13.shape[0]:
                continue
            row = quantized_values(x[t : t + 1], None, quant, FP8, torch.float32)
            up, gate = (row @ w13[e].t() + (0.0 if bias[0] is None else bias[0][e].float())).chunk(2, 1)
            both = torch.cat((gate, up), 1)
            if alpha is None:
                h = activate(both, "silu", 0.0, 0.0)
            else:
                need(float(beta[e]) == 1.0, "beta")
                h = activate(both, "swiglu_oai", float(alpha[e]), float(limit[e]))
            h = quantized_values(h.to(BF16), None, quant, FP8, torch.float32)
            y = h @ w2[e].t() + (0.0 if bias[1] is None else bias[1][e].float())
            total += y[0] * weights[t, k]
        out[t] = total.to(BF16)
    return out


@contextmanager
def flashinfer() -> Iterator[None]:
    """Install ``flashinfer.gemm`` and ``flashinfer.fused_moe``."""
    recorded = RECORDED["flashinfer_python"]
    product = recorded["flashinfer/gemm/gemm_base.py:fp8_blockscale_gemm_sm90"]
    experts = recorded["flashinfer/fused_moe/core.py:cutlass_fused_moe"]
    experts = experts.replace("ActivationType.Swiglu", "DEFAULT").replace("_UNSET", "DEFAULT")
    with modules(
        flashinfer={},
        flashinfer__gemm={"fp8_blockscale_gemm_sm90": with_signature(product, _flashinfer_product)},
        flashinfer__fused_moe={
            "cutlass_fused_moe": with_signature(experts, _experts, DEFAULT=DEFAULT),
            "interleave_moe_weights_for_sm90_mixed_gemm": interleave_weights,
            "interleave_moe_scales_for_sm90_mixed_gemm": interleave_scales,
        },
    ):
        yield


LIBRARIES = {"deep_gemm": deep_gemm, "flashinfer": flashinfer}
