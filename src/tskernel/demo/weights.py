"""Random weights for the demo's decoder, which has the form of GPT-OSS: made once, saved, then loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder. Every second layer sees ``window`` tokens, the others all."""

    layers: int = 4
    hidden: int = 256
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    top_k: int = 2
    intermediate: int = 256
    vocab: int = 256  # bytes
    window: int = 128
    rope_base: float = 10000.0
    eps: float = 1e-5

    def window_of(self, layer: int) -> int:
        """Return how many tokens a layer sees, itself included; 0 for all."""
        return self.window if layer % 2 == 0 else 0


def make_weights(config: Config, seed: int = 0) -> Weights:
    """Return weights with the spread of trained ones: unit outputs, norms near one, biases and sinks that matter."""
    make = torch.Generator().manual_seed(seed)
    width, kv_width = config.q_heads * config.head_dim, config.kv_heads * config.head_dim

    def normal(*shape: int, scale: float | None = None) -> Tensor:
        return torch.randn(shape, generator=make) * (shape[-1] ** -0.5 if scale is None else scale)

    weights = {
        "embed": normal(config.vocab, config.hidden, scale=1.0),
        "norm": 1 + normal(config.hidden, scale=0.1),
        "lm_head": normal(config.vocab, config.hidden),
    }
    for i in range(config.layers):
        layer = {
            "attn_norm": 1 + normal(config.hidden, scale=0.1),
            "qkv": normal(width + 2 * kv_width, config.hidden, scale=1.5 * config.hidden**-0.5),
            "qkv_bias": normal(width + 2 * kv_width, scale=0.2),
            "sinks": normal(config.q_heads, scale=1.0),
            "o": normal(config.hidden, width),
            "o_bias": normal(config.hidden, scale=0.1),
            "mlp_norm": 1 + normal(config.hidden, scale=0.1),
            "router": normal(config.experts, config.hidden),
            "router_bias": normal(config.experts, scale=0.1),
            "w13": normal(config.experts, 2 * config.intermediate, config.hidden),
            "w13_bias": normal(config.experts, 2 * config.intermediate, scale=0.2),
            "w2": normal(config.experts, config.hidden, config.intermediate),
            "w2_bias": normal(config.experts, config.hidden, scale=0.1),
        }
        weights |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return weights


def load_weights(path: Path, config: Config) -> Weights:
    """Return the weights in a file, which is made first if it is not there."""
    if not path.exists():
        torch.save(make_weights(config), path)
    return torch.load(path, weights_only=True)
