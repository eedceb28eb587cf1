"""One decoder layer over a paged KV cache, from operators only: what the export and compile tests trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tskernel

HEADS, KV_HEADS, HEAD, HIDDEN, INNER, PAGE, PAGES = 4, 2, 16, 64, 48, 4, 12


class DecodeStep(nn.Module):
    """A layer that writes ``x``, ``residual``, q, k and its two cache buffers."""

    def __init__(self, tokens_per_request: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tokens_per_request = tokens_per_request

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / shape[-1] ** 0.5, requires_grad=False)

        self.qkv, self.o = weight((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN), weight(HIDDEN, HEADS * HEAD)
        self.gate_up, self.down = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
        self.norms = nn.ParameterList([weight(HIDDEN) for _ in range(3)])
        angles = torch.arange(64).unsqueeze(1) * 0.5 ** torch.arange(HEAD // 2)
        self.register_buffer("cos_sin", torch.cat([angles.cos(), angles.sin()], -1))
        for name in ("k_cache", "v_cache"):
            # Slots that nothing was written to must not matter.
            self.register_buffer(name, torch.full((PAGES, PAGE, KV_HEADS, HEAD), float("nan")))

    def forward(
        self, x: Tensor, residual: Tensor, positions: Tensor, slots: Tensor, table: Tensor, lens: Tensor
    ) -> Tensor:
        x, residual = x * 1.0, residual * 1.0  # Inductor's C++ backend fails on this pattern of inputs (pytorch#196570)
        tskernel.fused_add_rmsnorm(x, residual, self.norms[0])
        qkv = tskernel.mm(x, self.qkv).unflatten(-1, (-1, HEAD))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        tskernel.apply_rope_(positions, q, k, self.cos_sin)
        tskernel.store_kvcache(k, v, self.k_cache, self.v_cache, slots)
        longest = table.shape[1] * PAGE
        out = tskernel.mha_decode_with_kvcache(
            q, self.k_cache, self.v_cache, table, lens, longest, self.tokens_per_request
        )
        h = tskernel.mm(out.flatten(1), self.o)
        tskernel.fused_add_rmsnorm(h, residual, self.norms[1])
        h = tskernel.mm(tskernel.silu_and_mul(tskernel.mm(h, self.gate_up)), self.down)
        return tskernel.rmsnorm(h + residual, self.norms[2])


def step_inputs(batch: int, step: int, tokens_per_request: int = 1) -> tuple[Tensor, ...]:
    """Return the inputs of one decode step: request b holds pages 3b to 3b + 2 and has ``step`` tokens behind it."""
    generator = torch.Generator().manual_seed(step)
    tokens = batch * tokens_per_request
    x, residual = (torch.randn((tokens, HIDDEN), generator=generator) for _ in range(2))
    table = torch.arange(batch * 3, dtype=torch.int32).view(batch, 3)
    positions = (step + torch.arange(tokens_per_request)).repeat(batch)
    request = torch.arange(batch).repeat_interleave(tokens_per_request)
    slots = request * 3 * PAGE + positions
    lens = torch.full((batch,), step + tokens_per_request, dtype=torch.int32)
    return x, residual, positions, slots, table, lens
