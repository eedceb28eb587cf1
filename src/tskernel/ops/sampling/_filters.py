"""What the sampling ops share: the meaning of top-k, top-p and of rows without a usable value."""

from __future__ import annotations

import torch
from torch import Tensor

from tskernel.checks import FLOATS, expect, expect_dim, expect_dtype, expect_shape


def clean_logits(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits in ``dtype`` with NaN replaced by -inf: NaN is never chosen before a number."""
    x = logits.to(dtype)
    return x.masked_fill(x.isnan(), float("-inf"))


def clean_probs(probs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return non-negative finite weights: NaN and negative entries are 0; +inf entries share their row alone."""
    x = probs.to(dtype)
    x = x.masked_fill(x.isnan(), 0.0).clamp(min=0.0)
    infinite = x == float("inf")
    return torch.where(infinite.any(-1, keepdim=True), infinite.to(dtype), x)


def normalized(weights: Tensor, keep: Tensor) -> Tensor:
    """Return the kept weights divided by their sum, 0 elsewhere; a row without mass stays 0."""
    kept = weights.masked_fill(~keep, 0.0)
    total = kept.sum(-1, keepdim=True)
    return kept / total.masked_fill(total == 0, 1.0)


def effective_top_k(top_k: Tensor, vocab: int) -> Tensor:
    """Return how many tokens each row keeps, int64 ``[B, 1]``: all of them where the filter is off."""
    k = top_k.to(torch.int64).unsqueeze(1)
    return torch.where((k <= 0) | (k > vocab), vocab, k)


def best_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and token ids of each row, largest value first and equal values by id."""
    values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
    return values, ids


def shortest_prefix(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return which of the sorted ``weights [B, V]`` form the shortest prefix with at least ``top_p [B]`` of their sum.

    The sums are in fp64, where sums of fp32 terms of like magnitude are exact: the set does not depend on the order of
    summation.
    """
    w = weights.to(torch.float64)
    before = w.cumsum(-1) - w
    p = top_p.to(torch.float64).unsqueeze(1)
    keep = (before < p * w.sum(-1, keepdim=True)) | (p >= 1)
    first = torch.arange(w.shape[-1], device=w.device) == 0
    return keep | first


def unsorted(keep: Tensor, ids: Tensor) -> Tensor:
    """Bring a mask from sorted to token order."""
    return torch.zeros_like(keep).scatter(-1, ids, keep)


def check_rows(name: str, x: Tensor) -> None:
    """Check that ``x`` is a floating ``[B, V]`` with at least one column."""
    expect_dtype(name, x, FLOATS)
    expect_dim(name, x, 2)
    expect(x.shape[1] > 0, f"{name}.shape", "at least one column", tuple(x.shape))


def check_per_row(name: str, value: Tensor, x: Tensor, *dtypes: torch.dtype) -> None:
    """Check a parameter that has one element per row of ``x``."""
    expect_shape(name, value, (x.shape[0],))
    expect_dtype(name, value, dtypes)
