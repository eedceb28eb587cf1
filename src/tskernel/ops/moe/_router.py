"""The arithmetic of expert choice, apart from the selection of the k best."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrt_softplus")


def _finite_or_dropped(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits in ``dtype``, NaN as -inf and +inf as the largest finite value."""
    return torch.nan_to_num(
        logits.to(dtype), nan=float("-inf"), posinf=torch.finfo(torch.float32).max, neginf=float("-inf")
    )


def router_scores(logits: Tensor, score_function: str, dtype: torch.dtype) -> Tensor:
    """Return the score of every expert, finite and not negative."""
    x = _finite_or_dropped(logits, dtype)
    if score_function == "sigmoid":
        return torch.sigmoid(x)
    if score_function == "sqrt_softplus":
        return functional.softplus(x).sqrt()
    return torch.nan_to_num(torch.softmax(x, dim=-1), nan=0.0)  # NaN only where every logit is -inf


def router_choice(logits: Tensor, scores: Tensor, bias: Tensor | None, n_group: int, topk_group: int) -> Tensor:
    """Return what experts are ranked by ``[T, E]``: -inf for those of groups that were not chosen."""
    if bias is None:
        choice = _finite_or_dropped(logits, scores.dtype)  # ranks like the scores, without the ties that rounding makes
    else:
        choice = scores + bias.to(scores.dtype)
        choice = choice.masked_fill(choice.isnan(), float("-inf"))
    if n_group == 1:
        return choice
    groups = choice.unflatten(1, (n_group, -1))
    group_score = groups.amax(-1) if bias is None else groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    best = torch.sort(group_score, dim=-1, descending=True, stable=True).indices[:, :topk_group]
    chosen = torch.zeros_like(group_score, dtype=torch.bool).scatter(1, best, True)
    return groups.masked_fill(~chosen.unsqueeze(2), float("-inf")).flatten(1)


def routing_weights(scores: Tensor, renormalize: bool, routed_scaling_factor: float) -> Tensor:
    """Return the weights of the chosen experts from their scores ``[T, top_k]``."""
    if renormalize:
        total = scores.sum(-1, keepdim=True)
        scores = scores / total.masked_fill(total == 0, 1.0)
    return scores * routed_scaling_factor
