# pyright: reportMissingImports=false
"""SGLang's norms, gated activations and rotary embeddings, by the ops.

SGLang picks one of a layer's ``forward_*`` methods by device, and ``forward_native`` when it compiles; all of them are
hooked. A hook gets the method it stands in for, and leaves to it what the op does not do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.layers import activation as sglang_activation
from sglang.srt.layers import layernorm as sglang_norm
from sglang.srt.layers.layernorm import _fp8_static_input_scale
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

ops = torch.ops.tokenspeed
DEVICES = ("native", "cuda", "hip", "aiter", "cpu", "xpu", "npu", "musa")


def hook(hooks: dict[type, Callable[..., Any]], **of_methods: Callable[..., Any]) -> str:
    """Register a hook of the forward methods of each class; return the names of the classes.

    ``of_methods`` names a method, as ``RMSNorm_forward_cuda``, that has a hook of its own.
    Nothing is hooked when one of the methods is missing or has a hook already: SGLang itself would only log that.
    """
    targets = {}
    for cls, fn in hooks.items():
        methods = [name for name in (f"forward_{device}" for device in DEVICES) if name in vars(cls)]
        if "forward_native" not in methods:
            raise AttributeError(f"{cls.__name__} has no forward_native")
        for name in methods:
            own = of_methods.get(f"{cls.__name__}_{name}", fn)
            targets[f"{cls.__module__}.{cls.__name__}.{name}"] = own
    for target in targets:
        if HookRegistry._hooks.get(target):
            raise TypeError(f"{target} has a hook of another plugin")
    for target, fn in targets.items():
        HookRegistry.register(target, fn, HookType.AROUND)
    return ", ".join(cls.__name__ for cls in hooks)


def install_norm() -> str:
    """Stand in for RMSNorm and the two classes of norms with weight 1 + w."""
    hooks = {
        sglang_norm.RMSNorm: _rmsnorm,
        sglang_norm.GemmaRMSNorm: _gemma_rmsnorm,
        sglang_norm.Gemma3RMSNorm: _gemma_rmsnorm,
    }
    return hook(hooks, RMSNorm_forward_cuda=_rmsnorm_on_cuda)


def _fits(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether the ops take these tensors: with a residual of another dtype or shape SGLang's own code goes on."""
    if is_batch_invariant_mode_enabled() or weight.dtype not in (x.dtype, torch.float32):
        return False
    return residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)


def _rmsnorm(
    original: Callable[..., Any],
    self: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    special = (
        self.variance_size_override is not None
        or self.cast_x_before_out_mul  # rounds before the product with the weight
        or self.override_orig_dtype is not None
        or (self.fp32_residual and residual is not None and x.dtype != torch.float32)
        or getattr(self, "x_pad_to_multiple", 0) > 0
        or self.weight.shape[0] != x.shape[-1]
    )
    if special or not _fits(x, self.weight, residual):
        return original(self, x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return ops.rmsnorm(x, self.weight, self.variance_epsilon)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    return ops.add_rmsnorm(x, residual, self.weight, self.variance_epsilon)


def _rmsnorm_on_cuda(
    original: Callable[..., Any],
    self: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """Leave to SGLang a norm that quantizes its result for the layer behind it: only this method can."""
    behind = self._quant_linear if quant_linear is None else quant_linear
    if _fp8_static_input_scale(behind) is not None:
        return original(self, x, residual, post_residual_addition, quant_linear)
    return _rmsnorm(original, self, x, residual, post_residual_addition, quant_linear)


def _gemma_rmsnorm(
    original: Callable[..., Any],
    self: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
) -> Any:
    if not _fits(x, self.weight, residual):
        more = () if post_residual_addition is None else (post_residual_addition,)
        return original(self, x, residual, *more)
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    if residual is None:
        return ops.gemma_rmsnorm(x, self.weight, eps)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    # One op for the sum and the norm. In fp32, since 1 + w in the dtype of the weight would be rounded.
    return ops.add_rmsnorm(x, residual, self.weight.float() + 1.0, eps)


def install_activation() -> str:
    """Stand in for the gated activations."""
    return hook({sglang_activation.SiluAndMul: _silu_and_mul, sglang_activation.GeluAndMul: _gelu_and_mul})


def _silu_and_mul(original: Callable[..., Any], self: Any, x: Tensor, limit: float = 0.0) -> Any:
    return original(self, x, limit) if limit else ops.silu_and_mul(x)


def _gelu_and_mul(original: Callable[..., Any], self: Any, x: Tensor) -> Any:
    if self.approximate not in ("tanh", "none"):
        return original(self, x)
    return ops.gelu_tanh_and_mul(x) if self.approximate == "tanh" else ops.gelu_and_mul(x)


def install_rope() -> str:
    """Stand in for RotaryEmbedding, and so its kinds that differ only in their table of angles."""
    return hook({RotaryEmbedding: _rotary_embedding})


def _rotary_embedding(
    original: Callable[..., Any],
    self: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> Any:
    table = self.cos_sin_cache
    special = (
        offsets is not None
        or fused_set_kv_buffer_arg is not None  # SGLang writes the cache in the same kernel
        or self._force_native
        or hasattr(self, "sin_cos_cache")
        or query.dim() > 3
        or query.dim() != key.dim()
        or query.dtype != key.dtype
        or table.shape[1] != self.rotary_dim
    )
    if special:
        return original(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
    return ops.apply_rope(
        positions.flatten(), query, key, table, is_neox=self.is_neox_style,
        head_size=self.head_size if query.dim() == 2 else None,
    )  # fmt: skip
