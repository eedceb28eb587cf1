# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""vLLM's experts by ``moe_fused``. The router stays vLLM's, and so do experts of other kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

logger = init_logger("vllm.tskernel")
ops = torch.ops.tokenspeed
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swigluoai": "swiglu_oai",
    "swigluoai_uninterleave": "swiglu_oai",
}


def install_moe() -> str:
    """Replace the method of layers without quantization."""
    UnquantizedFusedMoEMethod.register_oot(TokenspeedFusedMoEMethod, name="UnquantizedFusedMoEMethod")
    return "UnquantizedFusedMoEMethod"


def unsupported(moe: Any) -> str | None:
    """Return why a layer of this configuration stays vLLM's, or None."""
    if moe.activation.value not in ACTIVATIONS:
        return f"activation {moe.activation.value}, expected one of {', '.join(ACTIVATIONS)}"
    if moe.moe_parallel_config.use_all2all_kernels:
        return "tokens are exchanged between ranks by vLLM's all-to-all kernels"
    if moe.moe_parallel_config.enable_eplb:
        return "experts are moved between ranks while serving"
    if moe.is_lora_enabled:
        return "LoRA"
    if getattr(moe, "swiglu_beta", None) not in (None, 1.0):
        return f"swiglu_beta {moe.swiglu_beta}, expected 1"
    if current_platform.is_cpu() and select_unquantized_moe_backend(moe_config=moe)[1] is None:
        return "up to about 0.26, vLLM for CPUs has no router apart from its experts"
    return None


def left_to_vllm(layer: Any) -> bool:
    """Whether the experts of a layer stay vLLM's; says once why."""
    reason = unsupported(layer.moe_config)
    if reason is None and layer.apply_router_weight_on_input:
        reason = "the router's weights are applied to the input"
    if reason is not None:
        logger.warning_once("tskernel: experts stay vLLM's: %s", reason)
    return reason is not None


def part_gate_and_up(layer: Any, names: tuple[str, ...]) -> None:
    """Put gate rows before up rows, in place, in those of a layer's tensors that it has, where the two alternate."""
    for name in names:
        rows = getattr(layer, name, None)
        if rows is not None:
            rows.data.copy_(torch.cat([rows.data[:, 0::2], rows.data[:, 1::2]], dim=1))


def run_experts(layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **quantized: Any) -> Tensor:
    """Return the weighted sum of the chosen experts of a layer."""
    options = {}
    if (alpha := getattr(layer, "swiglu_alpha", None)) is not None:
        options["swiglu_alpha"] = alpha
    if (limit := getattr(layer, "swiglu_limit", None)) is not None:
        options["swiglu_limit"] = limit
    return ops.moe_fused(
        x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids, activation=ACTIVATIONS[layer.activation.value],
        w13_bias=getattr(layer, "w13_bias", None), w2_bias=getattr(layer, "w2_bias", None),
        expert_map=layer.expert_map, **quantized, **options,
    )  # fmt: skip


class TokenspeedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """``moe_fused`` on the layer's own weights: gate rows, then up rows."""

    reason: str | None = None

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self.reason = unsupported(moe)
        if self.reason is not None:
            logger.warning_once("tskernel: experts stay vLLM's: %s", self.reason)
        else:
            self.supports_pre_processed_weights = False  # rows would change places twice

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM hands over router logits instead of chosen experts."""
        return super().is_monolithic if self.reason is not None else False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as they are, but for GPT-OSS's, whose gate and up rows alternate."""
        if self.reason is None and layer.apply_router_weight_on_input:
            self.reason = "the router's weights are applied to the input"
        if self.reason is not None:
            super().process_weights_after_loading(layer)
            return
        if layer.activation.value == "swigluoai":
            part_gate_and_up(layer, ("w13_weight", "w13_bias"))

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Any:
        """Return the weighted sum of the chosen experts; vLLM runs the shared ones itself."""
        if self.reason is not None:
            return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        return run_experts(layer, x, topk_weights, topk_ids)
