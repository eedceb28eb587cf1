# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportIncompatibleMethodOverride=false
"""vLLM's fp8 checkpoints by the ops: linear layers by ``mm``, experts by ``moe_fused``.

vLLM takes a registered quantization before its own of the same name. Activations are quantized per row, per 128
values of a row where weights have blocks, or with the checkpoint's own scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_input_scale,
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter, PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs

from tskernel.integrations._vllm_moe import left_to_vllm, logger, run_experts

ops = torch.ops.tokenspeed
NAME = "fp8"
BLOCK = [128, 128]


def install_fp8() -> str:
    """Replace the quantization of fp8 checkpoints."""
    register_quantization_config(NAME)(TokenspeedFp8Config)
    return NAME


class TokenspeedFp8Config(Fp8Config):
    """vLLM's, with linear layers and experts by the ops."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return what holds and applies the weights of a layer."""
        if self.weight_block_size not in (None, BLOCK) or getattr(self, "store_dtype", None) is not None:
            logger.warning_once(
                "tskernel: fp8 stays vLLM's: blocks %s, expected %s; stored as %s, expected fp8",
                str(self.weight_block_size), str(BLOCK), str(getattr(self, "store_dtype", None)),
            )  # fmt: skip
            return super().get_quant_method(layer, prefix)
        # vLLM finds the weight of kv_b_proj by a product with ones, which a fixed scale of activations need not bear.
        odd = self.activation_scheme == "static" and prefix.endswith("kv_b_proj")
        if isinstance(layer, LinearBase) and not odd and not self._skipped(prefix):
            return TokenspeedFp8LinearMethod(self)
        if isinstance(layer, RoutedExperts) and not self._skipped(prefix) and not left_to_vllm(layer):
            return TokenspeedFp8MoEMethod(self, layer)
        return super().get_quant_method(layer, prefix)

    def _skipped(self, prefix: str) -> bool:
        from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

        more = {"match_mode": self.ignored_layers_match_mode} if hasattr(self, "ignored_layers_match_mode") else {}
        return is_layer_skipped(prefix, self.ignored_layers, self.packed_modules_mapping, **more)


def kept(held: Any, name: str, value: Tensor) -> None:
    """Set an attribute; a tensor that is there already keeps its place, which a recorded graph may know."""
    before = getattr(held, name, None)
    if isinstance(before, Tensor) and before.shape == value.shape:
        before.copy_(value)
    else:
        setattr(held, name, value)


@register_weight_loader_v2_supported_method
class TokenspeedFp8LinearMethod(LinearMethodBase):
    """``mm`` on the weight as it is stored, ``[N, K]``.

    Not a subclass of vLLM's: that one chooses a kernel, stops where it has none for the device, and is warmed up.
    """

    supports_pre_processed_weights = False

    def __init__(self, quant_config: Any) -> None:
        super().__init__()
        self.quant_config = quant_config
        self.blocks = quant_config.weight_block_size
        self.static = quant_config.activation_scheme == "static"

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Give the layer the tensors that a checkpoint fills."""
        loader, parts, columns = (
            extra_weight_attrs.get("weight_loader"),
            output_partition_sizes,
            input_size_per_partition,
        )
        layer.logical_widths, layer.orig_dtype, layer.weight_block_size = parts, params_dtype, self.blocks
        layer.input_size_per_partition, layer.output_size_per_partition = columns, sum(parts)
        layer.register_parameter("weight", create_fp8_weight_parameter(sum(parts), columns, loader))
        if self.blocks:
            validate_fp8_block_shape(layer, input_size, output_size, columns, parts, self.blocks)
            scale = create_fp8_scale_parameter(BlockQuantScaleParameter, parts, columns, self.blocks, loader)
            layer.register_parameter("weight_scale_inv", scale)
        else:
            scale = create_fp8_scale_parameter(PerTensorScaleParameter, parts, columns, None, loader)
            layer.register_parameter("weight_scale", scale)
        if self.static:
            scale = create_fp8_input_scale(parts, loader)
            set_weight_attrs(scale, {"scale_type": "input_scale"})
            layer.register_parameter("input_scale", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Spread the scales of parts that are one product here, as of queries, keys and values, over their rows."""
        if not self.blocks:
            widths = torch.tensor(layer.logical_widths, device=layer.weight.device)
            kept(layer, "row_scale", torch.repeat_interleave(layer.weight_scale.data, widths))
        if self.static:
            kept(layer, "static_scale", layer.input_scale.data.max().reshape(1, 1))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight^T + bias``."""
        rows = x.reshape(-1, x.shape[-1])
        if self.blocks:
            a, scale = ops.quantize_fp8_dynamic(rows, granularity="group")
            quant, b_scale = "fp8_block", layer.weight_scale_inv
        else:
            if self.static:
                a, scale = ops.quantize_fp8(rows, layer.static_scale.expand(rows.shape[0], 1))
            else:
                a, scale = ops.quantize_fp8_dynamic(rows)
            quant, b_scale = "fp8_token", layer.row_scale
        y = ops.mm(a, layer.weight, a_scale=scale, b_scale=b_scale, bias=bias, quant=quant, out_dtype=x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])


class TokenspeedFp8MoEMethod(Fp8MoEMethod):
    """``moe_fused`` on the weights as they are stored."""

    supports_pre_processed_weights = False
    is_monolithic = False

    def __init__(self, quant_config: Any, layer: Any) -> None:
        # Not vLLM's own: it chooses one of its kernels, and stops where it has none for the device.
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.block_quant = self.weight_block_size is not None
        self.weight_scale_name = "weight_scale_inv" if self.block_quant else "weight_scale"
        self.weight_scale_refine = None
        self.scales: dict[str, Tensor] = {}

    def process_weights_after_loading(self, layer: Any) -> None:
        """Spread a scale for a whole gate, up or down matrix over its rows; take the largest static scale."""
        if self.block_quant:
            self.scales = {"w13_scale": layer.w13_weight_scale_inv.data, "w2_scale": layer.w2_weight_scale_inv.data}
            return
        for name in ("w13", "w2"):
            weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale").data
            experts, rows, _ = weight.shape
            parts = scale.reshape(experts, -1)
            kept(layer, f"{name}_row_scale", parts.repeat_interleave(rows // parts.shape[1], dim=1).contiguous())
            self.scales[f"{name}_scale"] = getattr(layer, f"{name}_row_scale")
            static = getattr(layer, f"{name}_input_scale", None)
            if static is not None:
                kept(layer, f"{name}_static_scale", static.data.max().reshape(1))
                self.scales[f"a{name.removeprefix('w')}_scale"] = getattr(layer, f"{name}_static_scale")

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return nothing: vLLM's kernels read it."""

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the weighted sum of the chosen experts."""
        quant = "fp8_block" if self.block_quant else "fp8_token"
        return run_experts(layer, x, topk_weights, topk_ids, quant=quant, **self.scales)
