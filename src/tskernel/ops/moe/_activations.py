"""The gated activations between the two matrix products of an expert."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")


def activate(h: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """Return ``act(gate) * up`` for ``h = [gate | up]`` along the last dimension.

    ``swiglu_oai`` is GPT-OSS's: gate clamped from above and up from both sides at ``limit``, then
    ``gate * sigmoid(alpha * gate) * (up + 1)``.
    """
    gate, up = h.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return gate * torch.sigmoid(gate * alpha) * (up + 1.0)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
