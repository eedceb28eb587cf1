# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportIncompatibleMethodOverride=false
"""GPT-OSS's experts in mxfp4 by ``moe_fused``, on the checkpoint's weights: no padding, no order of a kernel's own.

vLLM takes a registered quantization before its own of the same name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod

from tskernel.integrations._vllm_moe import left_to_vllm, part_gate_and_up, run_experts

NAME = "gpt_oss_mxfp4"
GATE_AND_UP = ("w13_weight", "w13_weight_scale", "w13_bias")


def install_mxfp4() -> str:
    """Replace the quantization of GPT-OSS checkpoints."""
    register_quantization_config(NAME)(TokenspeedGptOssMxfp4Config)
    return NAME


class TokenspeedGptOssMxfp4Config(GptOssMxfp4Config):
    """vLLM's, with experts by the op."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return what holds and applies the weights of a layer."""
        if isinstance(layer, RoutedExperts) and not left_to_vllm(layer):
            return TokenspeedGptOssMxfp4MoEMethod(layer.moe_config)
        return super().get_quant_method(layer, prefix)


class TokenspeedGptOssMxfp4MoEMethod(GptOssMxfp4MoEMethod):
    """``moe_fused`` on packed weights and scale bytes; activations stay as they are."""

    supports_pre_processed_weights = False
    skip_forward_padding = False
    has_unpadded_output = False
    is_monolithic = False

    def __init__(self, moe: Any) -> None:
        # Not vLLM's own: it chooses one of its kernels, and stops where it has none for the device.
        FusedMoEMethodBase.__init__(self, moe)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Return the sizes as they are, but for what vLLM itself needs."""
        return FusedMoEMethodBase.maybe_roundup_sizes(
            self, hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put gate rows before up rows."""
        part_gate_and_up(layer, GATE_AND_UP)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return nothing: vLLM's kernels read it."""

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the weighted sum of the chosen experts."""
        scales = {"w13_scale": layer.w13_weight_scale, "w2_scale": layer.w2_weight_scale}
        return run_experts(layer, x, topk_weights, topk_ids, quant="mxfp4", **scales)
