"""Selection without sorting: which elements, largest first, reach a target weight, in two passes over their bits."""

from __future__ import annotations

import torch
from torch import Tensor

_DIGIT = 16
_BINS = 1 << _DIGIT


def ordered_keys(x: Tensor) -> Tensor:
    """Return int32 keys that order like the fp32 values, which hold no NaN; -0 and +0 are equal."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _bin_reaching(mass: Tensor, above: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin at which the mass from the top reaches the target ``[B, 1]``, and the mass above it."""
    reached = mass.flip(1).cumsum(1) + above
    from_top = (reached < target).sum(1, keepdim=True).clamp(max=_BINS - 1)
    before = reached.gather(1, (from_top - 1).clamp(min=0))
    return _BINS - 1 - from_top, torch.where(from_top > 0, before, above)


def keep_largest(keys: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Return the mask of the shortest prefix, largest key first and equals by index, that weighs ``target [B, 1]``.

    ``weights`` are fp64, not negative, and equal for equal keys unless 0. The first element is always kept; where the
    whole row does not reach the target, all of it is.
    """
    high = (keys >> _DIGIT) + _BINS // 2
    low = keys & (_BINS - 1)
    bins = weights.new_zeros((keys.shape[0], _BINS))
    high_bin, above = _bin_reaching(
        bins.scatter_add(1, high.to(torch.int64), weights), torch.zeros_like(target), target
    )
    live = weights.masked_fill(high != high_bin, 0.0)
    low_bin, above = _bin_reaching(bins.scatter_add(1, low.to(torch.int64), live), above, target)
    last = (((high_bin - _BINS // 2) << _DIGIT) | low_bin).to(torch.int32)
    equal = keys == last
    each = live.masked_fill(~equal, 0.0).amax(1, keepdim=True)
    rank = equal.to(torch.int32).cumsum(1, dtype=torch.int32) - 1
    return (keys > last) | (equal & ((above + rank * each < target) | (rank == 0)))
