"""A small mixture-of-experts decoder as an inference engine runs it: packed prefill, then a paged cache.

All heavy work goes through tskernel's operators; what is left to torch is indexing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

import tskernel
from tskernel.demo.weights import Config, Weights

PAGE = 16


class Layer(nn.Module):
    """Attention with sinks and perhaps a window, then experts; holds its own pages of the cache."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    sinks: Tensor
    o: Tensor
    o_bias: Tensor
    mlp_norm: Tensor
    router: Tensor
    router_bias: Tensor
    w13: Tensor
    w13_bias: Tensor
    w2: Tensor
    w2_bias: Tensor
    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, config: Config, weights: Weights, index: int, pages: int) -> None:
        super().__init__()
        self.config = config
        window = config.window_of(index)
        self.window_left = window - 1 if window else -1
        for name in [n for n in weights if n.startswith(f"layers.{index}.")]:
            self.register_buffer(name.rpartition(".")[2], weights[name])
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(pages, PAGE, config.kv_heads, config.head_dim))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as ``[T, heads, head_dim]``, views of one product."""
        c = self.config
        qkv = tskernel.mm(x, self.qkv, bias=self.qkv_bias).unflatten(-1, (-1, c.head_dim))
        q, k, v = qkv.split((c.q_heads, c.kv_heads, c.kv_heads), 1)
        return q, k, v

    def project(self, out: Tensor) -> Tensor:
        """Return the attention output in the width of the model."""
        return tskernel.mm(out.flatten(1), self.o, bias=self.o_bias)

    def experts(self, x: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts."""
        c = self.config
        logits = tskernel.mm(x, self.router, bias=self.router_bias)
        weights, ids = tskernel.moe_topk(logits, c.top_k, score_function="softmax", renormalize=True)
        biases = {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        return tskernel.moe_fused(x, self.w13, self.w2, weights, ids, activation="swiglu_oai", **biases)


class Decoder(nn.Module):
    """The model and the state of a batch of requests. One decode step reads and writes only tensors of fixed size."""

    embed: Tensor
    norm: Tensor
    lm_head: Tensor
    page_table: Tensor
    cos_sin: Tensor
    lengths: Tensor
    token: Tensor

    def __init__(self, config: Config, weights: Weights, batch: int, max_tokens: int) -> None:
        super().__init__()
        self.config, self.max_tokens = config, max_tokens
        per_request = -(-max_tokens // PAGE)
        for name in ("embed", "norm", "lm_head"):
            self.register_buffer(name, weights[name])
        self.layers = nn.ModuleList(Layer(config, weights, i, batch * per_request) for i in range(config.layers))
        pages = torch.randperm(batch * per_request, generator=torch.Generator().manual_seed(0))
        state = {
            "page_table": pages.view(batch, per_request).to(torch.int32),
            "cos_sin": rope_cache(max_tokens, config.head_dim, config.rope_base),
            "lengths": torch.zeros(batch, dtype=torch.int32),
            "token": torch.zeros(batch, dtype=torch.int32),
        }
        for name, value in state.items():
            self.register_buffer(name, value)

    @property
    def blocks(self) -> list[Layer]:
        """The layers, by their type."""
        return cast("list[Layer]", self.layers)

    def slots(self, request: Tensor, position: Tensor) -> Tensor:
        """Return where in the cache a token of a request stands."""
        return self.page_table[request, position // PAGE].to(torch.int64) * PAGE + position % PAGE

    def prefill(self, prompts: Sequence[Tensor]) -> Tensor:
        """Run the prompts, packed into one row, and return the first new token of each."""
        lengths = torch.tensor([len(p) for p in prompts])
        cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        request = torch.repeat_interleave(torch.arange(len(prompts)), lengths)
        position = torch.arange(len(request)) - cu_seqlens[request]
        slots, longest, c = self.slots(request, position), int(lengths.max()), self.config

        residual = self.embed[torch.cat(list(prompts))]
        x = tskernel.rmsnorm(residual, self.blocks[0].attn_norm, c.eps)
        for i, layer in enumerate(self.blocks):
            q, k, v = layer.heads(x)
            q, k = tskernel.apply_rope(position, q, k, self.cos_sin)
            tskernel.store_kvcache(k, v, layer.k_cache, layer.v_cache, slots)
            options = {"window_left": layer.window_left, "sinks": layer.sinks}
            x = layer.project(tskernel.mha_prefill(q, k, v, cu_seqlens, longest, **options))
            tskernel.fused_add_rmsnorm(x, residual, layer.mlp_norm, c.eps)
            x = layer.experts(x)
            tskernel.fused_add_rmsnorm(x, residual, self.next_norm(i), c.eps)
        self.lengths.copy_(lengths)
        self.token.copy_(self.sample(tskernel.mm(x[cu_seqlens[1:] - 1], self.lm_head)))
        return self.token.clone()

    def sample(self, logits: Tensor, temperature: float = 0.0) -> Tensor:
        """Return a token of each row; at temperature 0 the best one."""
        batch = len(logits)
        top_k, top_p = torch.full((batch,), 40, dtype=torch.int32), torch.full((batch,), 0.95)
        seed, offset = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
        return tskernel.top_k_top_p_sample(logits, top_k, top_p, torch.full((batch,), temperature), seed, offset)

    def next_norm(self, layer: int) -> Tensor:
        """Return the weight of the norm behind a layer."""
        return self.norm if layer + 1 == len(self.layers) else self.blocks[layer + 1].attn_norm

    def forward(self) -> Tensor:
        """Run one decode step for all requests: consume ``token``, advance the state, return the next token."""
        c = self.config
        position = self.lengths.to(torch.int64)
        self.lengths.add_(1)
        slots = self.slots(torch.arange(len(position)), position)
        residual = self.embed[self.token]
        x = tskernel.rmsnorm(residual, self.blocks[0].attn_norm, c.eps)
        for i, layer in enumerate(self.blocks):
            q, k, v = layer.heads(x)
            caches = (layer.k_cache, layer.v_cache)
            tskernel.apply_rope_store_kvcache_(position, q, k, v, self.cos_sin, *caches, slots)
            options = {"window_left": layer.window_left, "sinks": layer.sinks}
            paged = (*caches, self.page_table, self.lengths, self.max_tokens)
            x = layer.project(tskernel.mha_decode_with_kvcache(q, *paged, **options))
            tskernel.fused_add_rmsnorm(x, residual, layer.mlp_norm, c.eps)
            x = layer.experts(x)
            tskernel.fused_add_rmsnorm(x, residual, self.next_norm(i), c.eps)
        self.token.copy_(tskernel.argmax(tskernel.mm(x, self.lm_head)))
        return self.token.clone()


def rope_cache(positions: int, width: int, base: float) -> Tensor:
    """Return the cosines and sines that ``apply_rope`` reads, ``[positions, width]``."""
    frequency = base ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1)
