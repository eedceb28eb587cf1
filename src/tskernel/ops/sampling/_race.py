"""The draw itself, shared by every kernel of ``top_k_top_p_sample`` that is written in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.ops.sampling._philox import gumbel_noise


def scaled_logits(x: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(x - max) / temperature`` (at most 0, and 0 for the best) and which rows are greedy ``[B, 1]``.

    The best is set to 0 rather than computed: it may be infinite, and then the difference is NaN.
    """
    t = temperature.to(x.dtype).unsqueeze(1)
    greedy = ~(t > 0)
    t = t.masked_fill(greedy, 1.0).clamp(max=torch.finfo(torch.float32).max)
    best = x.amax(-1, keepdim=True)
    return ((x - best) / t).masked_fill(x == best, 0.0), greedy


def race_winner(scaled: Tensor, keep: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Return the kept token with the largest score plus Gumbel noise, int32 ``[B]``; 0 for a row that keeps none."""
    score = scaled + gumbel_noise(seed, offset, scaled.shape[1], scaled.dtype)
    return score.masked_fill(~keep, float("-inf")).argmax(-1).to(torch.int32)
