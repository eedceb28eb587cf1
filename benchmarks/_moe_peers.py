"""What is timed on a MoE row, from router logits to the weighted sum: each kernel of moe_fused, and the peers.

A peer that wants weights in another order gets them so before it is timed, made once per model. Packages are imported
when a contender is prepared.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _moe_rows import BF16, DEVICE, Experts, Model, Row
from _side_by_side import Arguments, Call, Contender, keeping
from torch import Tensor

import tskernel
from tskernel import moe
from tskernel.testing import kernel_names

os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")
ALPHA, LIMIT = 1.702, 7.0  # of swiglu_oai
MANY = 4096  # tokens from which on the products are timed alone


def ours(kernel: str | None, experts: Experts, a: Arguments) -> Call:
    """Return routing and experts of a planned layer, with a kernel forced or with the one that is chosen."""
    plan = experts.plan(kernel)
    return keeping(moe.moe_apply, plan, a["x"], experts.layer(plan), a["logits"], out=torch.empty_like(a["x"]))


def routed(experts: Experts, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose experts by our op, for peers that have no router of their own."""
    return tskernel.moe_topk(logits, experts.model.top_k, correction_bias=experts.bias, **experts.model.router)


# other orders of the weights


def interleaved(experts: Experts) -> dict[str, Tensor]:
    """Return the weights with gate and up rows in turn, as GPT-OSS stores them."""

    def make() -> dict[str, Tensor]:
        made = dict(experts.weights)
        for name in ("w13", "w13_scale", "w13_bias"):
            if name in made:
                gate, up = made[name].chunk(2, 1)
                made[name] = torch.stack((gate, up), 2).flatten(1, 2)
        return made

    return experts.kept("interleaved", make)


def up_first(experts: Experts) -> dict[str, Tensor]:
    """Return the weights with the up rows before the gate rows."""

    def make() -> dict[str, Tensor]:
        made = dict(experts.weights)
        for name in ("w13", "w13_scale", "w13_bias"):
            if name in made:
                half = made[name].shape[1] // 2
                bytes_ = made[name].view(torch.uint8) if made[name].itemsize == 1 else made[name]
                made[name] = bytes_.roll(half, 1).view(made[name].dtype)
        return made

    return experts.kept("up first", make)


# vLLM


def vllm_router(experts: Experts, a: Arguments) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return vLLM's choice of experts."""
    m = experts.model
    if m.n_group > 1:
        from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

        return partial(
            grouped_topk, a["x"], a["logits"], m.top_k, True, m.n_group, m.topk_group, m.score, m.scaling, experts.bias
        )
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    return lambda: fused_topk(a["x"], a["logits"], m.top_k, True, scoring_func=m.score)[:2]


def vllm_fused(experts: Experts, a: Arguments) -> Call:
    """Return vLLM's fused experts in Triton, with its router."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    m, route = experts.model, vllm_router(experts, a)
    oai = m.activation == "swiglu_oai"
    w = interleaved(experts) if oai else experts.weights
    if m.quant == "fp8_block":
        given = config.fp8_w8a8_moe_quant_config(w["w13_scale"], w["w2_scale"], block_shape=[128, 128])
    else:
        given = config.biased_moe_quant_config(w.get("w13_bias"), w.get("w2_bias"))

    def call() -> Tensor:
        weights, ids = route()
        return fused_experts(
            a["x"], w["w13"], w["w2"], weights, ids, MoEActivation.SWIGLUOAI if oai else MoEActivation.SILU,
            global_num_experts=m.experts, expert_map=experts.map, quant_config=given,
        )  # fmt: skip

    return keeping(call)


# triton_kernels: on its own or inside vLLM, which runs GPT-OSS's mxfp4 experts with it on Hopper


def load_triton_kernels() -> None:
    """Import the package under its own name."""
    try:
        importlib.import_module("triton_kernels")
    except ImportError:
        sys.modules["triton_kernels"] = importlib.import_module("vllm.third_party.triton_kernels")


def swizzled(experts: Experts) -> dict[str, Any]:
    """Return mxfp4 weights ``[E, K, N]`` in the order of the part's matrix instructions, and their configurations."""
    from triton_kernels.matmul_ogs import PrecisionConfig
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    w, made = interleaved(experts), {}
    for name in ("w13", "w2"):
        scale = w[f"{name}_scale"]
        scale = torch.nn.functional.pad(scale, (0, -scale.shape[2] % 4)).mT  # its order knows whole fours of blocks
        made[name] = convert_layout(wrap_torch_tensor(w[name].mT, dtype=FP4), value_layout, **value_options)
        scale = convert_layout(wrap_torch_tensor(scale), scale_layout, **scale_options)
        made[f"{name}_config"] = PrecisionConfig(weight_scale=scale)
    return made


def triton_kernels_moe(experts: Experts, a: Arguments) -> Call:
    """Return routing and two grouped products of triton_kernels; GPT-OSS's activation is part of the first one."""
    load_triton_kernels()
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.routing import routing
    from triton_kernels.swiglu import swiglu_fn

    m, oai = experts.model, experts.model.activation == "swiglu_oai"
    plain = interleaved(experts) if oai else experts.weights
    packed = m.quant == "mxfp4"
    w: dict[str, Any] = experts.kept("swizzled", partial(swizzled, experts)) if packed else {
        name: plain[name].mT for name in ("w13", "w2")
    }  # fmt: skip
    bias = {n: plain[f"{n}_bias"].float() if m.biased else None for n in ("w13", "w2")}
    opt_flags.reset_opt_flags_constraints()
    if packed:
        opt_flags.update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper
    act = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (ALPHA, LIMIT), 2) if oai else None

    def call() -> Tensor:
        data, gather, scatter = routing(a["logits"], m.top_k)
        h = matmul_ogs(
            a["x"], w["w13"], bias["w13"], data, gather_indx=gather, fused_activation=act,
            precision_config=w.get("w13_config"),
        )  # fmt: skip
        return matmul_ogs(
            h if oai else tskernel.silu_and_mul(h), w["w2"], bias["w2"], data, scatter_indx=scatter,
            gammas=data.gate_scal, precision_config=w.get("w2_config"),
        )  # fmt: skip

    return keeping(call)


