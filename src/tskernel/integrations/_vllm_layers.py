# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""vLLM's norms, gated activations and rotary embeddings, by the ops.

Each class stands in for vLLM's of the same name. vLLM takes ``forward_native`` when it compiles and the device's
method when it does not; a replacement must be all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import activation as vllm_activation
from vllm.model_executor.layers import layernorm as vllm_norm
from vllm.model_executor.layers import rotary_embedding as vllm_rope
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

ops = torch.ops.tokenspeed
METHODS = ("forward_native", "forward_cuda", "forward_hip", "forward_cpu", "forward_xpu", "forward_oot")


def replace(forwards: dict[type, Any], **more: Any) -> str:
    """Register a subclass of each class, all of whose forward methods are the given one; return the names.

    Nothing is registered when one of them is replaced already.
    """
    for original in forwards:
        if original.__name__ in op_registry_oot:
            raise TypeError(f"{original.__name__} is already replaced by {op_registry_oot[original.__name__]}")
    for original, forward in forwards.items():
        name, methods = original.__name__, dict.fromkeys(METHODS, forward)
        new = type(f"Tokenspeed{name}", (original,), {"__module__": __name__, **methods, **more.get(name, {})})
        original.register_oot(new, name=name)  # pyright: ignore[reportAttributeAccessIssue]
    return ", ".join(original.__name__ for original in forwards)


def install_norm() -> str:
    """Replace RMSNorm and GemmaRMSNorm."""
    return replace({vllm_norm.RMSNorm: _rmsnorm, vllm_norm.GemmaRMSNorm: _gemma_rmsnorm})


def _rmsnorm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    weight, eps = self.weight, self.variance_epsilon
    if self.variance_size_override is not None or weight.dtype not in (x.dtype, torch.float32):
        return vllm_norm.RMSNorm.forward_native(self, x, residual)
    if residual is None:
        return ops.rmsnorm(x, weight, eps)
    return ops.add_rmsnorm(x, residual, weight, eps)


def _gemma_rmsnorm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    weight, eps = self.weight, self.variance_epsilon
    if residual is not None:
        # One op for the sum and the norm: its weight is what Gemma adds 1 to.
        return ops.add_rmsnorm(x, residual, weight.float() + 1.0, eps)
    if weight.dtype not in (x.dtype, torch.float32):
        weight = weight.float()
    return ops.gemma_rmsnorm(x, weight, eps)


def install_activation() -> str:
    """Replace the gated activations."""
    forwards = {
        vllm_activation.SiluAndMul: staticmethod(_silu_and_mul),
        vllm_activation.GeluAndMul: _gelu_and_mul,
        vllm_activation.SwigluOAIAndMul: _swiglu_oai,
    }
    return replace(forwards, SiluAndMul={"__init__": _without_compilation})


def _without_compilation(self: Any, *, compile_native: bool = True) -> None:
    vllm_activation.SiluAndMul.__init__(self, compile_native=False)  # one op: nothing to fuse


def _silu_and_mul(x: Tensor) -> Tensor:
    return ops.silu_and_mul(x)


def _gelu_and_mul(self: Any, x: Tensor) -> Tensor:
    return ops.gelu_tanh_and_mul(x) if self.approximate == "tanh" else ops.gelu_and_mul(x)


def _swiglu_oai(self: Any, x: Tensor) -> Tensor:
    return ops.swiglu_oai(x, self.alpha, self.limit, interleaved=True)


def install_rope() -> str:
    """Replace RotaryEmbedding, and those of its kinds that differ only in their table of angles."""
    classes = [c for c in vars(vllm_rope).values() if isinstance(c, type) and issubclass(c, RotaryEmbedding)]
    plain = [c for c in classes if c.forward_native is RotaryEmbedding.forward_native]
    return replace(dict.fromkeys(plain, _rotary_embedding))


def _rotary_embedding(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    table = self.cos_sin_cache
    if key is None or query.dim() > 3 or table.shape[1] != self.rotary_dim:
        return RotaryEmbedding.forward_native(self, positions, query, key)
    return ops.apply_rope(
        positions.flatten(), query, key, table, is_neox=self.is_neox_style,
        head_size=self.head_size if query.dim() == 2 else None,
    )  # fmt: skip