# FlashInfer: CUTLASS


def flashinfer_moe(experts: Experts, a: Arguments) -> Call:
    """Return FlashInfer's fused experts in CUTLASS behind our router; its kernels take minutes to compile."""
    from flashinfer.fused_moe import cutlass_fused_moe, gen_cutlass_fused_moe_sm90_module

    if not gen_cutlass_fused_moe_sm90_module().is_compiled and os.environ.get("FLASHINFER_BUILD_MOE", "") != "1":
        raise NotImplementedError("its module is not built (FLASHINFER_BUILD_MOE=1 builds it, for minutes)")
    m, w, out = experts.model, up_first(experts), torch.empty_like(a["x"])
    options: dict[str, Any] = {"output": out, "ep_size": m.experts // m.here, "ep_rank": 0, "quant_scales": []}
    if m.quant == "fp8_block":
        options |= {"quant_scales": [w["w13_scale"], w["w2_scale"]], "use_deepseek_fp8_block_scale": True}
    if m.biased:
        options |= {"fc1_expert_biases": w["w13_bias"], "fc2_expert_biases": w["w2_bias"]}
    if m.activation == "swiglu_oai":
        numbers = {"swiglu_alpha": ALPHA, "swiglu_beta": 1.0, "swiglu_limit": LIMIT}
        options |= {n: torch.full((m.here,), v, device=DEVICE) for n, v in numbers.items()}

    def call() -> Tensor:
        weights, ids = routed(experts, a["logits"])
        cutlass_fused_moe(a["x"], ids, weights, w["w13"], w["w2"], BF16, **options)
        return out

    return keeping(call)


# torch


def torch_grouped(experts: Experts, a: Arguments) -> Call:
    """Return torch's grouped products, slots sorted by torch."""
    m, w = experts.model, experts.weights
    product = torch.nn.functional.grouped_mm

    def call() -> Tensor:
        weights, ids = routed(experts, a["logits"])
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        offsets = flat.new_zeros(m.experts).scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()
        token = order // m.top_k
        h = product(a["x"].index_select(0, token), w["w13"].mT, offs=offsets)
        y = product(tskernel.silu_and_mul(h), w["w2"].mT, offs=offsets)
        slots = torch.empty_like(y).index_copy_(0, order, y).view(-1, m.top_k, m.hidden)
        return torch.einsum("tkh,tk->th", slots, weights.to(BF16))

    return keeping(call)


def by_expert(experts: Experts, a: Arguments) -> Call:
    """Return cuBLAS's products of each expert's tokens, counted ahead: the operations alone."""
    m, w = experts.model, experts.weights
    counts = experts.route(a["logits"])[1].flatten().bincount(minlength=m.experts).tolist()
    return products(m, [(c, w["w13"][e], w["w2"][e]) for e, c in enumerate(counts) if c])


def all_at_once(experts: Experts, a: Arguments) -> Call:
    """Return cuBLAS's products of as many rows as there are choices, by one expert: as many operations."""
    m, w = experts.model, experts.weights
    return products(m, [(a["x"].shape[0] * m.top_k, w["w13"][0], w["w2"][0])])


def products(m: Model, parts: list[tuple[int, Tensor, Tensor]]) -> Call:
    """Return both products of each part's rows, one after the other."""
    most = max(rows for rows, _, _ in parts)
    x, h, u, y = (torch.randn(most, n, dtype=BF16, device=DEVICE) for n in (m.hidden, 2 * m.inner, m.inner, m.hidden))

    def call() -> Tensor:
        for rows, w13, w2 in parts:
            torch.mm(x[:rows], w13.t(), out=h[:rows])
            torch.mm(u[:rows], w2.t(), out=y[:rows])
        return y

    return call


def contenders(row: Row, experts: Experts, device: str | None = None) -> dict[str, Contender]:
    """Return everything that may be timed on a row: our kernels (with a slash in the name) and peers."""
    m, offered = row.model, {}
    for name in kernel_names("moe_fused", device or DEVICE):
        if not name.startswith("reference/"):
            offered[name] = Contender(partial(ours, name, experts), "kernel")
    peers: dict[str, Callable[[Experts, Arguments], Call]] = {}
    if m.quant in ("none", "fp8_block"):
        peers |= {"vllm": vllm_fused, "flashinfer": flashinfer_moe}
    if m.quant in ("none", "mxfp4"):
        peers["triton_kernels"] = triton_kernels_moe
    if m.quant == "none" and not m.biased:
        peers["torch grouped_mm"] = torch_grouped
    offered |= {n: Contender(partial(p, experts)) for n, p in peers.items()}
    if m.quant == "none" and row.tokens >= MANY:
        rates = {"cuBLAS, expert by expert": by_expert, "cuBLAS, all rows at once": all_at_once}
        offered |= {n: Contender(partial(p, experts), "rate") for n, p in rates.items()}
    return offered
